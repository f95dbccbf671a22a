"""The engine on tiny random models: exact, reproducible, static, and silent towards the host."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.chi_square import misfit
from support.engines import GREEDY, NAMED, SAMPLED, TREES, Late, Models, engine_of, finish, start
from support.moving import counts_of, joint
from support.tiny import captions, tiny_models

from lantern_accel.device.capture import HostCopy
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import SMALL_12
from lantern_accel.strategy.values import (
    ChainTree,
    Coupling,
    DynamicTree,
    Sampling,
    StaticTree,
    Strategy,
)


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models(0)


def test_greedy_trees_give_vanillas_tokens_within_a_guidance_interval(models: Models) -> None:
    sampling = Sampling(temperature=0, cfg_scale=4.0, cfg_interval=9)
    plain = finish(engine_of(models, Strategy(), sampling, batch=4))
    whole = finish(engine_of(models, Strategy(), GREEDY.model_copy(update={"cfg_scale": 4.0}), 4))
    assert not torch.equal(plain.tokens, whole.tokens)
    for tree in ("small_12", "dynamic"):
        fast = finish(engine_of(models, Strategy(drafts=TREES[tree]), sampling, batch=4))
        assert torch.equal(plain.tokens, fast.tokens)


@pytest.mark.parametrize(("interval", "guided"), [(-1, 36), (0, 2), (10, 12), (33, 35), (99, 36)])
def test_the_guidance_interval_counts_from_the_second_token(
    models: Models, interval: int, guided: int
) -> None:
    # LlamaGen: the prefill's token is guided, then those of decode steps i <= interval, i from 0.
    engine = engine_of(models, Strategy(), Sampling(cfg_scale=4.0, cfg_interval=interval))
    scale = engine.verifying.guidance.scale
    assert scale is not None
    assert scale.tolist() == [4.0] * guided + [1.0] * (36 - guided)


def test_drafts_are_guided_as_the_token_that_they_stand_for(models: Models) -> None:
    engine = engine_of(models, NAMED["eagle"], GREEDY, batch=2)
    drafting, state = engine.source, engine.state
    assert drafting is not None and drafting.guidance.scale is not None
    # A scale of its own for every token: node n + depth predicts token n + depth + 1.
    drafting.guidance.scale.copy_(torch.arange(36) + 2.0)
    features = torch.randn(4, 3, 32)
    logits = models[0].head(features)
    for length, depth, token in ((0, 0, 1), (4, 0, 5), (4, 3, 8), (34, 4, 35)):
        state.length.copy_(torch.tensor([length, 0]))
        out = drafting._guide(drafting.catch_up(state)[0], depth, features)
        cond, uncond = logits[0], logits[2]
        assert torch.allclose(out[0], uncond + (token + 2) * (cond - uncond), atol=1e-3)
        cond, uncond = logits[1], logits[3]
        assert torch.allclose(out[1], uncond + (depth + 3) * (cond - uncond), atol=1e-3)


def test_lambda_of_one_relaxes_nothing(models: Models) -> None:
    plain = finish(engine_of(models, Strategy(), GREEDY, batch=4))
    rule = LanternPP(k=8, lam=1.0)
    fast = finish(engine_of(models, Strategy(drafts=SMALL_12, acceptance=rule), GREEDY, batch=4))
    assert torch.equal(plain.tokens, fast.tokens)
    assert not fast.quality_loss.any()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_relaxation_saves_steps_and_says_what_it_moved(models: Models, sampling: Sampling) -> None:
    strict = finish(engine_of(models, Strategy(drafts=SMALL_12), sampling, batch=8))
    rule = Lantern(k=10, delta=0.9)
    loose = finish(engine_of(models, Strategy(drafts=SMALL_12, acceptance=rule), sampling, batch=8))
    assert loose.steps.sum() < strict.steps.sum()
    assert (loose.quality_loss > 0).all() and not strict.quality_loss.any()


@pytest.mark.parametrize(("blocks", "taps"), [(1, ()), (3, ()), (1, (1,)), (2, (1, 2))])
def test_what_the_drafter_caught_up_on_is_one_dense_pass(
    blocks: int, taps: tuple[int, ...]
) -> None:
    """Of prompt and known tokens, whatever was drafted and refused in between, in every block."""
    target, drafter = models = tiny_models(0, blocks=blocks, taps=taps)
    engine = engine_of(models, Strategy(drafts=TREES["small_12"]), GREEDY, batch=2)
    start(engine)
    state, c = engine.state, target.config
    condition, mask = state.condition.clone(), state.prefix_mask.repeat(2, 1)
    deep = 0
    while int(state.length.max()) < c.num_tokens - 3:
        known = [int(n) + 1 for n in state.length]
        got = engine.source.catch_up(state)[1][:, 0]
        for row in range(4):
            codes = state.tokens[row % 2 : row % 2 + 1, : known[row % 2]].long()
            seen = mask[row : row + 1]
            rows = condition[row : row + 1]
            features = target.forward_dense(rows, codes[:, :-1], seen, taps)
            assert features.shape[-1] == (len(taps) + 1) * c.dim
            dense = drafter.forward_image(None, codes, features, seen[:, :-1])
            torch.testing.assert_close(got[row], dense[0, -1], rtol=1e-4, atol=1e-4)
        engine.step()
        deep = max(deep, int(state.last_length.max()))
    assert deep > 1, "drafts of a second level were accepted"


# --- the target's distribution, from end to end ----------------------------------------------------

#: At 8,000 images the counts are more than 10 deviations from a slightly stronger guidance's, below.
BATCH = 2_000


@pytest.fixture(scope="module")
def small() -> Models:
    return tiny_models(3, vocab=6, grid=2, prefix=2, dim=16, mixing=0.7, sharpness=0.9)


CHAIN = ChainTree(length=2)
DRAFTED = StaticTree(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
BROAD, DEEP = DynamicTree(top_k=3, depth=1, total=9), DynamicTree(top_k=2, depth=2, total=7)


@pytest.mark.parametrize(
    ("tree", "coupling", "images"),
    [
        (CHAIN, "invariant", 8_000),
        (DEEP, "maximal", 4_000),
        *(
            pytest.param(tree, coupling, 8_000, marks=pytest.mark.long)
            for tree, coupling in (
                (CHAIN, "maximal"),
                (DRAFTED, "invariant"),
                (DRAFTED, "maximal"),
                (BROAD, "invariant"),
                (DEEP, "invariant"),
            )
        ),
    ],
)
def test_sampled_images_follow_the_targets_joint_distribution(
    small: Models, tree: AnyKind, images: int, coupling: Coupling
) -> None:
    sampling = Sampling(temperature=1.1, top_k=5, cfg_scale=1.7)
    expected = joint(small[0], sampling, caption=1).view(6, 6, 6, 6)
    assert float(expected.sum()) == pytest.approx(1.0, abs=1e-5)
    strategy = Strategy(drafts=tree, coupling=coupling)
    engine = engine_of(small, strategy, sampling, BATCH)
    features, mask = captions(small[0], 2)
    rows = features[1:2].expand(BATCH, -1, -1)
    parts, counts_of_steps = [], []
    for part in range(images // BATCH):
        numbers = list(range(part * BATCH, (part + 1) * BATCH))
        with torch.inference_mode():
            engine.start(
                torch.cat((rows, small[0].unconditional(BATCH))),
                mask[1:2].expand(BATCH, -1),
                engine.randomness(11, numbers),
            )
            decoded = engine.run()
        parts.append(decoded.tokens)
        counts_of_steps.append(decoded.histogram.sum(0))
    histogram = torch.stack(counts_of_steps).sum(0)
    assert (histogram[:2] > 0.05 * histogram.sum()).all(), "both acceptance and refusal take part"
    counts = counts_of(torch.cat(parts), 6).view(6, 6, 6, 6)
    for marginal in ((1, 2, 3), (2, 3), (3,), (0,), ()):
        seen, wanted = counts, expected
        for axis in sorted(marginal, reverse=True):
            seen, wanted = seen.sum(axis), wanted.sum(axis)
        assert misfit(seen, wanted) < 4.9, marginal
    # The same counts refute a target whose guidance is a little stronger.
    other = joint(small[0], sampling.model_copy(update={"cfg_scale": 2.2}), caption=1)
    assert misfit(counts, other) > 10


# --- counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "eagle2", "lantern"])
def test_steps_and_accepted_drafts_add_up_to_the_image(models: Models, name: str) -> None:
    decoded = finish(engine_of(models, NAMED[name], SAMPLED, batch=3))
    depth = decoded.histogram.shape[1]
    gained = (decoded.histogram * torch.arange(1, depth + 1)).sum(1)
    assert torch.equal(decoded.histogram.sum(1), decoded.steps)
    # The last step may accept past the end of the image.
    assert ((gained >= 35) & (gained < 35 + depth)).all()
    assert decoded.step_compression == pytest.approx(3 * 35 / int(decoded.steps.sum()))


def test_a_dropped_engine_frees_its_buffers_without_a_collection(models: Models) -> None:
    gc.collect()
    gc.disable()
    try:
        engine = engine_of(models, NAMED["eagle"], GREEDY, batch=2)
        finish(engine)
        tokens = weakref.ref(engine.state.tokens)
        engine.functions.clear()  # as captured ones that were released
        del engine
        assert tokens() is None
    finally:
        gc.enable()


def test_run_reports_progress_and_stops(models: Models) -> None:
    engine = engine_of(models, NAMED["eagle"], GREEDY, batch=2)
    expected = finish(engine)
    start(engine)
    known: list[int] = []
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        engine.step()

    with torch.inference_mode():
        decoded = engine.run(step, known.append)
    assert torch.equal(decoded.tokens, expected.tokens)
    assert known == sorted(known) and known[-1] == 36
    assert int(decoded.steps.max()) <= steps <= int(decoded.steps.max()) + 1


@pytest.mark.parametrize("lag", [1, 3])
def test_a_host_that_reads_late_gets_the_same_tokens(small: Models, lag: int) -> None:
    class LateOps(TensorOps):
        def host_copy(self, source: torch.Tensor) -> HostCopy:
            return Late(source, lag)

    condition, mask = captions(small[0], 2)
    rows = torch.cat((condition, small[0].unconditional(2)))
    got = []
    for ops in (TensorOps(), LateOps()):
        tree = StaticTree(name="pair", paths=((0,), (1,)))
        sampling = Sampling(top_k=5, cfg_scale=2)
        engine = engine_of(small, Strategy(drafts=tree), sampling, 2, ops=ops)
        for seed in (0, 1):
            known: list[int] = []
            with torch.inference_mode():
                engine.start(rows, mask, engine.randomness(seed, [0, 1]))
                got.append(engine.run(on_progress=known.append))
            assert known == sorted(known)
            assert known[-1] == engine.geometry.tokens
        assert not getattr(engine.session.progress, "posted", [])
    for now, late in zip(got[:2], got[2:], strict=True):
        assert torch.equal(now.tokens, late.tokens)
        assert torch.equal(now.steps, late.steps)
