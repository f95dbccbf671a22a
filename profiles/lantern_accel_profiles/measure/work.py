"""Takes a step apart: the seconds, operators and bytes of its phases, and the least that they need.

The floor is max(bytes / bandwidth, operations / rate). Every weight is read once per pass, and so is
every key and value that a query sees; embedding tables (a few rows), activations and logits may stay in
a device's caches and are not counted. Operations are those of the matmuls, a multiply-add
counting as two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.copy import CopyDrafts
from lantern_accel.decoding.step import Step
from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import listening
from lantern_accel.device.launches import computes
from lantern_accel.nn.draft_head import DraftHead
from lantern_accel.nn.transformer import projections
from lantern_accel.strategy.trees import TreeTables
from lantern_accel_profiles.measure.record import STEP_PHASES, Ceilings, Reading, not_measured


@contextmanager
def timed_phases(backend: Backend) -> Iterator[dict[str, float]]:
    """Sum the seconds of each phase inside the block; the device is waited for at every edge."""
    sums = dict.fromkeys(STEP_PHASES, 0.0)

    @contextmanager
    def time_phase(name: str) -> Iterator[None]:
        with backend.stopwatch() as watch:
            yield
        sums[name] += watch.seconds

    with listening(backend, time_phase):
        yield sums


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Counts operators; views and allocations, which launch nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        self.count = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.count += computes(func)
        return func(*args, **(kwargs or {}))


Need = tuple[float, float]
"""Operations and bytes."""


def numbers(*modules: nn.Module | None) -> int:
    """Return how many parameters modules have."""
    return sum(p.numel() for m in modules if m is not None for p in m.parameters())


def visible_slots(engine: Engine, length: int | None = None) -> int:
    """Return the cache slots that a query sees at ``length`` image tokens; None: the middle."""
    g = engine.geometry
    return g.prefix + (g.tokens // 2 if length is None else length) + 1


def step_needs(engine: Engine, seen: int | None = None) -> dict[str, Need]:
    """Return operations and bytes of draft, verify, accept and commit at ``seen`` visible slots.

    Acceptance and commit need nothing by this count: what they read may still be in a cache. But a
    window's commit guesses the next drafts where a draft head does. Of an engine of several lengths: a
    step of the longest.
    """
    seen = visible_slots(engine) if seen is None else seen
    step = engine.by_length[max(engine.lengths)]
    target: Any = step.verifying.target
    g = step.geometry
    needs = dict.fromkeys(STEP_PHASES, (0.0, 0.0))
    head = target.weight
    needs["verify"] = _pass(target, head, g.rows, g.nodes, g.nodes, seen + g.nodes)
    if isinstance(source := step.source, CopyDrafts):
        copy, own = source.copy.verifying.target, source.copy.geometry.nodes
        ops, size = _pass(copy, copy.weight, g.rows, own, own, seen + own)
        needs["draft"] = source.passes * ops, source.passes * size
    elif g.guesses:
        needs["commit"] = _guessing(target.draft_head, g.batch, g.nodes - 1)
    elif (drafter := step.drafter) is not None:
        fuse = getattr(drafter, "fuse", None)
        # The catch-up runs depth + 1 positions and samples one; each level samples all its nodes.
        passes = [(g.depth + 1, 1), *((nodes, nodes) for nodes in drafted_levels(step))]
        parts = [_pass(drafter, head, g.rows, n, heads, seen) for n, heads in passes]
        extra = numbers(fuse)
        width = head.element_size()
        needs["draft"] = (
            sum(ops for ops, _ in parts) + 2.0 * g.rows * (g.depth + 1) * extra,
            sum(size for _, size in parts) + float(extra * width),
        )
    return needs


def _guessing(head: DraftHead, images: int, guesses: int) -> Need:
    """Return the needs of a window's guesses: states are projected at once, logits made one by one."""
    state, seen = head.state.numel(), head.seen.numel()
    each = guesses * (head.mid.numel() + head.head.numel())
    operations = 2.0 * images * (state + (guesses + 1) * seen + each)
    return operations, float(head.head.element_size() * (state + seen + each))


def _count_spared(part: Any, head: Tensor) -> float:
    """Return the bytes that a pass does not read, since its weights are quantized."""
    found = projections(getattr(part, "layers", part))
    found += [one for one in projections(part) if one.weight is head and one not in found]
    spared = 0.0
    for one in found:
        how = getattr(one.packed, "rounding", None)
        if how is not None:
            bits = getattr(one.packed, "bits_per_weight", how.bits_per_weight)  # as it is kept
            spared += one.weight.numel() * (one.weight.element_size() - bits / 8)
    return spared


def _pass(part: Any, head: Tensor, rows: int, nodes: int, heads: int, slots: int) -> Need:
    """Return the needs of one pass of ``nodes`` positions per row that attend to ``slots``.

    ``heads``: positions per row whose logits are computed. A drafter's ``fc`` joins token and feature.
    """
    config = part.config
    width = head.element_size()
    layers = config.n_layer
    dim = config.n_head * config.head_dim
    # A family that keeps its blocks elsewhere is charged for all that it has.
    weights = numbers(getattr(part, "layers", part), getattr(part, "fc", None))
    head_size = head.numel() if heads else 0
    operations = 2.0 * rows * (nodes * weights + heads * head_size)
    operations += 4.0 * rows * nodes * slots * dim * layers
    kept = getattr(config, "kv_heads", config.n_head) * config.head_dim
    cache = 2.0 * layers * rows * slots * kept
    return operations, width * (weights + head_size + cache) - _count_spared(part, head)


def drafted_levels(step: Engine | Step) -> list[int]:
    """Return the nodes of each drafting pass after the catch-up."""
    if not step.geometry.drafted:
        return []
    tree = step.source.given.config
    tables: TreeTables | None = getattr(step.source, "tables", None)
    if tables is None:
        return [tree.top_k] * tree.depth
    return [len(level) for level in tables.inner[1:] if level]


def floor_of(flops: float, nbytes: float, ceilings: Ceilings, dtype: str) -> Reading:
    """Return the least seconds of work under measured ceilings, or why that is not known."""
    rate = ceilings.matmul_flops.get(dtype, not_measured(f"no matmuls in {dtype}"))
    width = ceilings.bandwidth
    if isinstance(rate, str) or isinstance(width, str):
        return rate if isinstance(rate, str) else width
    return max(nbytes / width, flops / rate)
