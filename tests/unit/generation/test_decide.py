"""A request's decision is one value: made from a table of measurements, recorded, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.generation.decision import Decision, Estimate, Timings, decide
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.rules import Exact, LanternPP
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import (
    AUTO,
    ChainTree,
    NoTree,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as loaded:
        yield loaded


def test_a_decision_is_given_back(pipeline: Pipeline) -> None:
    asked: dict[str, Any] = {"seed": 3, "num_images": 3, "strategy": "scd", "window": 4}
    drawn = pipeline.generate("red heart", batch_size=2, **asked)
    decision = drawn.stats.decision
    assert [(one.images, one.rows) for one in decision.parts] == [(2, 2), (1, 1)]
    assert decision.strategy == drawn.stats.strategy and drawn.stats.batch_size == 2
    assert decision.parts[0].memory > 0
    kept = Decision.model_validate_json(decision.model_dump_json())
    assert kept == decision
    again = pipeline.generate("red heart", seed=3, num_images=3, decision=kept)
    assert again.stats.decision == decision and torch.equal(again.tokens, drawn.tokens)
    # One that was made for more images serves fewer.
    first = pipeline.generate("red heart", seed=3, only=[0], num_images=3, decision=kept)
    assert torch.equal(first.tokens, drawn.tokens[:1])


def test_nothing_is_timed_where_a_decision_is_given(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pipeline.generate("red heart", seed=3)
    (part,) = drawn.stats.decision.parts
    part = part.model_copy(update={"strategy": part.strategy.with_drafts(NoTree())})
    plain = drawn.stats.decision.model_copy(update={"parts": (part,)})
    monkeypatch.setattr(pipeline.measurements, "ask", None)
    again = pipeline.generate("red heart", seed=3, decision=plain)
    assert isinstance(again.stats.strategy.drafts, NoTree)
    assert torch.equal(again.tokens, drawn.tokens)


@pytest.mark.parametrize(
    ("made", "settings", "named"),
    [
        ({"weights_hash": "other"}, {}, "the weights 'other'"),
        ({"dtype": "bfloat16"}, {}, "the dtype"),
        ({"device": "another card"}, {}, "the device"),
        ({}, {"strategy": "eagle"}, "the strategy 'vanilla'"),
        ({}, {"cfg_scale": 1.0}, "guidance"),
        ({}, {"temperature": 0.0}, "guidance or filters"),
        ({}, {"batch_size": 5}, "batch size 1, not 5"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(
    pipeline: Pipeline, made: dict[str, str], settings: dict[str, Any], named: str
) -> None:
    decision = pipeline.generate("red heart", seed=3, strategy="vanilla").stats.decision
    with pytest.raises(RequestError, match=named):
        pipeline.generate("red heart", decision=decision.model_copy(update=made), **settings)


def test_a_stream_records_one_too(pipeline: Pipeline) -> None:
    stream = pipeline.stream("red heart", seed=3, strategy="vanilla", num_images=3, batch_size=2)
    assert [one.done for one in stream][-1]
    decision = stream.result.stats.decision
    assert decision.asked == "vanilla"
    assert [(one.images, one.rows) for one in decision.parts] == [(2, 2)], "the third image joins"


# --- by values: no model, no engine, no clock -----------------------------------------------------

AUTO_STRATEGY = Strategy(name=AUTO, drafts=Window(), acceptance=LanternPP())
PLACE = dict.fromkeys(("model", "weights_hash", "backend", "device", "dtype"), "x")


@dataclass
class Table:
    """A device of ten units, in which a batch takes one a row, and a copy of the target five."""

    free: int = 10
    copies: bool = True

    def holds(self, strategy: Strategy) -> bool:
        return self.copies or strategy.drafts.copy_weights is None

    def bytes_of(self, batch: int, strategy: Strategy, *more: object) -> int:
        return batch + 5 * (strategy.drafts.copy_weights is not None)


def timed(drafts: Window | SelfDrafts | ChainTree, *costs: float) -> Estimate:
    """Return a source whose steps of lengths 2, 4, ... cost so much, and add as many tokens as that."""
    lengths = tuple(
        DraftLength(length=2**power, cost=cost, tokens_per_step=float(2**power))
        for power, cost in enumerate((1.0, *costs))
    )
    rule = LanternPP() if isinstance(drafts, ChainTree) else Exact()
    made = Strategy(name=AUTO, drafts=drafts, acceptance=rule)
    return Estimate(strategy=made.with_drafts(draft_lengths=lengths))


WINDOW = Window.over((1, 2, 4))
COPY = SelfDrafts.over([1, 2, 4])
CHAIN = ChainTree.over([1, 2, 4])


def decided(
    *found: Estimate, rows: int = 1, copies: bool = True, asked: Strategy = AUTO_STRATEGY
) -> Decision:
    """Return what one batch is decoded with, after these sources were timed."""
    return decided_by({rows: rows}, {rows: Timings(timed=found)}, Table(copies=copies), asked)


def decided_by(
    rows: dict[int, int],
    table: dict[int, Timings],
    free: Any = None,
    asked: Strategy = AUTO_STRATEGY,
) -> Decision:
    return decide(asked, Sampling(), rows, table, free or Table(), PLACE)


@pytest.mark.parametrize(
    ("window", "other", "copies", "kind", "memory"),
    [
        ((1.9, 3.9), timed(CHAIN, 1.8, 3.6), True, "none", 2),
        ((1.2, 1.5), timed(CHAIN, 1.4, 2.0), True, "window", 2),
        ((1.5, 2.5), timed(CHAIN, 1.1, 1.3), True, "chain", 2),
        ((1.5, 2.5), timed(COPY, 1.1, 1.3), True, "self", 7),
        ((1.5, 2.5), timed(COPY, 1.1, 1.3), False, "none", 2),
    ],
    ids=["nothing pays", "a window", "a chain", "a copy", "a copy that does not fit"],
)
def test_what_was_measured_decides(
    window: tuple[float, float], other: Estimate, copies: bool, kind: str, memory: int
) -> None:
    (part,) = decided(timed(WINDOW, *window), other, rows=2, copies=copies).parts
    assert (part.strategy.drafts.kind, part.memory, part.free) == (kind, memory, 10)
    assert part.strategy.acceptance.relaxed == (kind == "chain"), "plain decoding relaxes nothing"


def test_each_batch_has_measurements_of_its_own() -> None:
    table = {
        4: Timings(timed=(timed(WINDOW, 1.9, 3.9),)),
        1: Timings(timed=(timed(WINDOW, 1.1, 1.2),)),
    }
    made = decided_by({3: 4, 1: 1}, table)
    assert [(p.images, p.rows, p.memory, p.strategy.drafts.kind) for p in made.parts] == [
        (3, 4, 4, "none"), (1, 1, 1, "window"),
    ]  # fmt: skip


def test_what_tune_found_is_taken_and_a_named_strategy_needs_no_measurement() -> None:
    tuned = timed(WINDOW, 1.9, 3.9).strategy  # raced, so that no prediction is asked
    assert decided_by({1: 1}, {1: Timings(taken=tuned)}).strategy == tuned
    named = Strategy(name="scd", drafts=Window())
    made = decided(asked=named)
    assert made.strategy == named and made.asked == "scd"


def test_a_relaxed_decision_has_what_exact_decoding_had() -> None:
    chain = timed(CHAIN, 1.1, 1.3).model_copy(update={"exact": 2.06})
    for found, exact in ((chain, 2.06), (timed(WINDOW, 1.1, 1.3), None)):
        assert decided(found).parts[0].exact_tokens_per_step == exact
