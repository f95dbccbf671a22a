"""What a step costs at real sizes, on random weights, beside the least that it could cost.

A step must read every weight once and the cache that its queries see, and multiply every weight with
every row of its tree: its *floor* is the longer of bytes over the measured bandwidth and operations over
the measured rate of products. A vanilla step, verification alone at several node counts and a
whole LANTERN step are timed alternately with vanilla, so that ratios hold on a machine that drifts.
How many tokens a step brings is a property of weights: it is a stated number or one from a benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.geometry import check as check_settings
from lantern_accel.decoding.trees import EAGLE2_TREE, NAIVE_EXTEND_57, parse_tree, tree_size
from lantern_accel.device.backend import Backend, check_clock, inferring
from lantern_accel.errors import BackendError, RequestError
from lantern_accel.families.random_weights import RandomModel, random_model, sized, weights_bytes
from lantern_accel.files import write_json
from lantern_accel.measure.interleave import environment, read_stored
from lantern_accel.measure.rates import measure_rates
from lantern_accel.measure.stepcost_report import Acceptance, Cost, StepCost
from lantern_accel.measure.steptimer import Timed, bush, floor_bytes, floor_flops
from lantern_accel.memory.limits import check_engine, free_bytes, size
from lantern_accel.strategy.values import Sampling, Strategy, named_strategy


@contextmanager
def _timed(
    backend: Backend, model: RandomModel, cost: Cost, strategy: Strategy, sampling: Sampling
) -> Iterator[Timed]:
    check_engine(backend, model.target, model.drafter, strategy, sampling, cost.batch)
    engine = Engine(
        model.target,
        model.drafter,
        backend,
        strategy,
        sampling,
        batch=cost.batch,
        neighbours=model.neighbours if strategy.neighbours else None,
    )
    timed = Timed(backend, engine, cost.kind)
    cost.operators = timed.operators
    cost.captured, cost.capture_seconds = timed.replay.captured, timed.replay.seconds
    cost.capture_bytes = timed.replay.nbytes
    cost.floor_bytes = floor_bytes(engine, cost.kind)
    cost.floor_flops = floor_flops(engine, cost.kind)
    try:
        yield timed
    finally:
        timed.replay.release()


def plan(
    strategy: Strategy, batches: Sequence[int], nodes: Sequence[int]
) -> list[tuple[Cost, Strategy]]:
    """List what is measured: for each batch vanilla, verification by node count, the whole step."""
    vanilla = Strategy(name="vanilla")
    found = []
    for batch in batches:
        found.append((Cost(kind="vanilla", label="vanilla", batch=batch, nodes=1), vanilla))
        for count in nodes:
            cost = Cost(kind="verify", label=f"verify {count}", batch=batch, nodes=count)
            found.append((cost, Strategy(name="verify", tree=bush(count))))
        count = tree_size(strategy.tree)[0]
        found.append((Cost(kind="step", label=strategy.name, batch=batch, nodes=count), strategy))
    return found


@inferring
def run_stepcost(
    backend: Backend,
    model: RandomModel,
    strategy: Strategy,
    sampling: Sampling,
    *,
    batches: Sequence[int] = (1,),
    nodes: Sequence[int] = (8, 16, 32, 60),
    repeats: int = 10,
    acceptance: Acceptance | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> StepCost:
    """Measure rates and steps; ``out`` is written after every kind of step and continued from there.

    Raises :class:`RequestError` where ``out`` holds a measurement with other settings, and
    :class:`BackendError` where a batch does not fit.
    """
    check_clock(backend)
    dtype = model.target.output.weight.dtype
    settings = {
        "model": model.name,
        "config": model.target.config.model_dump(mode="json"),
        "weights": "random",
        "strategy": strategy.model_dump(mode="json"),
        "sampling": sampling.model_dump(mode="json"),
        "device": str(backend.device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "options": [note for note in backend.facts().notes if "=" in note],
    }
    report = StepCost(settings=settings, environment=environment(backend, dtype))
    if out is not None and out.is_file():
        report = read_stored(out, StepCost, settings)
    report.acceptance = acceptance or report.acceptance

    def keep() -> None:
        if out is not None:
            write_json(out, report.model_dump(mode="json"))

    if report.rates is None:
        say("bandwidth and products of the device")
        report.rates = measure_rates(backend, dtype)
        keep()
    known = {cost.key: cost for cost in report.costs}
    todo = [
        (cost, chosen)
        for cost, chosen in plan(strategy, batches, nodes)
        if len(known.get(cost.key, cost).ms) < repeats
    ]
    for batch in batches:
        here = [(cost, chosen) for cost, chosen in todo if cost.batch == batch]
        if not here:
            continue
        base_cost, vanilla = plan(strategy, [batch], ())[0]
        with _timed(backend, model, base_cost, vanilla, sampling) as base:
            for cost, chosen in here:
                say(f"{cost.label}, batch {batch}: capture")
                if cost.kind == "vanilla":
                    cost = base_cost
                    for _ in range(repeats):
                        cost.ms.append(base.ms())
                        cost.vanilla_ms.append(cost.ms[-1])
                    cost.phase_ms = base.phase_ms()
                else:
                    with _timed(backend, model, cost, chosen, sampling) as timed:
                        timed.ms()
                        for _ in range(repeats):
                            cost.ms.append(timed.ms())
                            cost.vanilla_ms.append(base.ms())
                        cost.phase_ms = timed.phase_ms()
                report.costs = [c for c in report.costs if c.key != cost.key] + [cost]
                say(f"{cost.label}, batch {batch}: {cost.median:.3f} ms")
                keep()
    keep()
    return report


# --- from names ---------------------------------------------------------------------------------


def parse_nodes(text: str) -> list[int]:
    """Read ``8,16,32,60``; raises :class:`RequestError`."""
    try:
        nodes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        nodes = [0]
    if any(not 2 <= count <= 1024 for count in nodes):
        raise RequestError(f"nodes {text!r} are not counts from 2 to 1024, such as 8,16,32,60")
    return nodes


def default_sampling(text: bool, cfg_scale: float | None, top_k: int | None) -> Sampling:
    """Return the papers' sampling for text- or class-conditional models, with overrides."""
    return Sampling(
        cfg_scale=(7.5 if text else 4.0) if cfg_scale is None else cfg_scale,
        top_k=(1000 if text else 0) if top_k is None else top_k,
    )


def make_model(backend: Backend, name: str, dtype: str, neighbours: int) -> RandomModel:
    """Make a model of a named size on an opened device.

    Raises :class:`BackendError` where its weights do not fit, naming a dtype that would.
    """
    manifest = sized(name)
    compute = backend.dtypes(dtype).compute
    need, free = weights_bytes(manifest, compute), free_bytes(backend.memory())
    if free is not None and need > free:
        fits = [d for d in backend.compute_dtypes() if weights_bytes(manifest, d) <= free]
        way = (
            f"use the dtype {str(fits[0]).removeprefix('torch.')}" if fits else "use a smaller size"
        )
        raise BackendError(
            f"random weights of {name} take {size(need)}, device {backend.device} has {size(free)} "
            f"free; {way}"
        )
    return random_model(manifest, backend, compute, neighbours=neighbours)


def measure(
    backend: Backend,
    name: str,
    *,
    strategy: str = "lantern++",
    tree: str | None = None,
    dtype: str = "auto",
    cfg_scale: float | None = None,
    top_k: int | None = None,
    batches: Sequence[int] = (1,),
    nodes: Sequence[int] = (8, 16, 32, 60),
    repeats: int = 10,
    acceptance: Acceptance | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> StepCost:
    """Measure a size by name; see :func:`run_stepcost`. Bad input raises before anything is made."""
    check_clock(backend)
    chosen = named_strategy(strategy, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    if tree is not None:
        chosen = chosen.override(tree=parse_tree(tree))
    config = sized(name).target
    text = getattr(config, "conditioning", "text") == "text"
    sampling = default_sampling(text, cfg_scale, top_k)
    check_settings(chosen, sampling, config.vocab_size)
    say(f"random weights of {name}")
    model = make_model(backend, name, dtype, max(chosen.neighbours, 1))
    return run_stepcost(
        backend,
        model,
        chosen,
        sampling,
        batches=batches,
        nodes=nodes,
        repeats=repeats,
        acceptance=acceptance,
        out=out,
        say=say,
    )
