"""The way of a prompt: request, engines, pipeline, result."""
