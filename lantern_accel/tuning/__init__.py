"""Finds what is fastest on a device by measurement: trees, windows, and the drafts of auto."""
