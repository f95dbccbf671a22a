"""Finds the tree for a device: what a step costs here, what its drafts are worth, the best of both.

Acceptance is measured per depth and sibling rank with a wide tree; if these rates are independent
(Sequoia, arXiv 2402.12374), a node is worth the product of the rates on its path. Step costs are
measured on a few trees and fitted; the best candidates are then decoded with and the fastest is kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from itertools import islice
from math import prod
from statistics import median
from typing import Literal

import numpy as np
from pydantic import Field

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.errors import StrategyError
from lantern_accel.records import Record
from lantern_accel.strategy.choices import Choice
from lantern_accel.strategy.sources import Path as TreePath
from lantern_accel.strategy.sources import chain_paths
from lantern_accel.strategy.trees import TreeTables, tree_paths
from lantern_accel.strategy.values import StaticTree
from lantern_accel_profiles.measure.environment import describe
from lantern_accel_profiles.measure.record import Cell
from lantern_accel_profiles.measure.samples import about, engine_of, new_cell
from lantern_accel_profiles.tuning.search import PLAIN, Evidence, Search

#: Siblings per node of the measuring tree, by depth.
PROBE = (5, 3, 2, 2, 1, 1)
#: Trees whose steps are timed to fit the cost model, by (nodes, depth).
TIMED = ((1, 1), (2, 2), (4, 4), (4, 2), (8, 3), (8, 6), (16, 4), (24, 6), (40, 5))
FINALISTS = 4
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
    return 1.0 + sum(prod(rates[d][rank] for d, rank in enumerate(path)) for path in paths)


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


class Candidate(Record):
    """One tree: predicted and, for the best few, measured."""

    paths: tuple[TreePath, ...]
    depth: int
    expected_tokens: float = Field(description="tokens a step under the measured rates")
    predicted_ms: float


def _no_counts() -> list[list[float]]:
    return [[0.0] * width for width in PROBE]


class TreeEvidence(Evidence):
    """What a run has measured so far, kept next to its result until it is complete."""

    kind: Literal["lantern_accel.tuning"] = "lantern_accel.tuning"
    prompts: int = 0
    taken: list[list[float]] = Field(default_factory=_no_counts)
    visits: list[list[float]] = Field(default_factory=_no_counts)
    costs: list[dict[str, float]] = Field(default_factory=list)
    finalists: dict[str, Cell] = Field(default_factory=dict)


class TreeTuner(Search[TreeEvidence]):
    """Finds the static tree with the most tokens per second for a strategy, at batch 1.

    The choice's evidence has the acceptance ``rates`` by depth and sibling rank, the ``costs`` of timed
    trees (nodes, depth, tests, ms per step), the 20 best ``candidates`` and the ``environment``.
    """

    kind = TreeEvidence

    def check(self) -> None:
        if self.strategy.drafts.device_sets != "tree":
            raise StrategyError(
                f"the strategy {self.strategy.name!r} has no static tree to tune; choose auto, which "
                "finds the best windows too, or eagle or lantern++"
            )

    def key(self, batch: int) -> dict[str, object]:
        return self.pipeline.measurements.tree_key(self.strategy, self.temperature)

    def settings(self) -> dict[str, object]:
        timed = [list(pair) for pair in TIMED]
        return {"temperature": self.temperature, "probe": list(PROBE), "timed": timed}

    def choose(self, batch: int, repeats: int) -> Choice:
        """Measure rates and costs, race the best trees by them, and keep the fastest."""
        rates = self.measure_rates()
        costs = self.measure_costs(rates)
        candidates = _candidates(rates, costs)
        best = candidates[:FINALISTS]
        cells = self.finalists(best, repeats)
        winner = max(best, key=lambda c: cells[_words(c.paths)].tokens_per_second)
        environment = describe(self.pipeline.backend, self.pipeline.dtype)
        return self.make_choice(
            batch,
            self.strategy.override(drafts=StaticTree(name="tuned", paths=winner.paths)),
            _words(winner.paths),
            cells,
            rates=rates,
            costs=costs,
            candidates=[one.model_dump(mode="json") for one in candidates[:20]],
            environment=environment.model_dump(mode="json"),
        )

    def dump(self, choices: Sequence[Choice]) -> dict[str, object]:
        return choices[0].model_dump(mode="json")

    def measure_rates(self) -> list[list[float]]:
        """Measure how often the sibling of each rank is accepted, given that its parent was.

        A rate is the share of visits of a parent at depth d that end at its child of rank r. Rates are
        made to fall with rank (a later sibling is only tried when the earlier ones failed).
        """
        evidence = self.evidence
        began = time.perf_counter()
        for number, prompt in enumerate(islice(self.prompts, evidence.prompts, None), 1):
            taken, visits = self._visit(prompt, 100 + evidence.prompts)
            # Counted only when the prompt is done, so that an interruption counts nothing twice.
            evidence.taken = _count_added(evidence.taken, taken)
            evidence.visits = _count_added(evidence.visits, visits)
            evidence.prompts += 1
            self.keep()
            each = (time.perf_counter() - began) / number
            left = about(each * (len(self.prompts) - evidence.prompts + 6 * len(TIMED)))
            self.say(f"acceptance: {evidence.prompts} of {len(self.prompts)} prompts, {left} left")
        rates = []
        for taken_row, visits_row in zip(evidence.taken, evidence.visits, strict=True):
            # Half a count of each: a rate that was never seen is small, not 0.
            row = [(t + 0.25) / (v + 0.5) for t, v in zip(taken_row, visits_row, strict=True)]
            rates.append([min(row[: r + 1]) for r in range(len(row))])
        return rates

    def _visit(self, prompt: str | int, seed: int) -> tuple[list[list[float]], list[list[float]]]:
        """Decode one prompt over the measuring tree; count children taken and parents visited."""
        tree = StaticTree(name="probe", paths=probe_paths(PROBE))
        tables = TreeTables(tree_paths(tree))
        nodes = [(), *sorted(tree.paths, key=lambda p: (len(p), p))]
        cell = new_cell(self.strategy.override(drafts=tree), 1, self.temperature)
        ready = engine_of(self.pipeline, cell)
        engine: Engine = ready.engine
        taken, visits = _no_counts(), _no_counts()

        def count_step() -> None:
            # A device that tells lengths late runs a step more on an image that is complete: no visit.
            complete = int(engine.state.length) + 1 >= engine.geometry.tokens
            engine.step()
            if complete:
                return
            state = engine.state
            last = int(state.last_length)
            assert isinstance(state, TreeState)
            path = state.last_path[0].tolist()
            for depth in range(min(max(last, 0) + 1, len(PROBE))):
                for rank in range(len(tables.children[path[depth]])):
                    visits[depth][rank] += 1
                if depth < last:
                    taken[depth][nodes[path[depth + 1]][-1]] += 1

        sampling = self.pipeline.sampling(temperature=self.temperature)
        self.pipeline.decode_only([prompt], cell.strategy, sampling, seed, step=count_step)
        return taken, visits

    def measure_costs(self, rates: Sequence[Sequence[float]]) -> list[dict[str, float]]:
        """Time a step of several trees: nodes, depth, sibling tests and median milliseconds of each."""
        for nodes, depth in TIMED[len(self.evidence.costs) :]:
            cell = self._cell(best_tree(rates, nodes, depth))
            self.warm(cell)
            for _ in range(3):
                self.sample(cell)
            ms = 1e3 * median((s.prefill + s.decode) / s.steps for s in cell.samples)
            _, *features = _features(tree_paths(cell.strategy.drafts))
            cost = dict(zip(("nodes", "depth", "tests"), features, strict=True)) | {"ms": ms}
            self.evidence.costs.append(cost)
            self.keep()
            self.say(f"cost: {features[0]:.0f} nodes, {features[1]:.0f} deep: {ms:.2f} ms per step")
        return self.evidence.costs

    def finalists(self, best: Sequence[Candidate], repeats: int) -> dict[str, Cell]:
        """Decode with plain decoding and the best candidates in turns; return their cells by tree."""
        plain = new_cell(self.pipeline.strategy(PLAIN), 1, self.temperature)
        fresh = {PLAIN: plain} | {_words(c.paths): self._cell(c.paths) for c in best}
        known = self.evidence.finalists
        cells = {name: known.get(name, cell) for name, cell in fresh.items()}
        self.evidence.finalists = cells
        self.race(cells, repeats)
        return cells

    def _cell(self, paths: tuple[TreePath, ...]) -> Cell:
        tree = StaticTree(name="candidate", paths=paths)
        return new_cell(self.strategy.override(drafts=tree), 1, self.temperature)


def _count_added(above: list[list[float]], below: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(above, below, strict=True)]


def _candidates(
    rates: Sequence[Sequence[float]], costs: Sequence[dict[str, float]]
) -> list[Candidate]:
    """Return the best tree of every size and depth, and chains, the fastest by prediction first."""
    rows = [[1.0, c["nodes"], c["depth"], c["tests"]] for c in costs]
    times = [c["ms"] for c in costs]
    fit = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)[0]
    trees = {
        best_tree(rates, nodes, depth) for nodes in SIZES for depth in range(1, len(PROBE) + 1)
    } | {chain_paths(n) for n in range(1, len(PROBE) + 1)}
    candidates = [
        Candidate(
            paths=paths,
            depth=max(len(p) for p in paths),
            expected_tokens=expected_tokens(paths, rates),
            predicted_ms=max(float(np.dot(_features(paths), fit)), min(times) / 2),
        )
        for paths in trees
    ]
    return sorted(candidates, key=lambda c: (-c.expected_tokens / c.predicted_ms, c.paths))


def _words(paths: Sequence[TreePath]) -> str:
    return " ".join("".join(map(str, path)) for path in paths)
