"""Measuring: one engine for benchmarks, profiles, step costs and tuning."""
