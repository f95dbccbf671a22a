"""Loads a service of images with many clients, and says what they saw."""
