"""A model's files: found by name, downloaded, checked, and bundled as a folder."""
