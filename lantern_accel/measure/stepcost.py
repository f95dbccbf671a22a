"""Measures a step at real sizes on random weights, next to the least that it could cost.

A vanilla step, verification alone at several node counts and a whole LANTERN step are timed in turns
with vanilla, from the middle of an image, and passes of the target over 1 to 64 rows in turns with plain
decoding's, so that ratios hold on a machine that drifts. The floor of a
step is :func:`~lantern_accel.measure.work.floor_of` under ceilings that are measured first. How many
tokens a step brings is a property of weights: it is a stated number or one from a run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from lantern_accel import store
from lantern_accel.decoding.forced import forced_pass
from lantern_accel.decoding.geometry import check as check_settings
from lantern_accel.decoding.step_engine import StepEngine
from lantern_accel.decoding.trees import DraftTree, TreeTables
from lantern_accel.device.backend import Backend, check_clock, recorded
from lantern_accel.device.capture import Replay
from lantern_accel.errors import RequestError
from lantern_accel.families.base import Found
from lantern_accel.families.random_weights import RandomModel, random_model, with_head
from lantern_accel.measure import work
from lantern_accel.measure.ceilings import measure_ceilings
from lantern_accel.measure.environment import describe
from lantern_accel.measure.reading import read_run
from lantern_accel.measure.record import Ceilings, Environment, is_measured
from lantern_accel.measure.work import LaunchCounter, step_needs
from lantern_accel.memory.limits import Capacity, check_weights
from lantern_accel.nn.rounding import FULL, rounding
from lantern_accel.quality.interval import relative_spread
from lantern_accel.records import Record, markdown_table
from lantern_accel.strategy.trees import (
    EAGLE2_TREE,
    NAIVE_EXTEND_57,
    parse_tree,
    tree_paths,
)
from lantern_accel.strategy.values import (
    Sampling,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

COMMAND = "lantern-accel stepcost"
#: Columns of the table: the field of a row, and how it is written.
COLUMNS = {
    "step": ("step", ""), "batch": ("batch", ""), "nodes": ("nodes", ""), "rows": ("rows", ""),
    "ms": ("ms", ".3f"), "±": ("spread", ".0%"), "over plain": ("over_vanilla", ".2f"),
    "floor ms": ("floor_ms", ".3f"), "of the floor": ("of_floor", ".0%"),
    "operators": ("operators", ""), "conversion": ("conversion", ".2f"),
    "speed-up": ("speedup", ".2f"),
}  # fmt: skip


# --- the record -----------------------------------------------------------------------------------


class Acceptance(Record):
    """Tokens that a step of the strategy brings, and where the number comes from."""

    tokens_per_step: float = Field(ge=1, allow_inf_nan=False)
    source: str


class Cost(Record):
    """One kind of step: its samples, vanilla's taken in turns with them, and what it needs.

    A ``pass`` is the target's alone, without guidance, so that it has as many rows as nodes; what it is
    taken in turns with is a pass of as many rows as vanilla's.
    """

    kind: Literal["pass", "vanilla", "verify", "step"]
    label: str
    batch: int
    nodes: int
    rows: int | None = Field(None, description="of a pass of the target; null: an older file")
    ms: list[float] = Field(default_factory=list)
    vanilla_ms: list[float] = Field(default_factory=list)
    floor_flops: float = 0.0
    floor_bytes: float = 0.0
    operators: int = 0
    captured: bool = False
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    phase_ms: dict[str, float] | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.label, self.batch

    @property
    def over_vanilla(self) -> float:
        """Median of the ratios to the plain step, or pass, timed next to each sample."""
        return statistics.median(a / b for a, b in zip(self.ms, self.vanilla_ms, strict=True))


class StepCost(Record):
    """A whole measurement; ``settings`` must agree for one to be resumed."""

    kind: Literal["lantern_accel.stepcost"] = "lantern_accel.stepcost"
    schema_version: Literal[2] = 2
    settings: dict[str, Any]
    environment: Environment
    ceilings: Ceilings | None = None
    acceptance: Acceptance | None = None
    costs: list[Cost] = Field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain record per kind of step, as the table prints it; None: not known."""
        rows = []
        for cost in self.costs:
            if not cost.ms or self.ceilings is None:
                continue
            ms, over = statistics.median(cost.ms), cost.over_vanilla
            whole, known = cost.kind == "step", self.acceptance
            floor = work.floor_of(
                cost.floor_flops, cost.floor_bytes, self.ceilings, self.settings["dtype"]
            )
            rows.append(
                {
                    "step": cost.label,
                    "batch": cost.batch,
                    "nodes": cost.nodes,
                    "rows": cost.rows,
                    "ms": ms,
                    "spread": relative_spread(cost.ms),
                    "over_vanilla": over,
                    "conversion": 1 / over if whole else None,
                    "speedup": known.tokens_per_step / over if whole and known else None,
                    "floor_ms": 1e3 * floor if is_measured(floor) else None,
                    "of_floor": 1e3 * floor / ms if is_measured(floor) else None,
                    "operators": cost.operators,
                    "captured": cost.captured,
                    "phase_ms": cost.phase_ms,
                }
            )
        return rows

    def table(self) -> str:
        """Return the measurement as Markdown."""
        lines = []
        if self.ceilings is not None:
            c, dtype = self.ceilings, self.settings["dtype"]
            figures = (
                ("copy", c.copy_bytes_per_s, 1e9, "GB/s"),
                ("read", c.read_bytes_per_s, 1e9, "GB/s"),
                ("products", c.matmul_flops[dtype], 1e12, f"TFLOP/s in {dtype}"),
            )
            parts = (
                f"{name} {value / unit:.3g} {words}" if is_measured(value) else f"{name} {value}"
                for name, value, unit, words in figures
            )
            lines.append(", ".join(parts))
        if (weights := self.settings.get("weights", FULL)) != FULL:
            lines.append(f"{weights} weights, random ones: what rounding costs is not measured")
        if self.acceptance is not None:
            a = self.acceptance
            lines.append(f"tokens per step: {a.tokens_per_step:g} ({a.source})")
        cells = (
            ["" if row[k] is None else format(row[k], f) for k, f in COLUMNS.values()]
            for row in self.rows()
        )
        lines += ["", *markdown_table([*COLUMNS], cells)]
        for cost in self.costs:
            if cost.phase_ms:
                phases = ", ".join(f"{name} {ms:.3f}" for name, ms in cost.phase_ms.items())
                lines.append(f"\n{cost.label}, batch {cost.batch}, ms by phase: {phases}")
        return "\n".join(lines)


# --- one captured step ----------------------------------------------------------------------------

#: Steps between two looks at the clock.
INNER = 10
#: Rows of the passes that are timed.
ROWS = (1, 2, 4, 8, 16, 32, 48, 64)


def bush(nodes: int) -> StaticTree:
    """Return a tree of ``nodes`` with the root, filled breadth first, four children per node."""
    every = (path for depth in itertools.count(1) for path in product(range(4), repeat=depth))
    return StaticTree(name=f"bush_{nodes}", paths=tuple(itertools.islice(every, nodes - 1)))


class Timed:
    """A kind of step, captured and timed from the middle of an image, in the bucket of there.

    ``cost`` gets what it needs; the operators are those of one eager call. Raises
    :class:`DoesNotFitError` where its batch does not fit. What was captured is released after the block.
    """

    def __init__(
        self,
        backend: Backend,
        model: RandomModel,
        cost: Cost,
        strategy: Strategy,
        sampling: Sampling,
    ) -> None:
        capacity = Capacity(model, backend, model.target.weight.dtype)
        capacity.fit(cost.batch, strategy, sampling).check(backend)
        self.backend, self.cost = backend, cost
        self.engine = model.engine(backend, strategy, sampling, cost.batch)
        engine, g = self.engine, self.engine.geometry
        self.middle = g.tokens // 2
        self.inner = max(min(INNER, (g.tokens - self.middle) // (g.depth + 1) - 1), 1)
        if cost.kind == "pass":
            self.inner = max(INNER // cost.nodes, 1)
        need = g.prefix + g.ahead + self.middle + self.inner * (g.depth + 1)
        slots = next((n for n in engine.sizes if n >= need), engine.sizes[-1])
        state = engine.state
        state.reset()
        state.prefix_mask.fill_(True)
        state.uniforms.fill_(0.5)
        self._rewind()
        made = {"pass": self._pass, "verify": self._verification}.get(cost.kind)
        function = engine.steps[slots] if made is None else made(slots)
        with LaunchCounter() as counter:
            function()
        self.replay: Replay = recorded(backend, function, cost.kind)
        self.replay.expect(1000)
        cost.operators, cost.captured = counter.counts.get("other", 0), self.replay.captured
        cost.capture_seconds, cost.capture_bytes = self.replay.seconds, self.replay.nbytes
        needs = step_needs(engine)
        parts = needs.values() if cost.kind in ("vanilla", "step") else [needs["verify"]]
        cost.floor_flops, cost.floor_bytes = (sum(one) for one in zip(*parts, strict=True))
        cost.rows = g.rows * cost.nodes
        if cost.kind == "pass":  # the engine's own has one node
            cost.floor_flops *= cost.nodes

    def __enter__(self) -> Timed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.replay.release()

    def _pass(self, slots: int) -> Callable[[], None]:
        """Return a pass over as many tokens as there are nodes, ending before the image does."""
        engine, count = self.engine, self.cost.nodes
        assert isinstance(engine, StepEngine)
        g, state = engine.geometry, engine.state
        first = min(self.middle, g.tokens - 1 - count)
        forward, tokens = forced_pass(engine, first, count), state.tokens[:, first : first + count]
        sink = torch.zeros(g.batch, count, device=self.backend.device)

        def run() -> None:
            sink.copy_(forward(tokens)[:, :, 0])

        return run

    def _verification(self, slots: int) -> Callable[[], None]:
        """Return verification alone; one column is kept, so that a compiler does not drop the head."""
        engine, state, g = self.engine, self.engine.state, self.engine.geometry
        device, index = self.backend.device, self.backend.index
        tables = TreeTables(tree_paths(engine.strategy.drafts))
        topology = tables.topology(g.batch, device, index)
        topology.pop("group")
        tokens = torch.zeros(g.batch, g.nodes, dtype=index, device=device)
        tree = DraftTree(tokens=tokens, max_children=tables.max_children, **topology)
        sink = torch.zeros(g.batch, g.nodes, device=device)

        def verify() -> None:
            sink.copy_(engine.verifying.verify(state, tree, slots)[1][:, :, 0])

        return verify

    def _rewind(self) -> None:
        state = self.engine.state
        state.length.fill_(self.middle)
        state.step.fill_(self.middle)
        if not state.in_place:
            state.pending_count.fill_(1)

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
        rows = [found for _ in range(self.inner) if (found := self.replay.timed())]
        return (
            {n: 1e3 * statistics.median(row[n] for row in rows) for n in rows[0]} if rows else None
        )


# --- a measurement --------------------------------------------------------------------------------


def passes(tokens: int, branches: int) -> list[tuple[Cost, Strategy]]:
    """List the passes that are measured, the plain one first, which has ``branches`` rows.

    ``tokens``: of an image, which bound what one pass can have.
    """
    rows = [branches, *(n for n in ROWS if n < tokens and n != branches)]
    cost = {n: Cost(kind="pass", label=f"pass {n}", batch=1, nodes=n) for n in rows}
    return [(cost[n], Strategy(name="vanilla")) for n in rows]


def plan(
    strategy: Strategy, batches: Sequence[int], nodes: Sequence[int], drafter: bool = True
) -> list[tuple[Cost, Strategy]]:
    """List what is measured: per batch vanilla, verification by node count, the whole step.

    Without a drafter, whole steps of scd's windows by their length.
    """
    windows = named_strategy("scd", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    found = []
    for batch in batches:
        cost = Cost(kind="vanilla", label="vanilla", batch=batch, nodes=1)
        found.append((cost, Strategy(name="vanilla")))
        for count in nodes:
            if drafter:
                cost = Cost(kind="verify", label=f"verify {count}", batch=batch, nodes=count)
                found.append((cost, Strategy(name="verify", drafts=bush(count))))
            else:
                cost = Cost(kind="step", label=f"scd {count}", batch=batch, nodes=count)
                found.append((cost, windows.override(window=count)))
        if drafter:
            count = strategy.drafts.size[0]
            cost = Cost(kind="step", label=strategy.name, batch=batch, nodes=count)
            found.append((cost, strategy))
    return found


def read_acceptance(path: Path, strategy: str) -> Acceptance:
    """Take a strategy's tokens per step from a run's file; raises :class:`RequestError`."""
    run = read_run(path)
    found = [c for c in run.cells if c.strategy.name == strategy and c.samples]
    if not found:
        raise RequestError(f"{path} has no samples of {strategy}; measure it with `bench`")
    cell = min(found, key=lambda c: (c.batch, abs(c.temperature - 1)))
    return Acceptance(
        tokens_per_step=cell.step_compression,
        source=f"{run.settings.model}, batch {cell.batch}, temperature {cell.temperature:g}, from "
        f"{path.name}",
    )


def sampling_of(manifest: Any, cfg_scale: float | None, top_k: int | None) -> Sampling:
    """Return the papers' sampling for text- or class-conditional models, with overrides.

    A model without guidance keeps its own: half the rows of other models.
    """
    if cfg_scale is not None and not math.isfinite(cfg_scale):
        raise RequestError(f"the guidance scale is {cfg_scale}; give a finite number")
    found: Sampling = manifest.defaults.sampling
    if found.guided or cfg_scale is not None:
        text = getattr(manifest.target, "conditioning", "text") == "text"
        found = Sampling(cfg_scale=7.5 if text else 4.0, top_k=1000 if text else 0)
    given = {"cfg_scale": cfg_scale, "top_k": top_k}
    return found.model_copy(update={k: v for k, v in given.items() if v is not None})


def make_model(
    backend: Backend, manifest: Any, dtype: str, neighbours: int, weights: str = FULL
) -> RandomModel:
    """Make a model of these sizes on an opened device, its target's weights rounded as ``weights`` says.

    Raises :class:`DeviceMemoryError` where its weights do not fit, naming a dtype that would.
    """
    compute = backend.dtypes(dtype).compute
    found = Found(manifest, dict.fromkeys(("target", "drafter"), Path()))
    check_weights(backend, found, compute)
    how = None if weights == FULL else rounding(weights)
    return random_model(manifest, backend, compute, neighbours=neighbours, how=how)


def measure(
    backend: Backend,
    manifest: Any,
    *,
    strategy: str = "lantern++",
    tree: str | None = None,
    dtype: str = "auto",
    weights: str = FULL,
    cfg_scale: float | None = None,
    top_k: int | None = None,
    batches: Sequence[int] = (1,),
    nodes: Sequence[int] = (8, 16, 32, 60),
    repeats: int = 10,
    acceptance: Acceptance | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> StepCost:
    """Measure ceilings and steps; ``out`` is written after every kind of step and resumed from there.

    Bad input raises before anything is made. Raises :class:`RequestError` where ``out`` holds a
    measurement with other settings, and :class:`DoesNotFitError` where a batch does not fit.
    """
    check_clock(backend)
    chosen = named_strategy(strategy, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    if tree is not None:
        chosen = chosen.override(tree=parse_tree(tree))
    sampling = sampling_of(manifest, cfg_scale, top_k)
    if isinstance(chosen.drafts, Window) and chosen.drafts.fresh == "head":
        manifest = with_head(manifest)
        if getattr(manifest, "draft_head", None) is None:
            raise RequestError(
                f"models as {manifest.name!r} have no draft head; take another kind of fresh draft, "
                "such as window:16,above"
            )
    check_settings(chosen, sampling, manifest.target.vocab_size)
    say(f"random weights of {manifest.name}")
    model = make_model(backend, manifest, dtype, max(chosen.neighbours, 1), weights)
    compute = model.target.output.weight.dtype
    settings = {
        "model": model.name,
        "config": model.target.config.model_dump(mode="json"),
        "strategy": chosen.model_dump(mode="json"),
        "sampling": sampling.model_dump(mode="json"),
        "device": str(backend.device),
        "dtype": str(compute).removeprefix("torch."),
        "weights": weights,
        "threads": torch.get_num_threads(),
        "options": [note for note in backend.facts().notes if "=" in note],
    }
    fresh = StepCost(settings=settings, environment=describe(backend, compute))
    report = store.resume(out, fresh, lambda stored: stored.settings, COMMAND)
    report.acceptance = acceptance or report.acceptance
    keep = store.Keeper(out, report)
    with backend.inference():
        if report.ceilings is None:
            report.ceilings = measure_ceilings(backend, compute, say)
            keep()
        known = {cost.key: len(cost.ms) for cost in report.costs}
        alone = sampling.model_copy(update={"cfg_scale": 1.0, "cfg_scale_image": None})
        groups = [(plan(chosen, [n], nodes, model.drafter is not None), sampling) for n in batches]
        groups.append((passes(manifest.target.num_tokens, sampling.branches), alone))
        for every, settled in groups:
            todo = [one for one in every if known.get(one[0].key, 0) < repeats]
            if not todo:
                continue
            base_cost, vanilla = every[0]
            batch = base_cost.batch
            with Timed(backend, model, base_cost, vanilla, settled) as base:
                for cost, one in todo:
                    say(f"{cost.label}, batch {batch}: capture")
                    if cost is base_cost:
                        cost.ms = cost.vanilla_ms = [base.ms() for _ in range(repeats)]
                        cost.phase_ms = base.phase_ms()
                    else:
                        with Timed(backend, model, cost, one, settled) as timed:
                            timed.ms()
                            for _ in range(repeats):
                                cost.ms.append(timed.ms())
                                cost.vanilla_ms.append(base.ms())
                            cost.phase_ms = timed.phase_ms()
                    report.costs = [c for c in report.costs if c.key != cost.key] + [cost]
                    # Passes at the end, by their rows: the plain one was measured first.
                    report.costs.sort(key=lambda c: c.kind == "pass" and c.nodes)
                    say(f"{cost.label}, batch {batch}: {statistics.median(cost.ms):.3f} ms")
                    keep()
    keep()
    return report
