"""glibc's heap, set to give large tensors back as soon as they go.

A block that is large enough gets a mapping of its own. glibc raises what is large enough with every such
block that goes, up to 32 MB; the next ones share the heap, where the holes that they leave fit nothing
larger. Decoding an image, whose activations double at every level, then took 127 MB for 84 MB of tensors.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

#: Blocks of this size have a mapping of their own meanwhile; smaller ones leave small holes.
LARGE = 8 * 2**20
#: Where glibc's own rule ends, and what is set afterwards: to set a value is to end the rule.
USUAL = 32 * 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def is_glibc() -> bool:
    """Return whether the heap is glibc's."""
    return platform.libc_ver()[0] == "glibc"


@cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's function; None where there is another heap, or the user has set this one up."""
    theirs = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if not is_glibc() or any(name in os.environ for name in theirs):
        return None
    found: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    return found


def _share_below(size: int, mallopt: Callable[[int, int], int]) -> None:
    mallopt(_M_MMAP_THRESHOLD, size)
    mallopt(_M_TRIM_THRESHOLD, 2 * size)  # glibc's own proportion


@contextmanager
def trim_memory() -> Iterator[None]:
    """Let large tensors that go inside the block leave the process at once."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    _share_below(LARGE, mallopt)
    try:
        yield
    finally:
        _share_below(USUAL, mallopt)


def give_back() -> None:
    """Let the holes between the heap's blocks leave the process.

    Weights are read into the heap and packed elsewhere, so that nothing comes to fill the holes that
    they leave: loading a second model of 200 MB took 400.
    """
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)
