"""Strategies as values, the presets that were published, and the store of tuned trees."""
