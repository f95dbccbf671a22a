"""Tells operators that launch work on a device from those that do not."""

from __future__ import annotations

import functools

from torch._ops import OpOverload

#: Operators that reserve memory, and a view that says nothing of it.
IDLE = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}
)


@functools.cache
def computes(func: OpOverload) -> bool:
    """Return whether an operator computes something: no view, no tensor without content, no mark."""
    room, _, name = func._schema.name.partition("::")
    if room in ("prim", "profiler") or name in IDLE:
        return False
    infos = [one.alias_info for one in func._schema.returns]
    return not infos or not all(info is not None and not info.is_write for info in infos)
