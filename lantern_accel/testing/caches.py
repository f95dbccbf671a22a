"""Caches: what is written is read, stays, and lies where it did."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.device.backend import Backend
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, compare
from lantern_accel.testing.tolerances import dtypes_of, short

LAYERS, ROWS, CAPACITY, HEADS, WIDTH = 2, 4, 29, 3, 16


def filled_cache(backend: Backend, dtype: torch.dtype) -> tuple[KVCache, Tensor, Tensor]:
    """Return a cache with known random content, and that content: k, v [layers, R, L, H, d]."""
    k, v = (tiny.normal(n, LAYERS, ROWS, CAPACITY, HEADS, WIDTH).to(dtype) for n in (1, 2))
    return tiny.fill_cache(backend, k, v), k, v


def _hold(backend: Backend, cache: KVCache, k: Tensor, v: Tensor, what: str) -> None:
    """Raise ``what`` went wrong, and where, where the cache does not hold ``k, v`` bit for bit."""
    slots = torch.arange(CAPACITY, device=backend.device).expand(ROWS, -1)
    for layer in range(LAYERS):
        found = cache.read(layer, slots)
        for name, got, want in zip(("keys", "values"), found, (k[layer], v[layer]), strict=True):
            where = f"{what}: {name} of layer {layer} by row, slot, head and place"
            compare(got[..., :WIDTH], want.double(), 0.0, where, dtype=want.dtype)


def round_trip(backend: Backend) -> Measured:
    """Write every slot of every layer and read it back."""
    for dtype in dtypes_of(backend):
        what = f"what was written in {short(dtype)} does not come back"
        _hold(backend, *filled_cache(backend, dtype), what)
    return Measured("what is written is read, bit for bit")


def sentinels(backend: Backend) -> Measured:
    """Overwrite two slots a row, through int64 addresses; the others stay."""
    cache, k, v = filled_cache(backend, torch.float32)
    slots = torch.tensor([[3, 7], [0, 27], [5, 6], [28, 1]], device=backend.device)
    new = tiny.normal(3, ROWS, 2, HEADS, WIDTH)
    backend.write(
        cache, 1, backend.address(cache, slots), new.to(backend.device), new.to(backend.device)
    )
    for row in range(ROWS):
        k[1, row, slots[row].cpu()] = v[1, row, slots[row].cpu()] = new[row]
    _hold(backend, cache, k, v, "writing two slots of layer 1 changed others")
    return Measured("a write touches its slots alone")


def slots(backend: Backend) -> Measured:
    """Decode: a slot that holds a known position is never written again, and none is shared."""
    steps = sum(_slots(backend, name) for name in ("eagle", "lantern++", "scd"))
    return Measured(f"{steps} steps wrote to free slots alone")


def _slots(backend: Backend, strategy: str) -> int:
    """Show it of one strategy; return its steps. Positions of a window have slots of their own."""
    engine = tiny.tiny_engine(backend, strategy, batch=2)
    tiny.start(engine, seed=3)
    g, state, steps = engine.geometry, engine.state, 0
    known = torch.arange(g.prefix, g.prefix + g.tokens, dtype=backend.index, device=backend.device)
    known = known.expand(g.rows, -1)
    while int(state.length.min()) < g.tokens - 1 and steps < g.tokens:
        if isinstance(state, TreeState):
            table = state.slot_of.cpu()
            if not torch.equal(table.sort(dim=1).values, torch.arange(g.image_slots).expand(2, -1)):
                raise Failed(f"{strategy}: after {steps} steps two positions share a slot")
            known = engine.verifying.branches.rows(state.slot_of) + g.prefix
        before = engine.verifying.cache.read(0, known)
        length = state.length.cpu().clone()
        engine.step()
        steps += 1
        after = engine.verifying.cache.read(0, known)
        for row in range(g.rows):
            count = int(length[row % g.batch])
            if any(
                not torch.equal(old[row, :count].cpu(), new[row, :count].cpu())
                for old, new in zip(before, after, strict=True)
            ):
                raise Failed(f"{strategy}, step {steps} wrote to a slot of a known position")
            # A window's step writes the last token's own keys and values.
            if g.in_place and not all(new[row, count].any() for new in after):
                raise Failed(f"{strategy}, step {steps} left the last token's slot empty")
    return steps


def addresses(backend: Backend) -> Measured:
    """Show that a second request runs on the first one's memory."""
    count = 0
    for strategy in ("lantern++", "scd"):
        engine = tiny.tiny_engine(backend, strategy)
        caches = [buffer for cache in engine.caches for buffer in cache.buffers]
        before = [b.data_ptr() for b in [*engine.state.buffers.values(), *caches]]
        for seed in (0, 1):
            tiny.start(engine, seed)
            for _ in range(3):
                engine.step()
        after = [b.data_ptr() for b in [*engine.state.buffers.values(), *caches]]
        if before != after:
            raise Failed(
                f"{strategy}: a buffer moved between requests: a captured graph would read the old one"
            )
        count += len(before)
    return Measured(f"{count} buffers keep their address")


def separate(backend: Backend) -> Measured:
    """Show that keys and values of each layer are tensors of their own, which can be donated."""
    layout = backend.kv_layout(3, 2, 16, 2, 8, torch.float32)
    with torch.inference_mode(False), torch.no_grad():
        cache = backend.allocate(layout)
    for side, tensors in {"keys": cache.keys, "values": cache.values}.items():
        for layer, tensor in enumerate(tensors):
            if tensor._is_view():
                raise Failed(
                    f"the {side} of layer {layer} are a view of a larger tensor: every write in a "
                    "compiled step copies all of it; allocate one tensor per layer"
                )
    return Measured(f"{len(cache.buffers)} tensors, none a view")
