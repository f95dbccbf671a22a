"""The tree for a device: what a step costs here, what its drafts are worth, the best of both.

Acceptance is measured per depth and sibling rank on real prompts with a wide tree; under the model
that these rates are independent (Sequoia, arXiv 2402.12374), a node is worth the product of the rates
on its path, and the best tree of n nodes and depth D is the n most valuable nodes: rates fall with
rank, so that parents and elder siblings are always among them. Step costs are measured on a few
trees and fitted; the best candidates are then decoded with and the fastest is kept.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.decoding.running import Running
from lantern_accel.decoding.trees import TreeTables, chain_paths, tree_paths
from lantern_accel.files import write_json
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.bench import Cell, decode_once
from lantern_accel.strategy.store import Candidate, Tuned, key_of, tuned_path
from lantern_accel.strategy.values import Path as TreePath
from lantern_accel.strategy.values import StaticTree, Strategy

#: Siblings a node of the measuring tree has at each depth.
PROBE = (5, 3, 2, 2, 1, 1)
#: Trees whose steps are timed to fit the cost model, by (nodes, depth).
TIMED = ((1, 1), (2, 2), (4, 4), (4, 2), (8, 3), (8, 6), (16, 4), (24, 6), (40, 5))
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 60)


def best_tree(rates: Sequence[Sequence[float]], nodes: int, depth: int) -> tuple[TreePath, ...]:
    """Return the ``nodes`` most valuable paths of at most ``depth``; see the module's text."""
    heap: list[tuple[float, TreePath]] = []

    def offer(path: TreePath, above: float) -> None:
        level = len(path) - 1
        if level < min(depth, len(rates)) and path[-1] < len(rates[level]):
            heapq.heappush(heap, (-above * rates[level][path[-1]], path))

    offer((0,), 1.0)
    chosen: dict[TreePath, float] = {}
    while heap and len(chosen) < nodes:
        worth, path = heapq.heappop(heap)
        chosen[path] = -worth
        offer((*path, 0), -worth)
        offer((*path[:-1], path[-1] + 1), chosen.get(path[:-1], 1.0))
    return tuple(sorted(chosen, key=lambda p: (len(p), p)))


def expected_tokens(paths: Sequence[TreePath], rates: Sequence[Sequence[float]]) -> float:
    """Return 1 + the sum over nodes of the product of the rates on their paths."""
    total = 1.0
    for path in paths:
        worth = 1.0
        for level, rank in enumerate(path):
            worth *= rates[level][rank]
        total += worth
    return total


def _features(paths: Sequence[TreePath]) -> list[float]:
    """Return what a step's time is fitted on: 1, nodes, drafter levels, sibling tests."""
    tables = TreeTables(tuple(paths))
    return [1.0, float(tables.nodes), float(tables.max_depth), float(sum(tables.max_children))]


def probe_paths(widths: Sequence[int]) -> tuple[TreePath, ...]:
    """Return the measuring tree: all siblings below first children, so that every rate is seen."""
    paths: list[TreePath] = []
    for depth, width in enumerate(widths):
        paths += [(*(0,) * depth, rank) for rank in range(width)]
    # Below a second child too, where there is one: the first is not always taken.
    if widths[0] > 1:
        paths += [(1, *(0,) * n) for n in range(1, min(3, len(widths)))]
    return tuple(sorted(set(paths), key=lambda p: (len(p), p)))


class Progress(BaseModel):
    """What a run has measured so far, kept beside its result until it is complete."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    prompts: int = 0
    taken: list[list[float]]
    visits: list[list[float]]
    costs: list[dict[str, float]] = []
    finalists: dict[str, Cell] = {}

    def save(self, path: Path) -> None:
        """Write it whole."""
        write_json(path, self.model_dump(mode="json"))


def _resume(path: Path, settings: dict[str, Any]) -> Progress:
    """Return what an interrupted run with the same settings measured, else nothing measured."""
    try:
        found = Progress.model_validate_json(path.read_text(encoding="utf-8"))
        if found.settings == settings:
            return found
    except (OSError, ValidationError, ValueError):
        pass
    zeros = [[0.0] * width for width in PROBE]
    return Progress(settings=settings, taken=zeros, visits=[list(row) for row in zeros])


def measure_rates(
    pipeline: Pipeline,
    strategy: Strategy,
    temperature: float,
    prompts: Sequence[str | int],
    progress: Progress,
    path: Path,
    say: Callable[[str], None],
) -> list[list[float]]:
    """Measure how often the sibling of each rank is accepted, given that its parent was.

    A rate is the share of visits of a parent at depth d that end at its child of rank r. Rates are
    made to fall with rank (a later sibling is only tried when the earlier ones failed).
    """
    tree = StaticTree(name="probe", paths=probe_paths(PROBE))
    chosen = strategy.override(tree=tree)
    tables = TreeTables(tree_paths(tree))
    nodes = [(), *sorted(tree.paths, key=lambda p: (len(p), p))]
    sampling = pipeline.sampling(temperature=temperature)
    for number, prompt in enumerate(prompts):
        if number < progress.prompts:
            continue
        taken = [list(row) for row in progress.taken]
        visits = [list(row) for row in progress.visits]
        ready = pipeline.engine(1, chosen, sampling)

        def watched(
            engine: Running = ready.engine,
            step: Callable[[], None] = ready.step,
            taken: list[list[float]] = taken,
            visits: list[list[float]] = visits,
        ) -> None:
            # A device that tells lengths late runs a step more on an image that is complete: no visit.
            complete = int(engine.state.length) + 1 >= engine.geometry.tokens
            step()
            if complete:
                return
            last = int(engine.state.last_length)
            path = engine.state.last_path[0].tolist()
            for depth in range(min(max(last, 0) + 1, len(PROBE))):
                children = tables.children[path[depth]]
                for rank in range(len(children)):
                    visits[depth][rank] += 1
                if depth < last:
                    taken[depth][nodes[path[depth + 1]][-1]] += 1

        pipeline.decode_only([prompt], chosen, sampling, 100 + number, step=watched)
        # Counted only when the prompt is done, so that an interruption counts nothing twice.
        progress.prompts, progress.taken, progress.visits = number + 1, taken, visits
        progress.save(path)
        say(f"acceptance: {number + 1} of {len(prompts)} prompts")
    rates = []
    for taken_row, visits_row in zip(progress.taken, progress.visits, strict=True):
        # Half a count of each: a rate that was never seen is small, not 0.
        row = [(t + 0.25) / (v + 0.5) for t, v in zip(taken_row, visits_row, strict=True)]
        rates.append([min(row[: r + 1]) for r in range(len(row))])
    return rates


def measure_costs(
    pipeline: Pipeline,
    strategy: Strategy,
    temperature: float,
    prompts: Sequence[str | int],
    rates: Sequence[Sequence[float]],
    progress: Progress,
    path: Path,
    say: Callable[[str], None],
) -> list[dict[str, float]]:
    """Time a step of several trees: nodes, depth, sibling tests and median milliseconds of each."""
    for number, (nodes, depth) in enumerate(TIMED):
        if number < len(progress.costs):
            continue
        cell = _cell(strategy, best_tree(rates, nodes, depth), temperature)
        decode_once(pipeline, cell, prompts, 0)
        runs = [decode_once(pipeline, cell, prompts, seed) for seed in range(1, 4)]
        milliseconds = 1e3 * statistics.median(r.seconds / r.steps for r in runs)
        _, *features = _features(tree_paths(cell.strategy.tree))
        cost = dict(zip(("nodes", "depth", "tests"), features, strict=True))
        progress.costs.append(cost | {"ms": milliseconds})
        progress.save(path)
        say(f"cost: {features[0]:.0f} nodes, {features[1]:.0f} deep: {milliseconds:.2f} ms a step")
    return progress.costs


def tune(
    pipeline: Pipeline,
    strategy: Strategy,
    *,
    temperature: float = 1.0,
    prompts: Sequence[str | int] = (),
    finalists: int = 4,
    repeats: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the static tree with the most tokens a second for a strategy, and keep it in the cache.

    A run that was interrupted goes on from the last prompt, tree or decoding that it measured.
    """
    from lantern_accel.device.backend import check_clock
    from lantern_accel.measure.bench import environment

    check_clock(pipeline.backend)
    prompts = prompts or pipeline.model.family.examples(pipeline.model.manifest)
    key = key_of(pipeline, strategy, temperature)
    path = tuned_path(key).with_suffix(".partial")
    settings = {"key": key, "prompts": list(prompts), "temperature": temperature}
    settings |= {"probe": list(PROBE), "timed": [list(pair) for pair in TIMED]}
    progress = _resume(path, settings)
    if progress.prompts:
        say(f"going on after {progress.prompts} prompts and {len(progress.costs)} timed trees")
    rates = measure_rates(pipeline, strategy, temperature, prompts, progress, path, say)
    costs = measure_costs(pipeline, strategy, temperature, prompts, rates, progress, path, say)
    candidates = _candidates(rates, costs)
    best = candidates[:finalists]
    base = Cell(strategy=pipeline.strategy("vanilla"), batch=1, temperature=temperature)
    entrants = {"vanilla": base}
    entrants |= {_words(c.paths): _cell(strategy, c.paths, temperature) for c in best}
    cells = {name: progress.finalists.get(name, cell) for name, cell in entrants.items()}
    progress.finalists = cells
    for cell in cells.values():
        if len(cell.samples) < repeats:
            decode_once(pipeline, cell, prompts, 0)
    for number in range(repeats):
        for cell in cells.values():
            if len(cell.samples) <= number:
                cell.samples.append(decode_once(pipeline, cell, prompts, 1 + number))
                progress.save(path)
        say(f"finalists: {number + 1} of {repeats}")
    for candidate in best:
        cell = cells[_words(candidate.paths)]
        candidate.measured_tokens_per_second = cell.tokens_per_second
        candidate.measured_compression = cell.step_compression
    winner = max(best, key=lambda c: c.measured_tokens_per_second or 0.0)
    found = Tuned(
        key=key,
        tree=StaticTree(name="tuned", paths=winner.paths),
        tokens_per_second=winner.measured_tokens_per_second or 0.0,
        vanilla_tokens_per_second=cells["vanilla"].tokens_per_second,
        rates=rates,
        costs=costs,
        candidates=candidates[:20],
        environment=environment(pipeline),
    )
    write_json(tuned_path(key), found.model_dump(mode="json"))
    path.unlink(missing_ok=True)
    return found


def _candidates(
    rates: Sequence[Sequence[float]], costs: Sequence[dict[str, float]]
) -> list[Candidate]:
    """Return the best tree of every size and depth, and chains, the fastest by prediction first."""
    rows = [[1.0, c["nodes"], c["depth"], c["tests"]] for c in costs]
    times = [c["ms"] for c in costs]
    fit = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(times, dtype=torch.float64).unsqueeze(1),
    ).solution.squeeze(1)
    trees = {
        best_tree(rates, nodes, depth) for nodes in SIZES for depth in range(1, len(PROBE) + 1)
    } | {chain_paths(n) for n in range(1, len(PROBE) + 1)}
    candidates = [
        Candidate(
            paths=paths,
            depth=max(len(p) for p in paths),
            expected_tokens=expected_tokens(paths, rates),
            predicted_ms=max(
                float(torch.tensor(_features(paths), dtype=torch.float64) @ fit), min(times) / 2
            ),
        )
        for paths in trees
    ]
    return sorted(candidates, key=lambda c: (-c.predicted_rate, c.paths))


def _words(paths: Sequence[TreePath]) -> str:
    return " ".join("".join(map(str, path)) for path in paths)


def _cell(strategy: Strategy, paths: tuple[TreePath, ...], temperature: float) -> Cell:
    tree = StaticTree(name="candidate", paths=paths)
    return Cell(strategy=strategy.override(tree=tree), batch=1, temperature=temperature)
