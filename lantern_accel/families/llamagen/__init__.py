"""The llamagen family."""
