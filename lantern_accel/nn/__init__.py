"""The decoder block that all model families share, and its helpers."""
