"""Memory in huge pages, for what every step reads from end to end: packed weights and caches.

A processor knows where some two thousand pages lie. In pages of 4 KB that is 8 MB, so a step, which reads
hundreds of megabytes, looks up a page for every 4 KB, and in a virtual machine each look-up walks two
tables. Linux gives pages of 2 MB to memory that asks for them (``madvise``). Most matrices are not
a multiple of 2 MB, so they lie one after the other in large mappings.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel_cpu import heap

#: 0 turns huge pages off.
VARIABLE = "LANTERN_ACCEL_CPU_HUGE_PAGES"
#: Bytes of a huge page. Kernels whose huge pages are larger have none here: the last of a mapping is
#: only partly used.
HUGE = 2 << 20
SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
#: Bytes of addresses that are mapped together; memory comes with the first write.
MAPPING = 256 << 20
#: Bytes after which the heap gives back what the tensors that these were made of have left.
GIVEN_BACK = 64 << 20
#: Tensors with fewer bytes are left to the heap.
LEAST = 1 << 16


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape: in huge pages where they are many and Linux has such pages."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    piece = _memory(nbytes) if nbytes >= LEAST and should_use() else None
    if piece is None:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(piece, dtype=dtype).view(shape)


def should_use() -> bool:
    """Return whether there are huge pages here, the user has them on, and tensors are real ones."""
    if os.environ.get(VARIABLE) == "0" or not _has_huge_pages():
        return False
    # A mode that counts tensors, or makes fake ones, does not see those of a buffer.
    modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return modes is None or modes() == 0


@cache
def _has_huge_pages() -> bool:
    if sys.platform != "linux":
        return False
    with suppress(OSError):
        return SIZE_FILE.read_text().strip() == str(HUGE)
    return False


class _Mapping:
    """Memory that tensors take from front to end; its addresses go when the last of them dies."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, nbytes + HUGE, flags=flags)
        with suppress(OSError):  # the kernel refuses; the memory is as good as any other
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        first = torch.frombuffer(self.memory, dtype=torch.uint8, count=1)
        self.next = -first.data_ptr() % HUGE

    def take(self, nbytes: int) -> memoryview | None:
        """Return the next bytes, all zero, on pages of their own; None where too few are left."""
        at, end = self.next, self.next + nbytes
        if end > len(self.memory):
            return None
        self.next = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        piece = memoryview(self.memory)[at:end]
        weakref.finalize(piece, _free, self.memory, at, self.next - at).atexit = False
        if at // GIVEN_BACK != self.next // GIVEN_BACK:
            heap.give_back()
        return piece


def _free(memory: mmap.mmap, at: int, nbytes: int) -> None:
    """Let the pages of a tensor that has died leave the process."""
    with suppress(OSError):  # locked memory stays until the mapping goes
        memory.madvise(mmap.MADV_DONTNEED, at, nbytes)


_lock = threading.Lock()
_current: _Mapping | None = None


def _memory(nbytes: int) -> memoryview | None:
    """Return memory for a tensor; None where no addresses are left for a mapping."""
    global _current
    with _lock:
        piece = None if _current is None else _current.take(nbytes)
        if piece is None:
            with suppress(OSError):
                _current = _Mapping(max(MAPPING, nbytes))
                piece = _current.take(nbytes)
        return piece


def _begin_in_child() -> None:
    """Start with a mapping of its own in a child of ``fork``, and a lock that no thread holds."""
    global _lock, _current
    _lock, _current = threading.Lock(), None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_begin_in_child)
