"""Triton kernels; import them only where an option asks for them."""
