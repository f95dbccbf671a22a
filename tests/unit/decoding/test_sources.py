"""A stranger's source of drafts: one file and one registration, exact without another change.

The drafts are the tokens of the row above, in an image that is a grid: certain ones, q = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from support.chi_square import misfit
from support.engines import GREEDY, SAMPLED, engine_of, finish
from support.moving import IMAGES, SAMPLING, VOCAB, begin, counts_of, joint, law_models
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.sources import CertainDrafts, CommittedPath, DraftContext, register
from lantern_accel.decoding.sources.tree import TreeState
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import LanternPP
from lantern_accel.strategy.sources import SOURCES, DraftConfig, Path, chain_paths
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import (
    Coupling,
    NoTree,
    Sampling,
    StaticTree,
    Strategy,
    named_strategy,
)

# --- what a stranger writes ------------------------------------------------------------------------


class RowAbove(DraftConfig):
    """Drafts copied from the row above."""

    kind: Literal["row-above"] = "row-above"
    length: int = Field(4, ge=1, le=64)

    @property
    def shape(self) -> tuple[Path, ...]:
        return chain_paths(self.length)


@register(RowAbove)
class Copies(CertainDrafts[RowAbove]):
    """Copies tokens of the row above, or where that row is a draft itself, of the draft."""

    def __init__(self, given: DraftContext[RowAbove]) -> None:
        super().__init__(given)
        self.row = given.verifying.target.config.row_tokens
        self.seen = torch.zeros(
            1, dtype=given.session.ops.index, device=given.verifying.target.weight.device
        )

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {"seen": self.seen}

    def begin(self, state: TreeState, features: Tensor, weights: Tensor) -> None:
        self.seen.zero_()

    def guess(self, state: TreeState) -> Tensor:
        found: list[Tensor] = []
        for ahead in range(1, self.given.config.length + 1):
            if ahead > self.row:
                found.append(found[ahead - self.row - 1])
                continue
            above = (state.length + (ahead - self.row)).clamp(min=0).unsqueeze(1)
            found.append(state.tokens.gather(1, above).squeeze(1))
        return torch.stack(found, dim=1)

    def after(self, state: TreeState, kept: CommittedPath) -> None:
        self.seen.add_(kept.gained.sum())


# --- what it is held to ----------------------------------------------------------------------------

SMALL = tiny_models(0)


@pytest.mark.parametrize("coupling", ["invariant", "maximal"])
@pytest.mark.parametrize("length", [1, 3])
def test_images_follow_the_law_that_enumeration_gives(length: int, coupling: Coupling) -> None:
    strategy = Strategy(drafts=RowAbove(length=length), coupling=coupling)
    engine = engine_of(law_models(), strategy, SAMPLING, 5 * IMAGES)
    with torch.inference_mode():
        begin(engine)
        tokens = engine.run().tokens
        law = joint(engine.verifying.target, SAMPLING)
    counts = counts_of(tokens, VOCAB)
    assert misfit(counts, law) < 4.9
    assert misfit(counts, law.roll(1)) > 4.9  # another law is told from it
    kept = engine.state.histogram.sum(0)
    assert (kept[: min(length, 2) + 1] > len(tokens) / 100).all(), "drafts were kept and refused"


@pytest.mark.parametrize("given", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("length", [1, 4, 9])  # a row has six tokens
def test_its_images_are_vanillas_token_by_token(length: int, given: Sampling) -> None:
    engine = engine_of(SMALL, Strategy(drafts=RowAbove(length=length)), given, 3)
    want = finish(engine_of(SMALL, Strategy(drafts=NoTree()), given, 3), seed=5).tokens
    assert torch.equal(finish(engine, seed=5).tokens, want)
    assert not engine.geometry.drafted
    # What it noted itself: every token but the first, and of each image's last step perhaps a few more.
    assert int(engine.source.buffers["seen"]) >= want.numel() - len(want)
    assert "source.seen" in engine.changes


def test_it_can_be_relaxed_with_a_price() -> None:
    strategy = Strategy(drafts=RowAbove(length=3), acceptance=LanternPP(k=8, lam=4.0))
    engine = engine_of(SMALL, strategy, SAMPLED, 3)
    finish(engine, seed=5)
    assert float(engine.state.quality_loss.sum()) > 0


def test_a_strategy_is_chosen_by_its_name_and_by_text_and_goes_through_json() -> None:
    nothing: Any = StaticTree(paths=((0,),))
    chosen = named_strategy("row-above", static=nothing, dynamic=nothing)
    assert chosen.drafts == RowAbove() and not chosen.needs_drafter and chosen.invariant
    assert parse_drafts("row-above:length=7") == RowAbove(length=7)
    longer = chosen.override(drafts=parse_drafts("row-above:length=7"))
    assert Strategy.model_validate_json(longer.model_dump_json()) == longer
    with pytest.raises(StrategyError, match="'row-above' has no field 'width'; it has length="):
        parse_drafts("row-above:width=7")
    with pytest.raises(StrategyError, match="length must be 1 or more"):
        parse_drafts("row-above:length=0")
    with pytest.raises(StrategyError, match="did you mean row-above"):
        named_strategy("row-abov", static=nothing, dynamic=nothing)
    with pytest.raises(
        StrategyError, match="takes none of the kind 'chain'; choose a strategy with"
    ):
        chosen.override(drafts=parse_drafts("chain:3"))


class Unmade(DraftConfig):
    kind: Literal["unmade"] = "unmade"

    @property
    def shape(self) -> tuple[Path, ...]:
        return chain_paths(1)


def test_a_source_that_nobody_makes_is_named() -> None:
    with pytest.raises(StrategyError, match="makes drafts of the kind 'unmade'"):
        engine_of(SMALL, Strategy(drafts=Unmade()), SAMPLED)


@pytest.fixture
def packages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install packages whose entry points bring sources, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}_drafts.py").write_text(source)
        info = tmp_path / f"{name}_drafts-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-drafts\nVersion: 1.0\n"
        )
        entry = f"[lantern_accel.sources]\n{name} = {name}_drafts\n"
        (info / "entry_points.txt").write_text(entry)

    yield install
    SOURCES.pop("pebble", None)


def test_a_package_brings_one_by_its_entry_point(packages: Any) -> None:
    packages(
        "pebble",
        "from typing import Literal\n"
        "from lantern_accel.strategy.sources import DraftConfig\n"
        "class Pebble(DraftConfig):\n"
        "    kind: Literal['pebble'] = 'pebble'\n"
        "    @property\n"
        "    def shape(self): return ((0,),)\n",
    )
    packages("rubble", "raise ImportError('libstone is missing')\n")
    assert parse_drafts("pebble").kind == "pebble"
    assert Strategy.model_validate({"drafts": {"kind": "pebble"}}).drafts.size == (2, 1)
    with pytest.raises(StrategyError, match=r"'rubble' cannot be loaded.*libstone is missing"):
        parse_drafts("rubble")
