"""Finds what is fastest on a device by measurement: a strategy's tree, and the drafts of auto."""
