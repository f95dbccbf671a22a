"""Weights on disk: opening, loading, finding and checking them."""
