"""Which copy would draft best is predicted by costs of products, of checks, and usual agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from lantern_accel.device.backend import Stopwatch
from lantern_accel.device.packed import Weight
from lantern_accel.generation import copies
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import REFERENCE, Projection
from lantern_accel.strategy.sources import DraftLength

#: A target whose check of n nodes costs 1 and a twentieth for every node.
TIMED = tuple(DraftLength(length=n, cost=1 + 0.05 * (n - 1)) for n in (1, 2, 4, 8, 16))
NODES = (1, 2, 4, 8, 16)


def times(**costs: float) -> dict[str, dict[int, float]]:
    """Products that cost so much at every number of rows; full ones are all that a check consists of."""
    found = {name: {2 * n: cost for n in NODES} for name, cost in costs.items()}
    return found | {"full": {2 * n: 1 + 0.05 * (n - 1) for n in NODES}}


KNOWN = times(int8=0.5, int6=0.41, int4=0.28)


def best(
    known: copies.ProductTimes = KNOWN,
    timed: Sequence[DraftLength] = TIMED,
    tokens: int = 256,
    step: float | None = None,
) -> copies.CopyCandidate:
    """Return the first of what is predicted for an image of ``tokens``."""
    return copies.likely_copies(known, 2, timed, tokens, step)[0]


def test_memory_alone_makes_windows_of_the_copys_own_best() -> None:
    found = best()
    assert found.tree.window == 16, "more rows cost nothing"
    assert 1 <= found.tree.passes <= math.ceil(found.tree.length / 2.9)
    lengths = [one.length for one in found.tree.draft_lengths]
    assert lengths[0] == 1 and lengths[1] >= 16 and lengths == sorted(lengths)
    assert 2.3 < found.speedup < 4


def test_own_windows_are_longer_where_the_targets_pay() -> None:
    assert copies.own_windows(TIMED) == [1, 2, 4, 8, 16]
    cheap = (
        *(one.model_copy(update={"cost": 1.0}) for one in TIMED),
        DraftLength(length=32, cost=1.1),
    )
    assert copies.own_windows(cheap) == [1, 2, 4, 8, 16, 32]
    dear = [one.model_copy(update={"cost": 0.3 * one.length + 0.7}) for one in TIMED]
    assert copies.own_windows(dear) == [1, 2, 4, 8], "so that products of 32 rows are not timed"
    assert copies.own_windows([]) == [1]


def test_a_copy_whose_rows_cost_drafts_one_token_a_pass() -> None:
    known = times(int8=0.5, int6=0.41, int4=0.28)
    for name in ROUNDINGS:
        known[name] |= {2 * n: n * 0.6 for n in NODES[1:]}
    tree = best(known).tree
    assert tree.window == 0 and tree.passes == 0
    assert [one.length for one in tree.draft_lengths][:2] == [1, 3]


def test_what_is_no_product_costs_a_copy_as_much_as_the_target() -> None:
    known = times(int8=0.5, int6=0.5, int4=0.5)
    dearer = [one.model_copy(update={"cost": one.length * 1.0}) for one in TIMED]
    assert best(known, dearer).speedup < 1 < best(known).speedup
    assert best(step=2.0).speedup < best().speedup, "nor is it spared of a plain step"


def test_a_copy_that_costs_what_the_target_does_promises_nothing() -> None:
    known = {name: {2: 1.0} | dict.fromkeys((4, 8, 16, 32), 9.0) for name in ("full", *ROUNDINGS)}
    assert best(known).speedup < 1


def test_windows_that_bring_more_promise_a_copy_more() -> None:
    better = [one.model_copy(update={"tokens_per_step": 0.6 * one.length + 0.4}) for one in TIMED]
    assert best(timed=better).speedup > 1.1 * best().speedup


def test_the_second_guess_is_by_the_same_copy() -> None:
    first, second = copies.likely_copies(KNOWN, 2, TIMED, 256)
    assert first.tree.weights == second.tree.weights and first.tree.window != second.tree.window
    assert first.speedup >= second.speedup


def test_no_more_is_drafted_than_an_image_has() -> None:
    assert not copies.likely_copies(KNOWN, 2, TIMED, 2), "an image of two tokens"
    assert best(tokens=7).tree.length <= 6


def test_products_of_every_kind_are_timed_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = torch.nn.Sequential(Projection(70, 40, bias=False), Projection(40, 9, bias=False))
    shapes: set[tuple[int, int]] = set()
    sound = type(REFERENCE).linear

    def linear(self: object, x: torch.Tensor, weight: Weight, bias: object) -> torch.Tensor:
        if not isinstance(weight, torch.Tensor):
            shapes.add((len(x), weight.shape[1]))
        return sound(REFERENCE, x, weight, None)

    def timed(rows: list[int]) -> copies.ProductTimes:
        shapes.clear()
        seconds = iter(range(1, 1000))

        class Watch(Stopwatch):
            def __exit__(self, *given: object) -> None:
                self.seconds = float(next(seconds))

        return copies.product_times(
            target, REFERENCE, torch.float32, rows, lambda: Watch(lambda: None)
        )

    monkeypatch.setattr(type(REFERENCE), "linear", linear)
    found = timed([2, 8])
    assert found.keys() == {"full", *ROUNDINGS} and found["int4"].keys() == {2, 8}
    turns = len(found) * (copies.auto.PRODUCT_ROUNDS + 1)
    assert found["full"] == {2: 1e3, 8: 1e3 * (1 + turns)}, "the least of the rounds, in turns"
    assert shapes == {(2, 70), (8, 70), (2, 40), (8, 40)}
    monkeypatch.setattr(copies.auto, "PRODUCT_WEIGHTS", 1)
    found = timed([2])
    assert shapes == {(2, 70)}, "the largest alone"
    assert found["full"][2] == pytest.approx(1e3 * (70 * 40 + 40 * 9) / (70 * 40)), "counts for all"


def test_fewer_passes_than_settle_every_draft_may_promise_more() -> None:
    # A pass costs half a plain step: the last ones settle drafts that are mostly right by then.
    flat = tuple(DraftLength(length=n, cost=1.0 if n < 16 else 1.95) for n in (1, 2, 4, 8, 16))
    tree = best(times(int8=0.66, int6=0.9, int4=0.9), flat).tree
    assert tree.weights == "int8" and tree.window == 8
    assert tree.passes / tree.length < 0.43
