"""Estimates the memory that a request takes, and fits requests into a device."""
