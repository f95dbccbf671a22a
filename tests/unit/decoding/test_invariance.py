"""A seed is a picture: every exact strategy draws vanilla's tokens, whatever drafts, when and where.

Equality stands in for statistics here: whatever is wrong with a draft's test, a position's noise or the
past that a token was judged by changes a token. That vanilla itself follows the target is in the tests of
its law.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.engines import LOPSIDED, TREES, engine_of, finish, of_family, request_of, sampling_of
from support.moving import Walk
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding import accept, logits, session
from lantern_accel.decoding.sources import beam, static, window
from lantern_accel.device import noise, sampling
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.preferences import Preferences
from lantern_accel.families.registry import families
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.values import ChainTree, NoTree, Sampling, SelfDrafts, Strategy, Window
from lantern_accel.testing.tiny import tiny_model
from lantern_accel.testing.trace import OpRecorder

SAMPLED = Sampling(temperature=1.0, top_k=40, top_p=0.95, cfg_scale=2.0)
PLAIN = Sampling(temperature=0.9, top_k=0, top_p=1.0, cfg_scale=2.0)
GREEDY = Sampling(temperature=0, cfg_scale=3.0)


SOURCES: dict[str, AnyKind] = {
    "vanilla": NoTree(),
    "chain": ChainTree(length=3),
    "chains that move": ChainTree.over((1, 2, 4)),
    "eagle": LOPSIDED,
    "eagle2": TREES["dynamic"],
    "scd": Window(length=6),
    "scd, recalling nothing": Window(length=6, passes=0),
    "scd, long": Window(length=16),
    "sjd": Window(length=5, fresh="uniform"),
    "auto": Window.over((1, 2, 4, 8)),
    "self": SelfDrafts(length=4),
    "self, int4": SelfDrafts(length=7, weights="int4"),
    "self, windows of its own": SelfDrafts(length=6, window=4),
    "self that moves": SelfDrafts.over((1, 2, 4, 7), weights="int6"),
    "self that moves, windows of its own": SelfDrafts.over((1, 3, 7), window=3),
}
#: Sources whose length changes from step to step.
MOVING = [name for name in SOURCES if name == "auto" or "move" in name]
#: One source of each kind, for what is the same in all of one kind.
KINDS = ("vanilla", "chain", "eagle2", "scd", "self", "auto")


def kinds_first(names: Iterable[str]) -> list[Any]:
    """Return one source of each kind as cases, and in the long tier the others."""
    return [n if n in KINDS else pytest.param(n, marks=pytest.mark.long) for n in names]


def engine_on(tree: AnyKind, given: Sampling = SAMPLED, batch: int = 3, **more: Any) -> Any:
    return engine_of(tiny_models(0), Strategy(drafts=tree), given, batch, **more)


def decoded(
    tree: AnyKind,
    given: Sampling = SAMPLED,
    images: tuple[int, ...] = (0, 1, 2),
    seed: int = 5,
    batch: int | None = None,
    rule: Callable[[list[int]], Walk] | None = None,
    ops: TensorOps | None = None,
) -> Tensor:
    """Return the tokens of some images of a request, ``batch`` at a time, one caption each."""
    batch = batch or len(images)
    engine = engine_on(tree, given, batch, ops=ops)
    if rule is not None:
        engine.chosen = rule(engine.lengths)
    parts = [[*images[at : at + batch]] for at in range(0, len(images), batch)]
    return torch.cat([finish(engine, some, seed).tokens for some in parts])


@functools.cache
def plainly(given: Sampling) -> Tensor:
    """Return what decoding without drafts draws."""
    return decoded(SOURCES["vanilla"], given)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "vanilla"])
def test_every_source_draws_vanillas_tokens(name: str) -> None:
    assert torch.equal(decoded(SOURCES[name], SAMPLED), plainly(SAMPLED))


@pytest.mark.parametrize(
    "given",
    [pytest.param(GREEDY, id="greedy"), pytest.param(PLAIN, id="plain", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", kinds_first(name for name in SOURCES if name != "vanilla"))
def test_greedy_and_without_filters_as_well(name: str, given: Sampling) -> None:
    assert torch.equal(decoded(SOURCES[name], given), plainly(given))


@pytest.mark.parametrize("name", kinds_first(("vanilla", "eagle2", "scd", "self", *MOVING)))
def test_images_are_the_same_alone_and_in_any_batch(name: str) -> None:
    images = (0, 1, 2, 3)
    together = decoded(SOURCES[name], images=images)
    assert torch.equal(decoded(SOURCES[name], images=images[:2], batch=1), together[:2])
    assert torch.equal(decoded(SOURCES[name], images=images, batch=2), together)


def any_lengths(lengths: list[int], seed: int = 0) -> Walk:
    """Return a rule that takes any length at any step."""
    return Walk(*random.Random(seed).choices(lengths, k=60))


@pytest.mark.parametrize("name", MOVING)
def test_lengths_that_are_forced_change_nothing(name: str) -> None:
    want = plainly(SAMPLED)
    for seed in range(2):
        found = decoded(SOURCES[name], rule=lambda lengths, seed=seed: any_lengths(lengths, seed))
        assert torch.equal(found, want), seed


#: Of prompts with lengths of their own, padded, in every family that can run them.
OF_FAMILIES = [
    (kind.name, name)
    for kind in families()
    for name in (
        "chain", "chains that move", "eagle", "eagle2", "scd", "self that moves",
        "self that moves, windows of its own",
    )
    if kind.tiny().drafter is not None or not SOURCES[name].needs_drafter
]  # fmt: skip
QUICK = {("emu3", name) for name in ("chain", "eagle2", "self that moves")}
QUICK |= {("janus", "eagle"), ("janus", "chains that move"), ("glm_image", "eagle2")}
QUICK |= {("glm_image", "scd"), ("emu3", "self that moves, windows of its own")}


@functools.cache
def of_prompts(family: str, name: str, temperature: float, batch: int) -> Tensor:
    """Return the tokens of three prompts of a family's tiny model."""
    model = tiny_model(TensorOps(), torch.device("cpu"), torch.float32, family)
    given = sampling_of(model, temperature, top_k=20, top_p=0.95)
    engine = of_family(model, Strategy(drafts=SOURCES[name]), given, batch)
    if len(engine.lengths) > 1:
        engine.chosen = any_lengths(engine.lengths)
    parts = []
    with torch.inference_mode():
        for first in range(0, 3, batch):
            images = list(range(first, first + batch))
            engine.start(*request_of(model, engine, images, seed=5))
            parts.append(engine.run().tokens)
    return torch.cat(parts)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=", ".join(case), marks=() if case in QUICK else pytest.mark.long)
        for case in OF_FAMILIES
    ],
)
def test_every_family_draws_vanillas_tokens(case: tuple[str, str]) -> None:
    for temperature, batch in ((0.0, 1), (0.9, 3)):
        found = of_prompts(*case, temperature, batch)
        assert torch.equal(found, of_prompts(case[0], "vanilla", temperature, 3))


def test_a_row_of_a_batch_may_be_another_requests() -> None:
    """Keys are data of a row: two images of different seeds decode next to each other as each alone."""
    target, _ = tiny_models(0)
    features, mask = captions(target, 8)
    seeds, images = [3, 2**40 + 9, 3], [0, 4, 2]
    for tree in (Window(length=6), LOPSIDED):
        alone = []
        for seed, image in zip(seeds, images, strict=True):
            alone.append(decoded(tree, images=(image,), seed=seed))
        engine = engine_on(tree)
        keys = noise.noise_keys(seeds, images)
        condition = torch.cat((features[images], target.unconditional(3)))
        with torch.inference_mode():
            engine.start(condition, mask[images], keys)
            assert torch.equal(engine.run().tokens, torch.cat(alone))


def test_seeds_of_64_bits_and_images_are_all_different() -> None:
    pairs = [(14176, 0), (105792, 0), (2**32 + 5, 0), (5, 0), (5, 1), (2**63 - 1, 0), (0, 5)]
    said = [decoded(NoTree(), images=(i,), seed=s).flatten().tolist() for s, i in pairs]
    # Images of other numbers have other captions here, too; the noise alone is compared below.
    assert len({tuple(one) for one in said}) == len(pairs)
    keys = noise.noise_keys([s for s, _ in pairs], [i for _, i in pairs])
    drawn = noise.exponential(keys, torch.zeros(len(pairs), 1, dtype=torch.int64), 64)
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == len(pairs)


# --- noise as a table ------------------------------------------------------------------------------


class Tabled(TensorOps):
    """Holds the noise of up to 64 MiB."""

    preferences = Preferences(noise_bytes=1 << 26)


@pytest.mark.parametrize("name", kinds_first(SOURCES))
def test_noise_that_is_looked_up_draws_what_noise_in_a_step_draws(name: str) -> None:
    assert torch.equal(decoded(SOURCES[name], ops=Tabled()), plainly(SAMPLED))


@pytest.mark.parametrize(
    "name",
    [
        "scd",
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("eagle2", "self that moves, windows of its own")
        ),
    ],
)
def test_a_table_is_made_for_every_request_and_every_image(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "PIECE", 3 * 100)  # a few positions at once
    images = (0, 1, 2, 3)
    want = decoded(SOURCES["vanilla"], images=images)
    for batch in (1, 2, 4):  # requests one after another on one engine
        assert torch.equal(decoded(SOURCES[name], images=images, batch=batch, ops=Tabled()), want)
    assert not torch.equal(decoded(SOURCES[name], images=images, seed=6, ops=Tabled()), want)


def test_a_table_that_is_too_large_is_not_made() -> None:
    whole = engine_on(NoTree(), ops=Tabled())
    size = whole.state.noise.nbytes
    assert size == 4 * 3 * whole.geometry.tokens * whole.geometry.vocab
    ops = Tabled()
    ops.preferences = Preferences(noise_bytes=size)
    assert engine_on(NoTree(), ops=ops).session.choices.table is not None
    ops.preferences = Preferences(noise_bytes=size - 1)
    without = engine_on(NoTree(), ops=ops)
    assert without.session.choices.table is None
    assert without.nbytes == whole.nbytes - size
    assert torch.equal(decoded(SOURCES["scd"], ops=ops), plainly(SAMPLED))


@pytest.mark.parametrize("given", [GREEDY, SAMPLED], ids=["greedy", "uniforms"])
def test_what_has_no_noise_has_no_table(given: Sampling) -> None:
    window = Window(length=4, fresh="uniform")
    one = Strategy(drafts=window, coupling="invariant" if given.greedy else "maximal")
    engine = engine_of(tiny_models(0), one, given, ops=Tabled())
    assert engine.state.noise.numel() == 0


def test_a_copy_that_drafts_reads_the_table_of_its_target() -> None:
    engine = engine_on(SelfDrafts(length=4), ops=Tabled())
    own = engine.source.copy.session
    assert own.choices.table is engine.session.choices.table
    assert own.state.noise.numel() == 0
    assert [name for name in engine.changes if name.endswith("noise")] == ["state.noise"]


def computes_noise(part: Callable[[], None]) -> bool:
    """Return whether operators run that Threefry alone uses."""
    with OpRecorder(torch.device("cpu")) as recorder:
        part()
    return any("xor" in str(one[0]) for one in recorder.signature)


@pytest.mark.parametrize("name", ["vanilla", "eagle", "eagle2", "scd", "self", "auto"])
@torch.inference_mode()
def test_a_step_with_a_table_computes_no_noise(name: str) -> None:
    for ops, tabled in ((Tabled(), True), (TensorOps(), False)):
        engine = engine_on(SOURCES[name], ops=ops)
        assert computes_noise(engine.prefill)
        assert computes_noise(engine.step) is not tabled


# --- what is wrong is seen -------------------------------------------------------------------------


class OtherNoise(TensorOps):
    """Drafts as the reference, and judges windows of drafts by other noise than a single token."""

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        if weights.shape[1] > 1:
            keys = keys + torch.tensor([1, 0, 0], dtype=torch.int32)
        return super().perturb(weights, keys, positions)


class ReusedNoise(TensorOps):
    """Reuses the noise of a pass's first position for all of them."""

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        return super().perturb(weights, keys, positions[:, :1].expand_as(positions))


class OtherTies(TensorOps):
    """Breaks ties towards the higher code where several positions are judged at once."""

    def race(
        self, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
    ) -> Tensor:
        if weights.shape[1] == 1 or count is not None:
            return super().race(weights, keys, positions, count)
        scores = self.perturb(weights, keys, positions)
        return (scores.shape[-1] - 1 - scores.flip(-1).argmax(-1)).to(self.index)


@pytest.mark.parametrize("name", ["eagle", "scd", "self"])
@pytest.mark.parametrize("wrong", [OtherNoise, ReusedNoise])
def test_other_noise_and_reused_noise_are_seen(wrong: type[TensorOps], name: str) -> None:
    found = decoded(SOURCES[name], ops=wrong())
    assert not torch.equal(found, plainly(SAMPLED))


@pytest.mark.parametrize("name", ["eagle", "scd"])
def test_ties_that_are_broken_otherwise_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(keys: Tensor, positions: Tensor, codes: int) -> Tensor:
        """Noise of two values makes ties of codes that are equally likely."""
        return 1.0 + (noise.exponential(keys, positions, codes) > 1).float()

    def level(logits: Tensor, filters: Any) -> Tensor:
        return (logits > logits.mean(-1, keepdim=True)).float()

    monkeypatch.setattr(sampling, "exponential", coarse)
    for module in (accept, beam, session, static, window):
        monkeypatch.setattr(module, "distribution", level)
    want = decoded(SOURCES["vanilla"])
    assert torch.equal(decoded(SOURCES[name]), want)
    assert not torch.equal(decoded(SOURCES[name], ops=OtherTies()), want)
