"""The tree for a device: what a step costs here, what its drafts are worth, the best of both.

Acceptance is measured per depth and sibling rank on real prompts with a wide tree; under the model
that these rates are independent (Sequoia, arXiv 2402.12374), a node is worth the product of the rates
on its path, and the best tree of n nodes and depth D is the n most valuable nodes: rates fall with
rank, so that parents and elder siblings are always among them. Step costs are measured on a few
trees and fitted; the best candidates are then decoded with and the fastest is kept.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.bench import PROMPTS, Cell, decode_once
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.trees import TreeTables, chain_paths, tree_paths
from lantern_accel.files import cache_dir, write_json
from lantern_accel.pipeline import Pipeline
from lantern_accel.strategy import Path as TreePath
from lantern_accel.strategy import StaticTree, Strategy

SCHEMA = 1
#: Siblings a node of the measuring tree has at each depth.
PROBE = (5, 3, 2, 2, 1, 1)
#: Trees whose steps are timed to fit the cost model, by (nodes, depth).
TIMED = ((1, 1), (2, 2), (4, 4), (4, 2), (8, 3), (8, 6), (16, 4), (24, 6), (40, 5))
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 60)


class Candidate(BaseModel):
    """One tree: predicted and, for the best few, measured."""

    model_config = ConfigDict(extra="forbid")

    paths: tuple[TreePath, ...]
    depth: int
    expected_tokens: float = Field(description="tokens a step under the measured rates")
    predicted_ms: float
    measured_tokens_per_second: float | None = None
    measured_compression: float | None = None

    @property
    def predicted_rate(self) -> float:
        """Tokens a millisecond."""
        return self.expected_tokens / self.predicted_ms


class Tuned(BaseModel):
    """A tuned tree with its evidence; ``key`` says what it was made for."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    key: dict[str, Any]
    tree: StaticTree
    tokens_per_second: float
    vanilla_tokens_per_second: float
    rates: list[list[float]] = Field(description="acceptance by depth and sibling rank")
    costs: list[dict[str, float]] = Field(description="timed trees: nodes, depth, tests, ms a step")
    candidates: list[Candidate]
    environment: dict[str, Any]


def key_of(pipeline: Pipeline, strategy: Strategy, temperature: float) -> dict[str, Any]:
    """Return everything that a tuned tree depends on."""
    facts = pipeline.backend.facts()
    return {
        "weights_hash": pipeline.model.weights_hash,
        "backend": f"{pipeline.backend.name} {pipeline.backend.version}",
        "device_name": facts.name,
        "threads": facts.threads,
        "torch": torch.__version__,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "greedy": temperature == 0,
        "acceptance": strategy.acceptance.model_dump(mode="json"),
        "residual": strategy.residual,
    }


def tuned_path(key: dict[str, Any]) -> Path:
    """Return where a tuned tree of this key is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "trees" / f"{digest}.json"


def read_tuned(key: dict[str, Any]) -> Tuned | None:
    """Return the tuned tree of this key; None where there is none or it cannot be read."""
    path = tuned_path(key)
    try:
        found = Tuned.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None
    return found if found.key == key else None


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


def measure_rates(
    pipeline: Pipeline,
    strategy: Strategy,
    temperature: float,
    prompts: Sequence[str | int],
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
    taken = [[0.0] * width for width in PROBE]
    visits = [[0.0] * width for width in PROBE]
    sampling = pipeline.sampling(temperature=temperature)
    for number, prompt in enumerate(prompts):
        ready = pipeline.engine(1, chosen, sampling)

        def watched(engine: Engine = ready.engine, step: Callable[[], None] = ready.step) -> None:
            step()
            last = int(engine.state.last_length)
            path = engine.state.last_path[0].tolist()
            for depth in range(min(max(last, 0) + 1, len(PROBE))):
                children = tables.children[path[depth]]
                for rank in range(len(children)):
                    visits[depth][rank] += 1
                if depth < last:
                    taken[depth][nodes[path[depth + 1]][-1]] += 1

        pipeline.decode_only([prompt], chosen, sampling, 100 + number, step=watched)
        say(f"acceptance: {number + 1} of {len(prompts)} prompts")
    rates = []
    for depth, width in enumerate(PROBE):
        # Half a count of each: a rate that was never seen is small, not 0.
        row = [(taken[depth][r] + 0.25) / (visits[depth][r] + 0.5) for r in range(width)]
        rates.append([min(row[: r + 1]) for r in range(width)])
    return rates


def tune(
    pipeline: Pipeline,
    strategy: Strategy,
    *,
    temperature: float = 1.0,
    prompts: Sequence[str | int] = PROMPTS,
    finalists: int = 4,
    repeats: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Find the static tree with the most tokens a second for a strategy, and keep it in the cache."""
    from lantern_accel.bench import environment

    rates = measure_rates(pipeline, strategy, temperature, prompts, say)
    costs, rows, times = [], [], []
    for nodes, depth in TIMED:
        paths = best_tree(rates, nodes, depth)
        cell = _cell(strategy, paths, temperature)
        decode_once(pipeline, cell, prompts, 0)
        runs = [decode_once(pipeline, cell, prompts, seed) for seed in range(1, 4)]
        milliseconds = 1e3 * statistics.median(r.seconds / r.steps for r in runs)
        features = _features(paths)
        rows.append(features)
        times.append(milliseconds)
        costs.append(
            dict(zip(("nodes", "depth", "tests"), features[1:], strict=True)) | {"ms": milliseconds}
        )
        say(
            f"cost: {int(features[1])} nodes, {int(features[2])} deep: {milliseconds:.2f} ms a step"
        )
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
    candidates.sort(key=lambda c: -c.predicted_rate)
    best = candidates[:finalists]
    cells = [_cell(strategy, c.paths, temperature) for c in best]
    base = Cell(strategy=pipeline.strategy("vanilla"), batch=1, temperature=temperature)
    for cell in (base, *cells):
        decode_once(pipeline, cell, prompts, 0)
    for number in range(repeats):
        for cell in (base, *cells):
            cell.samples.append(decode_once(pipeline, cell, prompts, 1 + number))
        say(f"finalists: {number + 1} of {repeats}")
    for candidate, cell in zip(best, cells, strict=True):
        candidate.measured_tokens_per_second = cell.tokens_per_second
        candidate.measured_compression = cell.step_compression
    winner = max(best, key=lambda c: c.measured_tokens_per_second or 0.0)
    key = key_of(pipeline, strategy, temperature)
    found = Tuned(
        key=key,
        tree=StaticTree(name="tuned", paths=winner.paths),
        tokens_per_second=winner.measured_tokens_per_second or 0.0,
        vanilla_tokens_per_second=base.tokens_per_second,
        rates=rates,
        costs=costs,
        candidates=candidates[:20],
        environment=environment(pipeline),
    )
    write_json(tuned_path(key), found.model_dump(mode="json"))
    return found


def _cell(strategy: Strategy, paths: tuple[TreePath, ...], temperature: float) -> Cell:
    tree = StaticTree(name="candidate", paths=paths)
    return Cell(strategy=strategy.override(tree=tree), batch=1, temperature=temperature)
