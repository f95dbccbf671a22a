"""How much memory a request takes, and whether it fits."""
