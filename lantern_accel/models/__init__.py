"""Finds, downloads, checks and bundles a model's files."""
