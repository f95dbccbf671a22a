"""Times one captured step on random weights from the middle of an image, and counts what it needs."""

from __future__ import annotations

import statistics

import torch

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.state import State
from lantern_accel.decoding.trees import DraftTree, TreeTables
from lantern_accel.device.backend import Backend, Replay, recorded
from lantern_accel.measure.phases import LaunchCounter
from lantern_accel.measure.work import step_needs
from lantern_accel.strategy.trees import tree_paths
from lantern_accel.strategy.values import Path, StaticTree

#: Steps between two looks at the clock.
INNER = 10


def bush(nodes: int) -> StaticTree:
    """Return a tree of ``nodes`` with the root, filled breadth first, four children per node."""
    paths: list[Path] = []
    level: list[Path] = [()]
    while len(paths) < nodes - 1:
        level = [(*path, rank) for path in level for rank in range(4)]
        paths += level
    return StaticTree(name=f"bush_{nodes}", paths=tuple(paths[: nodes - 1]))


class Timed:
    """One captured function of an engine, timed from the middle of an image, in the bucket of there."""

    def __init__(self, backend: Backend, engine: EngineBase, kind: str) -> None:
        self.backend, self.engine, self.kind = backend, engine, kind
        g = engine.geometry
        self.middle = g.tokens // 2
        self.inner = max(min(INNER, (g.tokens - self.middle) // (g.depth + 1) - 1), 1)
        need = g.prefix + g.ahead + self.middle + self.inner * (g.depth + 1)
        self.slots = next((n for n in engine.sizes if n >= need), engine.sizes[-1])
        self.function = engine.steps[self.slots]
        if kind == "verify":
            tables = TreeTables(tree_paths(engine.strategy.tree))
            topology = tables.topology(g.batch, backend.device, backend.index)
            topology.pop("group")
            tokens = torch.zeros(g.batch, g.nodes, dtype=backend.index, device=backend.device)
            self.tree = DraftTree(tokens=tokens, max_children=tables.max_children, **topology)
            self.sink = torch.zeros(g.batch, g.nodes, device=backend.device)
            self.function = self.verify
        state = engine.state
        state.reset()
        state.prefix_mask.fill_(True)
        state.uniforms.fill_(0.5)
        self._rewind()
        with LaunchCounter() as counter:
            self.function()
        self.operators = counter.counts.get("other", 0)
        self.replay: Replay = recorded(backend, self.function, kind)
        self.replay.expect(1000)

    def verify(self) -> None:
        """Verification alone; one column is kept, so that a compiler does not drop the head."""
        state = self.engine.state
        assert isinstance(state, State)
        _, logits = self.engine.verifying.verify(state, self.tree, self.slots)
        self.sink.copy_(logits[:, :, 0])

    def _rewind(self) -> None:
        state = self.engine.state
        state.length.fill_(self.middle)
        state.step.fill_(self.middle)
        if hasattr(state, "pending_count"):
            state.pending_count.fill_(1)

    def needs(self) -> tuple[float, float]:
        """Return operations and bytes that this kind of step needs at least."""
        found = step_needs(self.engine)
        parts = [found["verify"]] if self.kind == "verify" else list(found.values())
        return sum(ops for ops, _ in parts), sum(nbytes for _, nbytes in parts)

    def ms(self) -> float:
        """Time a few steps and return the milliseconds of one."""
        self._rewind()
        with self.backend.stopwatch() as watch:
            for _ in range(self.inner):
                self.replay()
        return 1e3 * watch.seconds / self.inner

    def phase_ms(self) -> dict[str, float] | None:
        """Return milliseconds by phase where the recording keeps phases apart."""
        self._rewind()
        found: dict[str, list[float]] = {}
        for _ in range(self.inner):
            for name, seconds in (self.replay.timed() or {}).items():
                found.setdefault(name, []).append(1e3 * seconds)
        return {name: statistics.median(ms) for name, ms in found.items()} or None
