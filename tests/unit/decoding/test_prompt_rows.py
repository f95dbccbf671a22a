"""Decoding where every row has a prompt of its own: positions, masks, three branches, a grammar.

The references are plain Python loops over dense forwards, one image at a time.
"""

from __future__ import annotations

import functools

import pytest
import torch
from support.engines import engine_of
from torch import Tensor
from torch.testing import assert_close

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.sampling import guide
from lantern_accel.families.chameleon.model import (
    ChameleonConfig,
    ChameleonDrafter,
    ChameleonDrafterConfig,
    ChameleonGPT,
)
from lantern_accel.families.tokenizer import left_pad
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import DynamicTree, Sampling, Strategy
from lantern_accel.testing.trace import OpRecorder, first_difference

TEXT, CODES, FIRST, NEWLINE, BOI = 40, 24, 4, 30, 29
GREEDY = Sampling(temperature=0, cfg_scale=3.0)
TREES = {
    "static": parse_drafts("0,1,2,00,01,10,000,0000"),
    "chain": parse_drafts("chain:3"),
    "dynamic": DynamicTree(top_k=3, depth=2, total=9),
}
PROMPTS = [[0, 35, 36, BOI], [0, 33, BOI], [0, 31, 32, 37, 38, 39, BOI]]


@functools.cache
def models(newline: bool = False) -> tuple[ChameleonGPT, ChameleonDrafter]:
    """A target, and a drafter that takes the token's embedding for the target's next feature."""
    sizes = {
        "dim": 32,
        "n_head": 4,
        "ffn_dim": 48,
        "token_count": TEXT,
        "image_first": FIRST,
        "image_codes": CODES,
        "newline_id": NEWLINE if newline else None,
        "height": 4,
        "width": 4 if newline else 6,
        "prefix_length": 8,
    }
    target = ChameleonGPT(ChameleonConfig(n_layer=2, **sizes))
    drafter = ChameleonDrafter(ChameleonDrafterConfig(**sizes))
    generator = torch.Generator().manual_seed(7)
    for model in (target, drafter):
        model.eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
                if "embed" not in name:
                    weight.div_(weight.shape[1] ** 0.5)
            if "qk_norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
            if "wo" in name or "w2" in name:
                weight.mul_(0.5 if model is target else 0.2)
    target.output.weight.mul_(2.0)
    drafter.embed_tokens.weight.copy_(target.tok_embeddings.weight)
    noise = 0.05 * torch.randn(32, 64, generator=generator)
    drafter.fc.weight.copy_(torch.cat((torch.eye(32), torch.zeros(32, 32)), 1) + noise)
    drafter.fc.bias.zero_()
    return target, drafter


def contexts(prompts: list[list[int]], branches: int) -> list[list[int]]:
    rows = list(prompts)
    if branches == 3:
        # A middle branch of its own, as a prompt with a picture in it has.
        rows += [[0, *prompt[1:-1:2], BOI] for prompt in prompts]
    return rows + [[0, BOI]] * len(prompts) if branches > 1 else rows


def engine_for(
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    *,
    newline: bool = False,
    prefix: int = 8,
    neighbours: Tensor | None = None,
) -> Engine:
    target, drafter = models(newline)
    fitted = target.resize(prefix_length=prefix), drafter.resize(prefix_length=prefix)
    made: Engine = engine_of(fitted, strategy, sampling, batch, neighbours=neighbours)
    return made


def decode(
    prompts: list[list[int]],
    strategy: Strategy | None = None,
    sampling: Sampling = GREEDY,
    *,
    newline: bool = False,
    prefix: int = 8,
    neighbours: Tensor | None = None,
    images: list[int] | None = None,
) -> Engine:
    """Decode through the engine, to the end."""
    engine = engine_for(
        strategy or Strategy(),
        sampling,
        len(prompts),
        newline=newline,
        prefix=prefix,
        neighbours=neighbours,
    )
    ids, mask = left_pad(contexts(prompts, sampling.branches), prefix, pad=1)
    with torch.inference_mode():
        engine.start(ids, mask, engine.randomness(5, images or list(range(len(prompts)))))
        engine.run()
    return engine


def tokens_of(engine: Engine) -> Tensor:
    return engine.state.tokens[:, : engine.geometry.tokens].long()


def reference(
    prompt: list[int], sampling: Sampling, *, newline: bool = False
) -> tuple[list[int], list[Tensor]]:
    """Greedy decoding of one image by dense forwards of unpadded rows; codes and guided logits."""
    target, _ = models(newline)
    c = target.config
    codes: list[int] = []
    seen = []
    for n in range(c.num_tokens):
        rows = []
        for context in contexts([prompt], sampling.branches):
            known = torch.tensor([codes], dtype=torch.int64)
            features = target.forward_dense(torch.tensor([context]), known)
            rows.append(target.head(features[:, -1]))
        logits = rows[0]
        if sampling.branches == 2:
            logits = rows[1] + sampling.cfg_scale * (rows[0] - rows[1])
        elif sampling.branches == 3:
            assert sampling.cfg_scale_image is not None
            full, image, free = rows
            logits = free + sampling.cfg_scale_image * (image - free)
            logits = logits + sampling.cfg_scale * (full - image)
        if newline:
            # Lumina's processor, with n tokens after the sizes: a newline ends every row of w.
            forced = (n + 1) % (c.width + 1) == 0
            for code in range(c.vocab_size):
                if (code == c.newline) != forced:
                    logits[0, code] = float("-inf")
        seen.append(logits[0])
        codes.append(int(logits.argmax()))
    return codes, seen


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_prompts_of_different_length_decode_as_each_alone(branches: int) -> None:
    sampling = [
        Sampling(temperature=0),
        GREEDY,
        Sampling(temperature=0, cfg_scale=3.0, cfg_scale_image=1.2),
    ][branches - 1]
    assert sampling.branches == branches
    got = tokens_of(decode(PROMPTS, sampling=sampling))
    for row, prompt in zip(got, PROMPTS, strict=True):
        assert row.tolist() == reference(prompt, sampling)[0]


def test_the_middle_branch_matters() -> None:
    two = tokens_of(decode(PROMPTS))
    three = Sampling(temperature=0, cfg_scale=3.0, cfg_scale_image=1.2)
    assert not torch.equal(two, tokens_of(decode(PROMPTS, sampling=three)))


def test_three_way_guidance_is_two_way_where_the_prompt_has_no_picture() -> None:
    generator = torch.Generator().manual_seed(1)
    full, free = torch.randn(2, 4, 3, 7, generator=generator)
    scale = torch.full((4, 3), 3.0)
    two = guide(torch.cat((full, free)), scale)
    assert_close(guide(torch.cat((full, free, free)), scale, 1.2), two)
    image = torch.randn(4, 3, 7, generator=generator)
    plain = free + 1.2 * (image - free) + 3.0 * (full - image)
    assert_close(guide(torch.cat((full, image, free)), scale, 1.2), plain)
    # Where guidance is off the conditional row passes, bit for bit.
    off = guide(torch.cat((full, image, free)), torch.ones(4, 3), 1.2)
    assert torch.equal(off, full)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_three_branches_draft_and_accept(tree: str) -> None:
    three = Sampling(temperature=0, cfg_scale=3.0, cfg_scale_image=1.2)
    vanilla = decode(PROMPTS, sampling=three)
    drafted = decode(PROMPTS, Strategy(drafts=TREES[tree]), three)
    assert torch.equal(tokens_of(drafted), tokens_of(vanilla))


RULES = [
    Strategy(drafts=TREES["static"], acceptance=LanternPP(k=6, lam=3.0)),
    Strategy(drafts=TREES["dynamic"], acceptance=Lantern(k=6, delta=0.3)),
    Strategy(drafts=TREES["static"], acceptance=LanternPP(k=6, lam=3.0), residual="optimal"),
    Strategy(drafts=TREES["dynamic"], acceptance=Lantern(k=6, delta=0.3), residual="official"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_relaxed_pictures_obey_the_grammar(rule: int, temperature: float) -> None:
    c = models(True)[0].config
    generator = torch.Generator().manual_seed(2)
    table = torch.rand(c.vocab_size, c.vocab_size, generator=generator).argsort(-1)[:, :8].int()
    sampling = Sampling(temperature=temperature, cfg_scale=2.0, top_k=12)
    engine = decode(PROMPTS, RULES[rule], sampling, newline=True, neighbours=table)
    picture = tokens_of(engine).view(len(PROMPTS), c.height, c.width + 1)
    assert (picture[:, :, -1] == c.newline).all()
    assert (picture[:, :, :-1] < CODES).all()


def test_newlines_are_always_accepted() -> None:
    """Target and drafter give a row's end probability 1, so that no step stops before it."""
    c = models(True)[0].config
    sampling = Sampling(cfg_scale=3.0, top_k=10)
    engine = engine_for(Strategy(drafts=TREES["chain"]), sampling, 3, newline=True)
    ids, mask = left_pad(contexts(PROMPTS, 2), 8, pad=1)
    passed = 0
    with torch.inference_mode():
        engine.start(ids, mask, engine.randomness(5, [0, 1, 2]))
        while int(engine.state.length.min()) < c.num_tokens - 1:
            before = engine.state.length.clone()
            engine.step()
            for at, accepted in zip(before, engine.state.last_length, strict=True):
                if accepted >= 0 and at % (c.width + 1) == c.width - 1:
                    passed += 1
                    assert accepted >= 1
    assert passed > 3


def test_the_drafter_reads_the_prompts_own_tokens() -> None:
    """The drafter's passes over prompt and picture equal one dense pass of the same rows."""
    target, drafter = models()
    engine = engine_for(Strategy(drafts=TREES["chain"]), GREEDY, 3)
    ids, mask = left_pad(contexts(PROMPTS, 2), 8, pad=1)
    with torch.inference_mode():
        engine.start(ids, mask, engine.randomness(5, [0, 1, 2]))
        got = engine.source.catch_up(engine.state)[1][:, 0]
    root = engine.state.root.long()
    for row in range(6):
        real = ids[row][mask[row]].unsqueeze(0)
        features = target.forward_dense(real, real[:, :0])
        following = torch.cat((real[:, 1:], root[row % 3].view(1, 1) + FIRST), dim=1)
        seen = torch.ones_like(following, dtype=torch.bool)
        expected = drafter.forward_dense(following, features, seen)[0, -1]
        assert_close(got[row], expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("tree", [*TREES, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_their_own_keep_the_step_one_graph(tree: str | None, temperature: float) -> None:
    """No host read, no data-dependent shape; steps and prompts of other content are one graph."""
    strategy = Strategy(drafts=TREES[tree]) if tree else Strategy()
    sampling = Sampling(temperature=temperature, cfg_scale=3.0, cfg_scale_image=1.2, top_k=10)
    engine = engine_for(strategy, sampling, 2, newline=True)
    first: dict[str, OpRecorder] = {}
    for prompts in (PROMPTS[:2], PROMPTS[1:]):
        ids, mask = left_pad(contexts(prompts, 3), 8, pad=1)
        engine.session.load(ids, mask, engine.randomness(5, [0, 1]))
        for step in range(4):
            name = "step" if step else "prefill"
            recorder = OpRecorder(torch.device("cpu"))
            with torch.inference_mode(), recorder:
                getattr(engine, name)()
            assert not recorder.violations
            assert not first_difference(first.setdefault(name, recorder), recorder)
