"""Caches and attention against a reference: what is written stays, is seen, and lies where it did."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.decoding.trees import TreeTables
from lantern_accel.device.backend import DTYPES, Backend
from lantern_accel.device.operations import KVCache
from lantern_accel.strategy.trees import parse_tree, tree_paths
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, within

#: Largest error of attention against float64, relative to values of about 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LAYERS, ROWS, CAPACITY, HEADS, WIDTH = 2, 4, 29, 3, 16


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dtypes_of(backend: Backend) -> list[torch.dtype]:
    return [dtype for name, dtype in DTYPES.items() if backend.support(name)]


def filled(backend: Backend, dtype: torch.dtype) -> tuple[KVCache, Tensor, Tensor]:
    """Return a cache with known random content, and that content: k, v [layers, R, L, H, d]."""
    layout = backend.kv_layout(LAYERS, ROWS, CAPACITY, HEADS, WIDTH, dtype)
    cache = backend.allocate(layout)
    k = normal(1, LAYERS, ROWS, CAPACITY, HEADS, WIDTH).to(dtype)
    v = normal(2, LAYERS, ROWS, CAPACITY, HEADS, WIDTH).to(dtype)
    slots = torch.arange(CAPACITY, device=backend.device).expand(ROWS, -1)
    address = backend.address(cache, slots)
    for layer in range(LAYERS):
        backend.write(
            cache, layer, address, k[layer].to(backend.device), v[layer].to(backend.device)
        )
    return cache, k, v


def _holds(backend: Backend, cache: KVCache, k: Tensor, v: Tensor) -> str:
    """Say in which layer the cache does not hold ``k, v`` bit for bit; empty where it does."""
    slots = torch.arange(CAPACITY, device=backend.device).expand(ROWS, -1)
    for layer in range(LAYERS):
        found = backend.read(cache, layer, slots)
        for name, got, want in zip(("keys", "values"), found, (k[layer], v[layer]), strict=True):
            if not torch.equal(got[..., :WIDTH].cpu(), want):
                return f"{name} of layer {layer}"
    return _seen(backend, cache, k, v)


def _seen(backend: Backend, cache: KVCache, k: Tensor, v: Tensor) -> str:
    """Say in which layer attention over all slots does not see ``k, v``; empty where it does.

    What is read must be what attention reads: compared with float64, within attention's tolerance.
    """
    dtype = cache.layout.dtype
    q = normal(4, ROWS, 5, HEADS, WIDTH).to(dtype)
    seen = torch.zeros(ROWS, 1, 5, cache.layout.capacity, dtype=torch.bool)
    seen[..., :CAPACITY] = True
    mask = backend.mask(seen.to(backend.device), dtype)
    for layer in range(LAYERS):
        scores = torch.einsum("rthd,rlhd->rhtl", q.double(), k[layer].double())
        want = torch.einsum(
            "rhtl,rlhd->rthd", (scores * WIDTH**-0.5).softmax(-1), v[layer].double()
        )
        got = backend.attend(q.to(backend.device), cache, layer, mask).cpu().double()
        if not (got - want).abs().max() <= TOLERANCE[dtype]:
            return f"what attention sees of layer {layer}"
    return ""


def round_trip(backend: Backend) -> Measured:
    """Write every slot of every layer and read it back."""
    for dtype in dtypes_of(backend):
        cache, k, v = filled(backend, dtype)
        if wrong := _holds(backend, cache, k, v):
            raise Failed(f"what was written in {dtype} does not come back (seen in {wrong})")
    return Measured("what is written is read, bit for bit, and seen by attention")


def sentinels(backend: Backend) -> Measured:
    """Overwrite two slots a row, through int64 addresses; the others stay."""
    cache, k, v = filled(backend, torch.float32)
    slots = torch.tensor([[3, 7], [0, 27], [5, 6], [28, 1]], device=backend.device)
    new = normal(3, ROWS, 2, HEADS, WIDTH)
    backend.write(
        cache, 1, backend.address(cache, slots), new.to(backend.device), new.to(backend.device)
    )
    for row in range(ROWS):
        k[1, row, slots[row].cpu()] = v[1, row, slots[row].cpu()] = new[row]
    if wrong := _holds(backend, cache, k, v):
        raise Failed(f"writing two slots of layer 1 changed others (seen in {wrong})")
    return Measured("a write touches its slots alone")


def slots(backend: Backend) -> Measured:
    """Decode: a slot that holds a committed position is never written again, and none is shared."""
    steps = 0
    for strategy in ("eagle", "lantern++"):
        engine = tiny.tiny_engine(backend, strategy, batch=2)
        tiny.start(engine, seed=3)
        g, state = engine.geometry, engine.state
        branches = engine.verifying.branches
        for _ in range(g.tokens):
            table = state.slot_of.cpu()
            if not torch.equal(table.sort(dim=1).values, torch.arange(g.image_slots).expand(2, -1)):
                raise Failed(f"after {steps} steps two positions share a slot")
            known = branches.rows(state.slot_of) + g.prefix
            before = backend.read(engine.verifying.cache, 0, known)
            length = state.length.clone().cpu()
            engine.step()
            steps += 1
            after = backend.read(engine.verifying.cache, 0, known)
            for row in range(g.rows):
                count = int(length[row % g.batch])
                for old, new in zip(before, after, strict=True):
                    if not torch.equal(old[row, :count].cpu(), new[row, :count].cpu()):
                        raise Failed(f"step {steps} wrote to a slot of a committed position")
            if int(state.length.min()) >= g.tokens - 1:
                break
    steps += sum(_window_slots(backend, strategy) for strategy in ("scd", "sjd-pac"))
    return Measured(f"{steps} steps wrote to free slots alone")


def _window_slots(backend: Backend, strategy: str) -> int:
    """Show the same of a window, whose positions have slots of their own; return its steps."""
    engine = tiny.tiny_engine(backend, strategy, batch=2)
    tiny.start(engine, seed=3)
    g, state, steps = engine.geometry, engine.state, 0
    slots = torch.arange(g.prefix, g.prefix + g.tokens, dtype=backend.index, device=backend.device)
    known = slots.expand(g.rows, -1)
    while int(state.length.min()) < g.tokens - 1 and steps < g.tokens:
        before = backend.read(engine.verifying.cache, 0, known)
        length = state.length.clone().cpu()  # its own keys are written by the step
        engine.step()
        steps += 1
        after = backend.read(engine.verifying.cache, 0, known)
        for row in range(g.rows):
            count = int(length[row % g.batch])
            for old, new in zip(before, after, strict=True):
                if not torch.equal(old[row, :count].cpu(), new[row, :count].cpu()):
                    raise Failed(f"{strategy}, step {steps} wrote to a slot of a known position")
                if not new[row, count].any():
                    raise Failed(f"{strategy}, step {steps} left the last token's slot empty")
    return steps


def attention(backend: Backend) -> Measured:
    """Compare tree attention with float64 on the host, in every dtype of the device."""
    worst, at = 0.0, 1.0
    tree = TreeTables(tree_paths(parse_tree("0,1,2,00,01,10,000")))
    for dtype in dtypes_of(backend):
        cache, k, v = filled(backend, dtype)
        nodes = tree.nodes
        visible = torch.zeros(ROWS, 1, nodes, cache.layout.capacity, dtype=torch.bool)
        visible[..., :11] = True
        visible[..., 12 : 12 + nodes] = tree.visible
        q = normal(5, ROWS, nodes, HEADS, WIDTH).to(dtype)
        mask = backend.mask(visible.to(backend.device), dtype)
        got = backend.attend(q.to(backend.device), cache, 1, mask).cpu().double()
        scores = torch.einsum("rthd,rlhd->rhtl", q.double(), k[1].double()) * WIDTH**-0.5
        scores = scores.masked_fill(~visible[..., :CAPACITY], float("-inf"))
        want = torch.einsum("rhtl,rlhd->rthd", scores.softmax(-1), v[1].double())
        error = float((got - want).abs().max())
        if error / TOLERANCE[dtype] >= worst / at:
            worst, at = error, TOLERANCE[dtype]
        within(error, TOLERANCE[dtype], f"tree attention in {dtype}")
    return within(worst, at, "tree attention against float64")


def addresses(backend: Backend) -> Measured:
    """Show that a second request runs on the first one's memory."""
    count = 0
    for strategy in ("lantern++", "sjd-pac"):
        engine = tiny.tiny_engine(backend, strategy)
        caches = [*engine.verifying.cache.buffers]
        if engine.drafting is not None:
            caches += engine.drafting.cache.buffers
        before = [b.data_ptr() for b in [*vars(engine.state).values(), *caches]]
        for seed in (0, 1):
            tiny.start(engine, seed)
            for _ in range(3):
                engine.step()
        after = [b.data_ptr() for b in [*vars(engine.state).values(), *caches]]
        if before != after:
            raise Failed(
                f"{strategy}: a buffer moved between requests: a captured graph would read the old one"
            )
        count += len(before)
    return Measured(f"{count} buffers keep their address")


CHECKS: dict[str, Callable[[Backend], Measured]] = {
    "kv.round_trip": round_trip,
    "kv.sentinels": sentinels,
    "kv.slots": slots,
    "kv.addresses": addresses,
    "attention.float64": attention,
}
