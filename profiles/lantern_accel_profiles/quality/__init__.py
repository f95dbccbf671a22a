"""The quality of images: the feature network, distances and teacher-forced scores."""
