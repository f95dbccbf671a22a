"""Chooses how much of the cache a step reads: buckets of visible slots, and which one is next.

Attention reads every slot that it is given. The host learns lengths late: until it does, it goes by the
most tokens that steps can have added (:class:`~.host_loop.HostLoop`), so that no bucket is left too late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.device.operations import TensorOps

#: Slots of the smallest bucket; a cache of up to two of them has no other than the whole.
FIRST = 256
#: A bucket this close to the one after it saves less than its graph costs.
APART = 1.2
#: The share of a step's bytes that a bucket spares at least, where its graph takes long to compile.
SAVING = 0.05


def buckets(
    whole: int, needed: int, aligned: Callable[[int], int] = lambda slots: slots
) -> list[int]:
    """Return the buckets below a cache of ``whole`` slots, rising; none where the whole is small.

    256, 512, 1024, ... slots. Between the last of these and the whole, where most steps run, lies one
    more. ``needed``: what the first step of an image needs; ``aligned`` rounds up to what a device
    multiplies well.
    """
    if whole <= 2 * FIRST:
        return []
    sizes = [FIRST]
    while APART * 2 * sizes[-1] <= whole:
        sizes.append(2 * sizes[-1])
    sizes.append(round((sizes[-1] + whole) / FIRST) * (FIRST // 2))
    found: list[int] = []
    for size in sorted({aligned(size) for size in sizes}, reverse=True):
        after = found[0] if found else whole
        if size >= needed and APART * size <= after:
            found.insert(0, size)
    return found


def usual(g: Geometry, layout: KVLayout, ops: TensorOps, target: object = None) -> list[int]:
    """Return the buckets of an engine's cache below the whole, as its device lays caches out.

    Where graphs compile long, only those that spare :data:`SAVING` of a step's bytes, with ``target``'s.
    """
    if ops.preferences.skips_hidden:
        return []

    def round_up(slots: int) -> int:
        at = layout
        return ops.kv_layout(at.layers, at.rows, slots, at.heads, at.head_dim, at.dtype).capacity

    found = buckets(layout.capacity, g.prefix + g.ahead, round_up)
    if not ops.preferences.compiles:
        return found
    parts = (target.parameters(), target.buffers()) if isinstance(target, nn.Module) else ()
    step = layout.nbytes + sum(one.nbytes for part in parts for one in part)
    least = SAVING * step * layout.capacity / layout.nbytes

    def read(without: int = 0) -> float:
        """Return the slots that a step reads without a bucket, on average over an image's tokens."""
        chooser = BucketChooser([n for n in (*found, layout.capacity) if n != without], g)
        return sum(chooser.size(n) for n in range(g.tokens)) / g.tokens

    while found and read() + least > read(worst := min(found, key=read)):
        found.remove(worst)
    return found


class BucketChooser:
    """Chooses the bucket of a step, by how far the fastest image can be.

    ``sizes`` rise, and the last one always serves. With ``n`` tokens committed, a step needs ``prefix +
    n + ahead`` slots.
    """

    def __init__(self, sizes: Sequence[int], g: Geometry) -> None:
        self.sizes, self.tokens = sorted(sizes), g.tokens
        self.fixed = g.prefix + g.ahead

    def size(self, length: int) -> int:
        """Return the smallest bucket that serves a step behind this many committed tokens."""
        need = self.fixed + min(length, self.tokens - 1)
        return next((size for size in self.sizes if size >= need), self.sizes[-1])
