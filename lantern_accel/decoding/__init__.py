"""Decodes as the papers do: prefill, then draft, verify, accept and commit, until the end."""
