"""Training of the bundled model: data, captions, the image tokenizer and shared machinery."""
