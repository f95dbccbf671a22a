"""Trains the bundled model, lantern-emoji: its images, captions, scenes and trainers."""
