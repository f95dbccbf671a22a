"""What model families share: the decoder block and its helpers."""
