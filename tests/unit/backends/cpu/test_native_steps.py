"""Whole steps in native calls against the same steps operator by operator, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import native
from support.engines import GREEDY, LOPSIDED, NAMED, SAMPLED, engine_of
from support.tiny import captions, neighbours, tiny_models
from torch import Tensor

from lantern_accel.device.plan import FusedStep, Refused, StepPlan
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import pack
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.sources import AnyKind, DraftLength
from lantern_accel.strategy.values import (
    ChainTree,
    Coupling,
    DynamicTree,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)
from lantern_accel_cpu.native.backend import NativeCpu

pytestmark = native.needs_native
UNGUIDED = Sampling(temperature=0.8, top_k=0, top_p=0.9, cfg_scale=1.0)
COUPLINGS: tuple[Coupling, ...] = ("invariant", "maximal")
FLOAT, BFLOAT = torch.float32, torch.bfloat16
LENGTHS = tuple(DraftLength(length=n, cost=1.0, tokens_per_step=1.0) for n in (1, 2, 5))
MOVING = Strategy(name="windows", drafts=Window(length=5, draft_lengths=LENGTHS))
#: Sampling, batch and dtype. The quick tier has each once, the long one what is left of the product.
QUICK: list[Any] = [(SAMPLED, 1, BFLOAT), (UNGUIDED, 2, FLOAT)]
LONG: list[Any] = [
    (SAMPLED, 1, FLOAT),
    (SAMPLED, 3, FLOAT),
    (SAMPLED, 3, BFLOAT),
    (UNGUIDED, 2, BFLOAT),
]
SETTINGS = [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
PAIRS = [
    (1, BFLOAT),
    (3, FLOAT),
    *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, FLOAT), (3, BFLOAT))),
]


class Pieces(NativeCpu):
    """The same kernels, without whole steps."""

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        return Refused("operators are compared")


class Ends(NativeCpu):
    """The same kernels, and what follows a pass at once."""

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        return Refused("only what follows a pass") if plan.target else super().fused_step(plan)


@contextmanager
def both(kind: type[NativeCpu] = NativeCpu, unit: str = "") -> Iterator[tuple[NativeCpu, Pieces]]:
    """Make a backend of a kind, and one of the same kernels that steps operator by operator."""
    kernels = native.kernels(unit)
    with native.threads(2):
        yield kind(0, kernels), Pieces(0, kernels)


def made(
    ops: NativeCpu,
    strategy: Strategy,
    given: Sampling,
    batch: int,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Return an engine of packed models that has been given its request."""
    target, drafter = tiny_models(3, **changes)
    features, mask = captions(target, 8)
    features = features.to(dtype)
    for model in (target, drafter):
        tables = model.rope_cos, model.rope_sin
        model.to(dtype)
        model.rope_cos, model.rope_sin = tables
        model.ops = ops
        pack(model, ops)
    table = neighbours(target.config.vocab_size, 10)
    engine = engine_of((target, drafter), strategy, given, batch, ops=ops, neighbours=table)
    condition = features[:batch]
    if given.guided:
        condition = torch.cat((condition, target.unconditional(batch)))
    engine.start(condition, mask[:batch], engine.randomness(3, list(range(batch))))
    return engine


def kept(engine: Any) -> dict[str, Tensor]:
    """Return what a step leaves to be read: nothing of complete images but their tokens and counters."""
    state, finite, g = engine.state, engine.finite, engine.geometry
    n, names = g.tokens, ("length", "step", "steps", "histogram", "last_length", "quality_loss")
    if not g.drafted:
        names = tuple(
            name for name in state.buffers if name not in ("uniforms", "tokens", "feature")
        )
    found = {name: getattr(state, name).clone() for name in names}
    found["tokens"] = state.tokens[:, :n].clone()
    # Drafts behind the next window are drawn again before anything reads them.
    reach = state.length + getattr(engine, "now", g.depth + 1)
    found["tokens"].masked_fill_(torch.arange(n) >= reach.unsqueeze(1), 0)
    if g.in_place:  # nor is anything of positions past the image read
        if g.kept:
            found["q"] = found["q"][:, :-1]
        found["newest"].clamp_(max=n - 1)
        late = found["row_keys"] // g.vocab >= n
        for name in ("row_keys", "row_previous", "row_tokens"):
            found[name].masked_fill_(late, 0)
    open_ = state.length < n - 1
    for name in ("root", "pending_count", "pending_tokens", "last_path", "slot_of", "place_of"):
        if g.drafted:
            found[name] = getattr(state, name)[open_].clone()
    if g.drafted:
        rows = torch.cat([open_] * g.branches)
        used = torch.arange(state.pending_tokens.shape[1]) < state.pending_count.unsqueeze(1)
        used = torch.cat([used] * g.branches)[rows]
        found["features"] = state.pending_features[rows][used].clone()
        found["pending_tokens"] = found["pending_tokens"][used[: int(open_.sum())]]
    return found | {name: getattr(finite, name).clone() for name in ("count", "holds", "report")}


def compare(
    strategy: Strategy,
    given: Sampling,
    batch: int,
    kind: type[NativeCpu] = NativeCpu,
    unit: str = "",
    **changes: Any,
) -> float:
    """Step both ways, past the end of the images, and compare each step; return the quality loss."""
    with both(kind, unit) as (whole, pieces), torch.inference_mode():
        got, want = (made(ops, strategy, given, batch, **changes) for ops in (whole, pieces))
        assert at_once(got) == (kind is NativeCpu) and not at_once(want)
        assert kind is NativeCpu or got.longest.fused_end is not None
        moves = torch.Generator().manual_seed(1)
        for step in range(want.geometry.tokens + 2):
            if len(want.lengths) > 1:
                lengths = want.lengths if want.source.returns or want.now > 1 else [1]
                length = lengths[int(torch.randint(len(lengths), (), generator=moves))]
                for engine in (got, want):
                    engine.move(length)
            for engine in (got, want):
                engine.step()
            for (name, a), (_, b) in zip(kept(want).items(), kept(got).items(), strict=True):
                # Quality losses are summed in another order.
                same = torch.allclose if name == "quality_loss" else torch.equal
                assert same(a, b), (name, step)
            if int(want.state.length.min()) == want.geometry.tokens - 1 and step > 3:
                break
        assert int(got.state.length.min()) == got.geometry.tokens - 1
        return float(want.state.quality_loss.sum())


def at_once(engine: Any) -> bool:
    """Return whether an engine, and a copy that drafts for it, has a native call for a whole step."""
    copy = getattr(engine.source, "copy", None)
    whole = engine.longest.fused is not None
    assert copy is None or (copy.fused is not None) == whole
    return whole


def same_images(strategy: Strategy, given: Sampling, batch: int, **changes: int) -> Any:
    """Decode both ways and plainly: the same images, in fewer steps; return the native engine."""
    with both() as (whole, pieces), torch.inference_mode():
        got, want = (made(ops, strategy, given, batch, **changes) for ops in (whole, pieces))
        plain = made(whole, Strategy(), given, batch, **changes)
        assert at_once(got) and not at_once(want)
        done = [engine.run() for engine in (got, want, plain)]
        assert torch.equal(done[0].tokens, done[2].tokens)
        assert torch.equal(done[1].tokens, done[2].tokens)
        assert int(done[0].steps.max()) < int(done[2].steps.min())
    return got


@pytest.mark.parametrize(("given", "batch", "dtype"), SETTINGS)
def test_plain_steps_and_windows(given: Sampling, batch: int, dtype: torch.dtype) -> None:
    for strategy in (NAMED["vanilla"], Strategy(name="scd", drafts=Window(length=7)), MOVING):
        compare(strategy, given, batch, dtype=dtype, dim=64)
    compare(Strategy(coupling="maximal"), given, batch, dtype=dtype, dim=64)


@pytest.mark.parametrize("unit", native.unit_cases())
@pytest.mark.parametrize(
    ("length", "changes", "coupling"),
    [
        (0, {}, "maximal"),
        (2, {}, None),
        (5, {"passes": 0}, None),
        (5, {"fresh": "uniform"}, None),
        (5, {"draft_lengths": LENGTHS}, None),
        (16, {}, None),
    ],
)
def test_what_follows_a_pass_by_operators(
    length: int, changes: dict[str, Any], coupling: Coupling | None, unit: str
) -> None:
    drafts = Window(length=length, **changes) if length else NAMED["vanilla"].drafts
    strategy = Strategy(name="scd", drafts=drafts).override(coupling=coupling)
    plain = Sampling(temperature=0.9, top_k=0, top_p=1.0, cfg_scale=2.0)
    for given, batch in ((SAMPLED, 3), (plain, 1)):
        compare(strategy, given, batch, Ends, unit)


def test_windows_of_more_rows_than_a_product_does_at_a_time() -> None:
    compare(Strategy(name="scd", drafts=Window(length=17)), SAMPLED, 3)  # 102 rows, of 96


@pytest.mark.parametrize(("batch", "dtype"), PAIRS)
def test_greedy_steps(batch: int, dtype: torch.dtype) -> None:
    trees = [Strategy(name="eagle", drafts=tree) for tree in (ChainTree(length=3), LOPSIDED)]
    beams = [DynamicTree(top_k=k, depth=d, total=n) for k, d, n in ((1, 0, 2), (3, 2, 9))]
    fresh = [Window(length=7, fresh=kind) for kind in ("above", "uniform")]
    for strategy in (
        NAMED["vanilla"],
        MOVING,
        Strategy(name="self", drafts=SelfDrafts.over((1, 4, 6), weights="int8")),
        *(Strategy(name="scd", drafts=one) for one in (*fresh, Window(length=7, passes=3))),
        *trees,
        *(Strategy(name="eagle2", drafts=tree) for tree in beams),
    ):
        compare(strategy, GREEDY, batch, dtype=dtype, dim=64)


@pytest.mark.parametrize(("batch", "dtype"), PAIRS)
@pytest.mark.parametrize("rule", [Lantern(k=8, delta=0.3), LanternPP(k=8, lam=4)], ids=repr)
def test_relaxed_trees_without_temperature(
    rule: Lantern | LanternPP, batch: int, dtype: torch.dtype
) -> None:
    flat = DynamicTree(top_k=4, depth=0, total=5)
    deep = [DynamicTree(top_k=k, depth=d, total=n) for k, d, n in ((3, 2, 9), (4, 3, 14))]
    quality_losses = [
        compare(Strategy(name="lantern", drafts=tree, acceptance=rule), GREEDY, batch, dtype=dtype)
        for tree in (LOPSIDED, NAMED["lantern++"].drafts, flat, *deep)
    ]
    assert sum(quality_losses) > 0, "codes that are not the likeliest were kept"


@pytest.mark.parametrize("weights", sorted(ROUNDINGS))
@pytest.mark.parametrize(("given", "batch", "dtype"), QUICK)
def test_drafts_of_a_copy(given: Sampling, batch: int, weights: str, dtype: torch.dtype) -> None:
    drafts = SelfDrafts.over((1, 4, 6), weights=weights)
    compare(Strategy(name="self", drafts=drafts), given, batch, dtype=dtype, dim=64)


@pytest.mark.parametrize("weights", sorted(ROUNDINGS))
def test_drafts_of_a_copys_windows_end_in_the_same_images(weights: str) -> None:
    # A native step draws no drafts behind its next window, so that those of a jump may differ.
    drafts = SelfDrafts.over((1, 4, 6), weights=weights, window=4, passes=3)
    same_images(Strategy(name="self", drafts=drafts), SAMPLED, 3, dim=64)


@pytest.mark.parametrize("tree", [ChainTree(length=1), ChainTree(length=3), LOPSIDED])
@pytest.mark.parametrize(("given", "batch", "dtype"), SETTINGS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_trees(
    tree: AnyKind, given: Sampling, batch: int, dtype: torch.dtype, coupling: Coupling
) -> None:
    strategy = Strategy(name="eagle", drafts=tree, coupling=coupling)
    compare(strategy, given, batch, dtype=dtype, dim=64)


@pytest.mark.parametrize(
    ("top_k", "depth", "total", "given", "batch", "dtype"),
    [
        *((*shape, *one) for shape in ((1, 0, 2), (3, 2, 9)) for one in QUICK),
        *(
            pytest.param(*shape, *one, marks=pytest.mark.long)
            for shapes, settings in (
                (((1, 0, 2), (3, 2, 9)), LONG),
                (((4, 0, 5), (2, 3, 6)), [(SAMPLED, 3, FLOAT)]),
            )
            for shape in shapes
            for one in settings
        ),
    ],
)
@pytest.mark.parametrize("name", ["eagle2", "eagle2, maximal", "lantern", "lantern++"])
def test_trees_whose_shape_follows_from_the_drafts(
    name: str, given: Sampling, batch: int, top_k: int, depth: int, total: int, dtype: torch.dtype
) -> None:
    strategy = NAMED[name.partition(",")[0]].override(
        drafts=DynamicTree(top_k=top_k, depth=depth, total=total),
        coupling="maximal" if "," in name else None,
    )
    compare(strategy, given, batch, dtype=dtype, dim=64)


@pytest.mark.parametrize("taps", [(), (1,)])
def test_beams_of_nothing_but_ties(taps: tuple[int, ...]) -> None:
    # With a filter of one code all others are on the floor.
    one = SAMPLED.model_copy(update={"top_k": 1, "top_p": 1.0})
    for strategy in (NAMED["eagle2"], NAMED["lantern"]):
        tree = DynamicTree(top_k=4, depth=3, total=14)
        compare(strategy.override(drafts=tree), one, 2, taps=taps)


@pytest.mark.parametrize("residual", ["official", "optimal", "aggregate"])
def test_beams_under_every_residual(residual: str) -> None:
    compare(NAMED["lantern"].override(residual=residual), SAMPLED, 2)


@pytest.mark.parametrize("taps", [(), (1,)])
@pytest.mark.parametrize("lengths", [(2, 3, 4), (1, 2, 4)])
def test_chains_that_change_their_length(lengths: tuple[int, ...], taps: tuple[int, ...]) -> None:
    strategy = Strategy(name="chains", drafts=ChainTree.over(lengths))
    for batch in (1, 3):
        compare(strategy, SAMPLED, batch, taps=taps)


@pytest.mark.parametrize(("blocks", "taps"), [(2, ()), (1, (1,)), (2, (1, 2))])
def test_drafters_with_taps_and_more_blocks(blocks: int, taps: tuple[int, ...]) -> None:
    for strategy in (NAMED["lantern++"], NAMED["eagle"]):
        compare(strategy, SAMPLED, 2, blocks=blocks, taps=taps)


@pytest.mark.parametrize("given", [SAMPLED, GREEDY])
@pytest.mark.parametrize("name", ["vanilla", "eagle"])
def test_a_step_counts_numbers_that_are_not_finite(name: str, given: Sampling) -> None:
    with both() as (whole, _), torch.inference_mode():
        engine = made(whole, NAMED[name], given, 2)
        engine.step()
        engine.verifying.target.norm.weight[3] = float("nan")
        engine.step()
        assert engine.finite.count.tolist() == [2, 2]
        assert int(engine.state.step) == 3


def test_what_has_no_kernel_goes_the_engines_way() -> None:
    sjd = Strategy(drafts=Window(length=5, fresh="uniform"), coupling="maximal")
    budget = NAMED["lantern++"].model_copy(update={"tv_budget": 0.1})
    with both(Ends) as (ends, _), torch.inference_mode():
        assert made(ends, sjd, SAMPLED, 2).longest.fused_end is None
    with both() as (whole, _), torch.inference_mode():
        engine = made(whole, budget, SAMPLED, 1)
        assert not at_once(engine)
        engine.step()
        assert int(engine.state.step) == 2


def test_a_number_that_is_not_finite_is_counted_in_its_image() -> None:
    with both(Ends) as backends, torch.inference_mode():
        for ops in backends:
            engine = made(ops, Strategy(name="scd", drafts=Window(length=4)), SAMPLED, 2)
            real = engine.verifying.guidance

            def damaged(*given: Any, real: Any = real) -> Tensor:
                logits: Tensor = real(*given).clone()
                logits[1, 2, 4] = float("nan")
                return logits

            engine.step()
            engine.verifying.guidance = damaged
            engine.step()
            assert engine.finite.count.tolist() == [3, 2]
