"""What one step needs at least: operations and bytes of each phase, from the model's sizes.

Every weight and every cache slot is read once a pass (shapes are static, so a pass reads the whole
cache), activations and logits are written once and read once. Launches are not computed but counted,
while a real step runs. A multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.decoding.running import Running
from lantern_accel.decoding.state import Geometry
from lantern_accel.families.base import Trunk
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.bench import PHASES
from lantern_accel.measure.record import Work
from lantern_accel.strategy.values import DynamicTree, Sampling, Strategy

#: Times the probabilities [B, T, V] in float32 are read or written by filtering and acceptance:
#: top-k, exponential, normalisation, cumulative sum, draw.
PASSES_OVER_LOGITS = 6
LOGIT_BYTES = 4


def step_work(
    target: Trunk,
    drafter: Trunk | None,
    strategy: Strategy,
    sampling: Sampling,
    geometry: Geometry,
    itemsize: int,
    levels: list[int],
) -> dict[str, tuple[float, float]]:
    """Return (operations, bytes) of draft, verify, accept and commit in one step of ``geometry``.

    ``itemsize``: bytes a weight and activation. ``levels``: nodes of each drafting pass after the
    drafter's catch-up, the root's level included in the catch-up.
    """
    g = geometry
    draft = [0.0, 0.0]
    if drafter is not None and g.depth:
        own = 2 * drafter.dim**2  # the layer that joins token and feature
        passes = [g.depth + 1, *levels]
        for index, nodes in enumerate(passes):
            ops, size = _blocks(drafter, g.rows, nodes, g.drafter_slots)
            heads = 1 if index == 0 else nodes  # after the catch-up only the root's state is read
            # The target's states are joined where they are read: in the catch-up.
            fuse = (g.taps + 1) * drafter.dim**2 if g.taps and index == 0 else 0
            join = own + fuse
            draft[0] += ops + 2 * g.rows * nodes * join + 2 * g.rows * heads * g.dim * g.vocab
            draft[1] += itemsize * (size + join + g.dim * g.vocab)
            draft[1] += _logits(g.batch, g.rows, heads, g.vocab)
    ops, size = _blocks(target, g.rows, g.nodes, g.target_slots)
    verify = (
        ops + 2 * g.rows * g.nodes * g.dim * g.vocab,
        itemsize * (size + g.dim * g.vocab) + 2 * LOGIT_BYTES * g.rows * g.nodes * g.vocab,
    )
    cells = g.batch * g.nodes * g.vocab
    table = LOGIT_BYTES * g.batch * g.nodes * strategy.neighbours
    over = 1 if sampling.greedy else PASSES_OVER_LOGITS
    accept = (float(over * cells), float(over * cells * LOGIT_BYTES + table))
    moved = 2 * (g.depth + 1) * g.rows * 2 * g.dim * target.n_layer
    commit = (0.0, float(itemsize * moved)) if g.nodes > 1 else (0.0, 0.0)
    return {"draft": (draft[0], draft[1]), "verify": verify, "accept": accept, "commit": commit}


def prefill_work(
    target: Trunk, drafter: Trunk | None, geometry: Geometry, itemsize: int
) -> tuple[float, float]:
    """Return (operations, bytes) of the prompt's pass through target and drafter."""
    g = geometry
    ops, size = _blocks(target, g.rows, g.prefix, g.target_slots)
    ops += 2 * g.rows * g.dim * g.vocab
    size += g.dim * g.vocab
    if drafter is not None and g.prefix > 1:
        more, read = _blocks(drafter, g.rows, g.prefix - 1, g.drafter_slots)
        ops, size = ops + more, size + read + 2 * drafter.dim**2
    return ops, float(itemsize * size)


def _blocks(trunk: Trunk, rows: int, nodes: int, slots: int) -> tuple[float, float]:
    """Return (operations, elements moved) of decoder blocks over ``rows x nodes`` positions."""
    layers, dim, hidden, weights = trunk.n_layer, trunk.dim, trunk.hidden_dim, trunk.weights
    positions = rows * nodes
    ops = positions * (2 * weights + 4 * slots * dim)
    # q, k, v, the attention's output, two residual sums, gate and up: each written and read.
    activations = 2 * positions * (7 * dim + 3 * hidden)
    caches = 2 * rows * (slots + nodes) * dim
    return float(layers * ops), float(layers * (weights + activations + caches))


def _logits(batch: int, rows: int, nodes: int, vocab: int) -> float:
    return float(LOGIT_BYTES * vocab * nodes * (2 * rows + PASSES_OVER_LOGITS * batch))


def levels_of(engine: Running) -> list[int]:
    """Return the nodes of each drafting pass after the catch-up."""
    tree = engine.strategy.tree
    if engine.drafting is None:
        return []
    if isinstance(tree, DynamicTree):
        return [tree.top_k] * tree.depth
    tables = engine.drafting.tables
    assert tables is not None
    return [len(level) for level in tables.inner[1:] if level]


# torch leaves the base class untyped.
class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by phase; views, which launch nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "other"
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not _is_view(func):
            self.counts[self.phase] = self.counts.get(self.phase, 0) + 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    infos = [one.alias_info for one in func._schema.returns]
    return bool(infos) and all(i is not None and not i.is_write for i in infos)


def count_launches(engine: Running) -> dict[str, int]:
    """Run prefill and one eager step of a loaded engine; return the operators of each phase."""
    counter = LaunchCounter()
    ops = engine.ops

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before, counter.phase = counter.phase, name
        try:
            yield
        finally:
            counter.phase = before

    vars(ops)["phase"] = phase
    try:
        with counter:
            with phase("prefill"):
                engine.prefill()
            engine.step()
    finally:
        del vars(ops)["phase"]
    return counter.counts


def measure_work(pipeline: Pipeline, engine: Running) -> dict[str, Work]:
    """Return the work of prefill and of each phase of a step, launches counted on this device."""
    manifest, kind = pipeline.model.manifest, pipeline.model.family
    target = kind.trunk(manifest.target)
    drafter = kind.trunk(manifest.drafter) if engine.drafting is not None else None
    size = pipeline.dtype.itemsize
    counts = count_launches(engine)
    found = step_work(
        target,
        drafter,
        engine.strategy,
        engine.sampling,
        engine.geometry,
        size,
        levels_of(engine),
    ) | {"prefill": prefill_work(target, drafter, engine.geometry, size)}
    return {
        name: Work(flops=found[name][0], bytes=found[name][1], launches=counts.get(name, 0))
        for name in ("prefill", *PHASES)
    }
