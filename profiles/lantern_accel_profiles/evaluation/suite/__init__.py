"""The papers' tables: every strategy on the same prompts, scored as the papers score."""
