"""How the bundled model, lantern-emoji, is trained: its images, captions, scenes and trainers."""
