"""Inputs that a hostile user would try: words of every command, and files damaged field by field."""
