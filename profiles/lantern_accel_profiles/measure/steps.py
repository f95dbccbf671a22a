"""Measures cells of steps: what a step costs at real sizes on random weights, next to its least cost.

A vanilla step, verification alone at several node counts and a whole step are timed in turns with
vanilla, from the middle of an image or where it is asked for, and passes of the target over 1 to 64
rows in turns with plain decoding's, so that ratios hold on a machine that drifts. How many tokens a step
adds is a property of weights: that is measured by ``lantern-accel profile``.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import torch

from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.decoding.trees import DraftTree, topology_of
from lantern_accel.device.backend import Backend, dtype_policy, record_replay
from lantern_accel.device.capture import Replay
from lantern_accel.device.context import inference
from lantern_accel.errors import DoesNotFitError, RequestError
from lantern_accel.families.base import Found
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.random_weights import RandomModel, random_model, with_head
from lantern_accel.generation.forced import forced_pass
from lantern_accel.memory.limits import Capacity, check_weights
from lantern_accel.nn.rounding import FULL, rounding
from lantern_accel.records import digest
from lantern_accel.strategy.strategy import check_settings
from lantern_accel.strategy.trees import (
    EAGLE2_TREE,
    NAIVE_EXTEND_57,
    TreeTables,
    parse_drafts,
    tree_paths,
)
from lantern_accel.strategy.values import Sampling, StaticTree, Strategy, named_strategy
from lantern_accel_profiles.measure.ceilings import raise_ceilings
from lantern_accel_profiles.measure.environment import check_clock
from lantern_accel_profiles.measure.prompts import prompts_of
from lantern_accel_profiles.measure.record import Plan, Run, RunSettings, StepCell
from lantern_accel_profiles.measure.run import Measurement, Say, fresh_run
from lantern_accel_profiles.measure.work import LaunchCounter, step_needs, visible_slots
from lantern_accel_profiles.store import LONGEST_NAME

COMMAND = "lantern-accel stepcost"
PLAIN = Strategy(name="vanilla")
#: Steps between two looks at the clock.
INNER = 10
#: Rows of the passes that are timed; the first two, of windows of 16 and 32, before all other steps.
ROWS = (32, 64, 1, 2, 4, 8, 16, 48)


def bush(nodes: int) -> StaticTree:
    """Return a tree of ``nodes`` with the root, filled breadth first, four children per node."""
    every = (path for depth in itertools.count(1) for path in product(range(4), repeat=depth))
    return StaticTree(name=f"bush_{nodes}", paths=tuple(itertools.islice(every, nodes - 1)))


class StepTimer:
    """Captures a kind of step, and times it from the cell's place in an image, in the bucket of there.

    ``cell`` gets what the step needs; the operators are those of one eager call. Raises
    :class:`DoesNotFitError` where its batch does not fit. What was captured is released after the block.
    """

    def __init__(
        self, backend: Backend, model: RandomModel, cell: StepCell, sampling: Sampling
    ) -> None:
        capacity = Capacity(model, backend, model.target.weight.dtype)
        capacity.check(cell.batch, cell.strategy, sampling)
        self.backend, self.cell = backend, cell
        self.engine = model.engine(backend, cell.strategy, sampling, cell.batch)
        engine, g = self.engine, self.engine.geometry
        last = max(g.tokens - (INNER + 1) * (g.depth + 1), g.tokens // 2)
        self.place = min(int(cell.at * g.tokens), last)
        self.inner = max(min(INNER, (g.tokens - self.place) // (g.depth + 1) - 1), 1)
        if cell.kind == "pass":
            self.inner = max(INNER // cell.nodes, 1)
        need = g.prefix + g.ahead + self.place + self.inner * (g.depth + 1)
        slots = next((n for n in engine.sizes if n >= need), engine.sizes[-1])
        state = engine.state
        state.reset()
        state.prefix_mask.fill_(True)
        state.uniforms.fill_(0.5)
        self._rewind()
        made = {"pass": self._pass, "verify": self._verification}.get(cell.kind)
        function = partial(engine.step, slots) if made is None else made(slots)
        with LaunchCounter() as counter:
            function()
        self.replay: Replay = record_replay(backend, function, cell.kind)
        self.replay.expect(1000)
        cell.operators, cell.captured = counter.count, self.replay.captured
        cell.capture_seconds, cell.capture_bytes = self.replay.seconds, self.replay.nbytes
        needs = step_needs(engine, visible_slots(engine, self.place))
        parts = needs.values() if cell.kind in ("vanilla", "step") else [needs["verify"]]
        cell.floor_flops, cell.floor_bytes = (sum(one) for one in zip(*parts, strict=True))
        cell.rows = g.rows * cell.nodes
        if cell.kind == "pass":  # the engine's own has one node
            cell.floor_flops *= cell.nodes

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.replay.release()
        del self.replay, self.engine
        gc.collect()  # a cycle holds the engine's caches, and the next cell needs the memory

    def _pass(self, slots: int) -> Callable[[], None]:
        """Return a pass over as many tokens as there are nodes, ending before the image does."""
        engine, count = self.engine, self.cell.nodes
        g, state = engine.geometry, engine.state
        first = min(self.place, g.tokens - 1 - count)
        forward, tokens = forced_pass(engine, first, count), state.tokens[:, first : first + count]
        sink = torch.zeros(g.batch, count, device=self.backend.device)

        def run() -> None:
            sink.copy_(forward(tokens)[1][:, :, 0])

        return run

    def _verification(self, slots: int) -> Callable[[], None]:
        """Return verification alone; one column is kept, so that a compiler does not drop the head."""
        engine, state, g = self.engine, self.engine.state, self.engine.geometry
        device, index = self.backend.device, self.backend.index
        tables = TreeTables(tree_paths(engine.strategy.drafts))
        topology = topology_of(tables, g.batch, device, index)
        topology.pop("group")
        tokens = torch.zeros(g.batch, g.nodes, dtype=index, device=device)
        tree = DraftTree(tokens=tokens, max_children=tables.max_children, **topology)
        sink = torch.zeros(g.batch, g.nodes, device=device)

        def verify() -> None:
            sink.copy_(engine.source.verify(state, tree, slots)[1][:, :, 0])

        return verify

    def _rewind(self) -> None:
        state = self.engine.state
        state.length.fill_(self.place)
        state.step.fill_(self.place)
        if isinstance(state, TreeState):
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
        rows = [found for _ in range(self.inner) if (found := self.replay.time_phases())]
        return (
            {n: 1e3 * statistics.median(row[n] for row in rows) for n in rows[0]} if rows else None
        )


# --- a measurement --------------------------------------------------------------------------------


def passes(tokens: int, branches: int, most: int | None = None) -> list[StepCell]:
    """List the passes that are measured, the plain one first, which has ``branches`` rows.

    ``tokens``: of an image, which bound what one pass can have. ``most``: of :data:`ROWS`.
    """
    rows = [branches, *(n for n in ROWS[:most] if n < tokens and n != branches)]
    return [StepCell(kind="pass", strategy=PLAIN, batch=1, nodes=n) for n in rows]


def whole_steps(
    strategy: Strategy, batch: int, nodes: Sequence[int], drafter: bool = True, at: float = 0.5
) -> list[StepCell]:
    """List the steps of a batch: vanilla, verification by node count, the strategy's own.

    Without a drafter, whole steps of scd's windows by their length.
    """
    found = [StepCell(kind="vanilla", strategy=PLAIN, batch=batch, nodes=1)]
    windows = named_strategy("scd", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    for count in nodes:
        one = Strategy(name=f"verify {count}", drafts=bush(count))
        if not drafter:
            one = windows.override(window=count).model_copy(update={"name": f"scd {count}"})
        found.append(
            StepCell(kind="verify" if drafter else "step", strategy=one, batch=batch, nodes=count)
        )
    if drafter:
        count = strategy.drafts.size[0]
        found.append(StepCell(kind="step", strategy=strategy, batch=batch, nodes=count))
    return [cell.model_copy(update={"at": at}) for cell in found]


def sampling_of(manifest: Manifest, cfg_scale: float | None, top_k: int | None) -> Sampling:
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
    backend: Backend, manifest: Manifest, dtype: str, neighbours: int, weights: str = FULL
) -> RandomModel:
    """Make a model of these sizes on an opened device, its target quantized by ``weights``.

    Raises :class:`DeviceMemoryError` where its weights do not fit, naming a dtype that would.
    """
    compute = dtype_policy(backend, dtype).compute
    found = Found(manifest, dict.fromkeys(("target", "drafter"), Path()))
    check_weights(backend, found, compute)
    how = None if weights == FULL else rounding(weights)
    return random_model(manifest, backend, compute, neighbours=neighbours, how=how)


def measure(
    backend: Backend,
    manifest: Manifest,
    *,
    strategy: str = "lantern++",
    drafts: str | None = None,
    dtype: str = "auto",
    weights: str = FULL,
    cfg_scale: float | None = None,
    top_k: int | None = None,
    batches: Sequence[int] = (1,),
    nodes: Sequence[int] = (8, 16, 32, 60),
    at: Sequence[float] = (0.5,),
    repeats: int = 10,
    options: Mapping[str, object] | None = None,
    out: Path | None = None,
    command: str = COMMAND,
    say: Say = lambda text: None,
) -> Run:
    """Measure ceilings and cells of steps; ``out`` is written after every one and resumed from there.

    ``at``: shares of the image that are known where whole steps are timed, 0 to 1. Bad input raises
    before anything is made. Raises :class:`RequestError` where ``out`` holds a run of something else, and
    :class:`DoesNotFitError` where a batch does not fit.
    """
    check_clock(backend)
    chosen = named_strategy(strategy, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    if drafts is not None:
        chosen = chosen.override(drafts=parse_drafts(drafts))
    sampling = sampling_of(manifest, cfg_scale, top_k)
    if getattr(chosen.drafts, "fresh", "") == "head":
        manifest = with_head(manifest)
    check_settings(chosen, sampling, manifest.target.vocab_size)
    say(f"random weights of {manifest.name}")
    model = make_model(backend, manifest, dtype, max(chosen.neighbours, 1), weights)
    compute = model.target.output.weight.dtype
    settings = RunSettings(
        model=model.name,
        weights_hash=f"random {digest(model.target.config.model_dump(mode='json'))[:12]}",
        tokens=manifest.target.num_tokens,
        sampling=sampling,
        prompts=prompts_of("none: weights are random", []),
        seed=0,
        dtype=str(compute).removeprefix("torch."),
        options=dict(options or {}),
        weights=weights,
        plan=Plan(quick=False, samples=repeats, seconds=0.0, quality_images=0),
    )
    run = fresh_run(backend, compute, settings, f"steps of {model.name}"[:LONGEST_NAME], command)
    measurement = Measurement(backend, compute, run, out, resume=True, say=say)
    alone = sampling.model_copy(update={"cfg_scale": 1.0, "cfg_scale_image": None})
    drafter = model.drafter is not None
    groups = [
        (whole_steps(chosen, batch, nodes, drafter, place), sampling)
        for batch in batches
        for place in at
    ]
    before, after = (passes(manifest.target.num_tokens, sampling.branches, n) for n in (2, None))
    groups = [(before, alone), *groups, (after, alone)]
    with inference(backend), measurement.session():
        for cells, settled in groups:
            _measure_in_turns(measurement, model, cells, settled, repeats)
    return measurement.run


def _measure_in_turns(
    measurement: Measurement,
    model: RandomModel,
    cells: Sequence[StepCell],
    sampling: Sampling,
    repeats: int,
) -> None:
    """Time cells that the run does not hold, each in turns with the first, which is plain decoding's."""
    run, backend, say = measurement.run, measurement.backend, measurement.say
    known = {cell.key for cell in run.steps if len(cell.ms) >= repeats}
    waiting = [cell for cell in cells if cell.key not in known]
    if not waiting:
        return
    with ExitStack() as held:
        base = held.enter_context(StepTimer(backend, model, cells[0], sampling))
        for cell in waiting:
            say(f"{cell.label}, batch {cell.batch}: capture")
            if cell is cells[0]:
                cell.ms = cell.vanilla_ms = [base.ms() for _ in range(repeats)]
                cell.phase_ms = base.phase_ms()
            else:
                try:
                    with StepTimer(backend, model, cell, sampling) as timer:
                        timer.ms()
                        for _ in range(repeats):
                            cell.ms.append(timer.ms())
                            cell.vanilla_ms.append(base.ms())
                        cell.phase_ms = timer.phase_ms()
                except DoesNotFitError:  # next to the plain step's caches: they take turns
                    held.close()
                    for _ in range(repeats):
                        for one, times in ((cell, cell.ms), (cells[0], cell.vanilla_ms)):
                            with StepTimer(backend, model, one, sampling) as timer:
                                timer.ms()
                                times.append(timer.ms())
                                one.phase_ms = timer.phase_ms()
                    base = held.enter_context(StepTimer(backend, model, cells[0], sampling))
            if not isinstance(run.ceilings, str):
                run.ceilings = raise_ceilings(run.ceilings, run.settings.dtype, cell)
            run.steps = [one for one in run.steps if one.key != cell.key] + [cell]
            # Passes at the end, by their rows: the plain one was measured first.
            run.steps.sort(key=lambda one: one.kind == "pass" and one.nodes)
            say(f"{cell.label}, batch {cell.batch}: {statistics.median(cell.ms):.3f} ms")
            measurement.keep()
