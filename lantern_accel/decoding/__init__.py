"""Decoding, as the papers tell it: prefill, then draft, verify, accept, commit, until the end."""
