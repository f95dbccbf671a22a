"""Measures devices and models, and writes reports: an own package over :mod:`lantern_accel`."""
