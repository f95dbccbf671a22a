"""What several test modules share; on the path through ``pythonpath`` in pyproject.toml."""
