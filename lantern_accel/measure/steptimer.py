"""One captured step on random weights, timed from the middle of an image, and its floor in bytes."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.trees import DraftTree, TreeTables, tree_paths
from lantern_accel.device.backend import Backend, Replay
from lantern_accel.strategy.values import Path, StaticTree
from lantern_accel.testing.trace import Recorder

#: Steps between two looks at the clock.
INNER = 10


def bush(nodes: int) -> StaticTree:
    """Return a tree of ``nodes`` with the root, filled breadth first, four children a node."""
    paths: list[Path] = []
    level: list[Path] = [()]
    while len(paths) < nodes - 1:
        level = [(*path, rank) for path in level for rank in range(4)]
        paths += level
    return StaticTree(name=f"bush_{nodes}", paths=tuple(paths[: nodes - 1]))


# --- floors -------------------------------------------------------------------------------------


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def floor_bytes(engine: Engine, kind: str) -> int:
    """Return the bytes that a step must move: weights once a pass, and the keys and values seen.

    Embedding tables are not counted (a few rows are read), nor activations. A drafting step reads the
    drafter once a pass and the target's head once a level.
    """
    g = engine.geometry
    target: Any = engine.verifying.target
    width = target.output.weight.element_size()
    head = target.output.weight.numel()
    weights = sum(_numbers(block) for block in target.layers) + head
    seen = g.prefix + int(engine.state.length.max()) + 1
    layout = engine.verifying.cache.layout
    row = 2 * g.rows * target.config.n_head * target.config.head_dim * width
    total = weights * width + layout.layers * row * (seen + g.nodes)
    drafting = engine.drafting
    if kind != "step" or drafting is None:
        return int(total)
    if drafting.dynamic is not None:
        passes = levels = 1 + drafting.dynamic.depth
    else:
        assert drafting.tables is not None
        levels = len(drafting.tables.inner)
        passes = 1 + sum(bool(level) for level in drafting.tables.inner[1:])
    drafter: Any = drafting.drafter
    each = _numbers(drafter.fc) + sum(_numbers(block) for block in drafter.layers)
    once = 0 if drafter.fuse is None else _numbers(drafter.fuse)  # in the catch-up
    seen_bytes = len(drafter.layers) * row * seen
    return int(total + passes * (each * width + seen_bytes) + (once + levels * head) * width)


def floor_flops(engine: Engine, kind: str) -> int:
    """Return the operations that a step must do: two for every weight and row that meets it.

    Rows are nodes times guidance branches times images. Attention over the cache is counted for the
    target alone, and nothing for norms, softmax and acceptance.
    """
    g = engine.geometry
    target: Any = engine.verifying.target
    rows = g.rows * g.nodes
    seen = g.prefix + int(engine.state.length.max()) + g.nodes
    layout = engine.verifying.cache.layout
    attention = 4 * layout.layers * rows * seen * target.config.n_head * target.config.head_dim
    head = target.output.weight.numel()
    total = 2 * rows * (sum(_numbers(block) for block in target.layers) + head) + attention
    drafting = engine.drafting
    if kind != "step" or drafting is None:
        return int(total)
    drafter: Any = drafting.drafter
    each = _numbers(drafter.fc) + sum(_numbers(block) for block in drafter.layers) + head
    # Every node but the last level's leaves is expanded once, and the accepted ones are caught up on.
    return int(total + 2 * g.rows * (g.depth + 1) * each)


# --- timing -------------------------------------------------------------------------------------


class Timed:
    """One captured function of an engine, timed from the middle of an image."""

    def __init__(self, backend: Backend, engine: Engine, kind: str) -> None:
        self.backend, self.engine = backend, engine
        g = engine.geometry
        self.middle = g.tokens // 2
        self.inner = max(min(INNER, (g.tokens - self.middle) // (g.depth + 1) - 1), 1)
        self.function = engine.step
        if kind == "verify":
            self.tree = _tree(engine, backend)
            self.sink = torch.zeros(g.batch, g.nodes, device=backend.device)
            self.function = self.verify
        self._load()
        self.operators = self._count()
        self.replay: Replay = backend.capture(self.function, kind)
        self.replay.expect(1000)

    def verify(self) -> None:
        """Verification alone; one column is kept, so that a compiler does not drop the head."""
        _, logits = self.engine.verifying.verify(self.engine.state, self.tree)
        self.sink.copy_(logits[:, :, 0])

    def _load(self) -> None:
        state = self.engine.state
        state.reset()
        state.prefix_mask.fill_(True)
        state.uniforms.fill_(0.5)
        self._rewind()

    def _rewind(self) -> None:
        state = self.engine.state
        state.length.fill_(self.middle)
        state.step.fill_(self.middle)
        state.pending_count.fill_(1)

    def _count(self) -> int:
        """Count the operators of one step that compute; views cost nothing on a device."""
        recorder = Recorder(self.backend.device)
        with recorder:
            self.function()
        return sum(not _is_view(entry[0]) for entry in recorder.signature)

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


def _is_view(name: str) -> bool:
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return False
    schema = getattr(packet, overload or "default")._schema
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def _tree(engine: Engine, backend: Backend) -> DraftTree:
    tables = TreeTables(tree_paths(engine.strategy.tree))
    g, index = engine.geometry, backend.index
    topology: dict[str, Tensor] = tables.topology(g.batch, backend.device, index)
    topology.pop("group")
    tokens = torch.zeros(g.batch, g.nodes, dtype=index, device=backend.device)
    return DraftTree(tokens=tokens, max_children=tables.max_children, **topology)
