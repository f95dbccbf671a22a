"""Native kernels of the CPU: C++ behind a plain C interface, for every torch, chosen at run time.

``build`` finds or compiles the library, ``library`` is its C interface, ``kernels`` takes tensors, and
``trunk`` runs a whole stack of decoder blocks in one call.
"""
