"""Models that transformers loaded: its own loops and ours, on random models of several sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")

from safetensors.torch import save_file
from support.chi_square import drawn_fairly
from support.contexts import CONTEXTS, set_now
from support.hub_models import filled, glm, glm_inputs, glm_processor, janus
from support.janus import write_janus

from lantern_accel import load
from lantern_accel.errors import CheckpointError, ModelError, RequestError, StrategyError
from lantern_accel.families.glm_image.grids import grids
from lantern_accel.integrations import accelerate, restore
from lantern_accel.integrations.transformers import decode, decoder_of
from lantern_accel.models.bundle import HEAD
from lantern_accel.nn.draft_head import DraftHead, HeadFile, usual_head
from lantern_accel.strategy.values import Window

PROMPTS = torch.tensor([[90, 5, 6, 7, 8, 92], [91, 91, 90, 9, 10, 92]])
MASK = (PROMPTS != 91).long()


# --- Janus -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({}, "vanilla"),
        ({"dim": 32, "heads": 4, "kv_heads": 2, "grid": 5, "layers": 3}, "scd"),
        ({"dim": 40, "heads": 5, "kv_heads": 1, "head_dim": 16, "codes": 70}, "sjd"),
        ({"dim": 64, "heads": 8, "theta": 500.0, "grid": 3}, "auto"),
    ],
)
def test_janus_draws_the_same_greedily(sizes: dict[str, Any], strategy: str) -> None:
    model = janus(3, **sizes)
    asked = {
        "attention_mask": MASK, "generation_mode": "image", "do_sample": False, "guidance_scale": 4.0,
    }  # fmt: skip
    want = model.generate(PROMPTS, **asked)
    assert accelerate(model, strategy=strategy) is model
    made = model.generate(PROMPTS, **asked)
    assert torch.equal(made, want) and made.dtype == want.dtype
    pixels = [model.decode_image_tokens(one) for one in (made, want)]
    assert torch.equal(*pixels)
    asked_twice = {**asked, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    twice = model.generate(input_ids=PROMPTS, **asked_twice)
    assert torch.equal(twice, want.repeat_interleave(2, dim=0))
    model.restore()
    assert torch.equal(model.generate(PROMPTS, **asked), want)


@pytest.mark.parametrize("own", [True, False])
def test_janus_drafts_with_a_head_of_its_own_weights(tmp_path: Path, own: bool) -> None:
    from transformers import JanusForConditionalGeneration

    folder = write_janus(tmp_path / "model", "hf")
    with load(folder, device="cpu", dtype="float32") as pipeline:
        sizes, trunk = usual_head(pipeline.manifest.target, 8, 8), pipeline.model.trunk
        window = {"drafts": Window(length=4, fresh="head")}
        strategy = pipeline.strategy("scd").model_copy(update=window)
    said = HeadFile(config=sizes, trunk=trunk if own else "0" * 16).model_dump_json()
    file = tmp_path / "draft_head.safetensors"
    save_file(DraftHead(sizes).state_dict(), file, {HEAD: said})
    model: Any = JanusForConditionalGeneration.from_pretrained(folder)
    model.generation_config.generation_kwargs = {"boi_token_id": 121}
    model.generation_config.bos_token_id, model.generation_config.pad_token_id = 118, 120
    prompt = torch.tensor([[118, 5, 6, 121]])
    asked = {
        "attention_mask": torch.ones_like(prompt), "generation_mode": "image", "do_sample": False,
        "guidance_scale": 4.0,
    }  # fmt: skip
    want = accelerate(model, strategy="vanilla").generate(prompt, **asked)
    accelerate(model, strategy=strategy)
    with pytest.raises(StrategyError, match="no draft head"):
        model.generate(prompt, **asked)
    accelerate(model, strategy=strategy, head=file)
    if own:
        assert torch.equal(model.generate(prompt, **asked), want)
    else:
        with pytest.raises(CheckpointError, match="another model's weights"):
            model.generate(prompt, **asked)


@pytest.fixture(scope="module")
def own() -> dict[str, tuple[Any, dict[str, Any], torch.Tensor]]:
    """Models, what is asked of them, and the tokens of the library's own loop where it has one."""
    said = {"attention_mask": MASK, "generation_mode": "image", "do_sample": False}
    said |= {"inputs": PROMPTS, "guidance_scale": 4.0}
    found: dict[str, tuple[Any, dict[str, Any], torch.Tensor]] = {}
    for dtype in (torch.float32, torch.float16):
        model = janus(3).to(dtype)
        found[f"janus in {dtype}"] = model, said, model.generate(**said)
    prior, given = glm(3), glm_inputs(glm_processor(), ["a red cube"], 32, 32)
    asked = {**given, "do_sample": False, "max_new_tokens": 5}
    found["glm_image"] = prior, {**asked, "custom_generate": decode}, prior.generate(**asked)
    drawn, ids = chameleon(2), torch.tensor([[0, 25, 26, 27, 22, 21]])
    asked = {"input_ids": ids, "do_sample": False, "max_new_tokens": 25, "custom_generate": decode}
    found["chameleon"] = drawn, asked, drawn.generate(**asked)
    restore(drawn)
    return found


@pytest.mark.parametrize(
    "kind", ["janus in torch.float32", "janus in torch.float16", "glm_image", "chameleon"]
)
@pytest.mark.parametrize("name", CONTEXTS)
def test_models_draw_their_own_tokens_whatever_is_set(own: Any, name: str, kind: str) -> None:
    model, asked, want = own[kind]
    with CONTEXTS[name]():
        before = set_now()
        if "janus" in kind:
            accelerate(model, strategy="scd")
        else:
            decoder_of(model, "scd")
        drawn = model.generate(**asked)
        assert set_now() == before
    assert torch.equal(drawn, want) and vars(model)["_lantern_accel"].last is not None
    restore(model)


def test_janus_keeps_its_text() -> None:
    model = janus(4)
    asked = {"attention_mask": MASK, "max_new_tokens": 5, "do_sample": False}
    want = model.generate(PROMPTS, **asked)
    accelerate(model)
    assert torch.equal(model.generate(PROMPTS, **asked), want)
    assert torch.equal(model.generate(PROMPTS, **asked, generation_mode="text"), want)


def test_janus_draws_by_the_law_that_was_asked_for() -> None:
    model = janus(6, grid=3, codes=24)
    accelerate(model, strategy="scd")
    torch.manual_seed(3)
    tokens = model.generate(
        PROMPTS[:1], attention_mask=MASK[:1], generation_mode="image", do_sample=True,
        temperature=0.8, top_p=0.9, top_k=12, guidance_scale=2.0, num_return_sequences=300,
    )  # fmt: skip
    other = torch.where((PROMPTS[:1] == 90) | (PROMPTS[:1] == 92), PROMPTS[:1], 91)
    states = []
    with torch.no_grad():
        image = model.prepare_embeddings_for_image_generation(tokens[:, :-1])
        for ids in (PROMPTS[:1], other):
            text = model.get_input_embeddings()(ids).expand(len(tokens), -1, -1)
            out = model.model.language_model(inputs_embeds=torch.cat((text, image), 1))
            states.append(model.model.generation_head(out.last_hidden_state[:, 5:]))
    logits = (states[1] + 2.0 * (states[0] - states[1])).flatten(0, 1)
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for warp in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)):
        logits = warp(None, logits)
    drawn_fairly(logits.softmax(-1), tokens.flatten())


def test_janus_is_fixed_by_the_global_seed() -> None:
    model = accelerate(janus(7), strategy="vanilla")
    asked = {"attention_mask": MASK, "generation_mode": "image", "do_sample": True}
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(model.generate(PROMPTS, **asked))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_p": 0.1, "do_sample": True}, "MinPLogitsWarper"),
        ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
        ({"output_scores": True}, "output_scores=True"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"streamer": object()}, "a streamer"),
        ({"logits_processor": [lambda ids, scores: scores]}, "the logits processor function"),
        ({"stopping_criteria": [lambda ids, scores: False]}, "the stopping criterion function"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    model = accelerate(janus(8), strategy="vanilla")
    with pytest.raises(RequestError, match=f"asks for (the logits processor )?{message}"):
        model.generate(PROMPTS, attention_mask=MASK, generation_mode="image", **asked)


def test_janus_refuses_what_it_cannot_hold() -> None:
    model = accelerate(janus(8), strategy="vanilla")
    with pytest.raises(RequestError, match="has 250 tokens and the image 16"):
        model.generate(PROMPTS[:1].repeat(1, 50)[:, :250], generation_mode="image")


def test_weights_are_shared_where_layouts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel.integrations import decoding

    monkeypatch.setattr(decoding, "pack", lambda module, ops: None)  # as on most devices
    for model, most in ((janus(10, dim=64), 0.5), (glm(10, dim=64, head_dim=12), 0.4)):
        before = {name: p.clone() for name, p in model.named_parameters()}
        ours = decoder_of(model)
        target = ours.ready().model.target
        memory = ours.memory
        assert memory is not None and memory.beside < most * memory.shared, str(memory)
        assert "shared with the module" in str(memory)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        block, theirs = target.layers[0], model.model.language_model.layers[0]
        pairs = [
            (block.attention.wo.weight, theirs.self_attn.o_proj.weight),
            (block.feed_forward.w2.weight, theirs.mlp.down_proj.weight),
        ]
        if hasattr(theirs.mlp, "gate_proj"):
            pairs.append((block.feed_forward.w13.weight, theirs.mlp.gate_proj.weight))
        for mine, other in pairs:
            assert mine.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        restore(model)


def test_other_classes_and_offloaded_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="Linear cannot be accelerated"):
        accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="takes lantern-accel as a callable"):
        accelerate(glm(1))
    model = janus(1)
    model._hf_hook = object()
    accelerate(model)
    with pytest.raises(RequestError, match="the module is offloaded"):
        model.generate(PROMPTS, attention_mask=MASK, generation_mode="image")
    del model._hf_hook
    model.model.language_model.norm.to("meta")
    with pytest.raises(RequestError, match=r"language_model\.norm\.weight is offloaded"):
        model.generate(PROMPTS, attention_mask=MASK, generation_mode="image")


def test_an_untested_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel.families import releases

    monkeypatch.setattr(releases, "find_release", lambda library: "5.99.1")
    with pytest.raises(ModelError, match=r"transformers 5\.99\.1 is installed, but only releases"):
        accelerate(janus(1))


# --- GLM-Image -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "size", "strategy"),
    [
        ({}, (96, 96), "vanilla"),
        ({"dim": 64, "heads": 8, "kv_heads": 2, "head_dim": 12, "layers": 3}, (64, 160), "scd"),
        ({"dim": 40, "heads": 4, "kv_heads": 1, "head_dim": 16, "sections": (2, 4, 2),
          "partial": 1.0}, (160, 32), "sjd"),
        ({"heads": 3, "kv_heads": 3, "head_dim": 16, "sections": (1, 2, 1), "bias": False},
         (32, 32), "scd"),
    ],
)  # fmt: skip
def test_glm_image_draws_the_same_greedily(
    sizes: dict[str, Any], size: tuple[int, int], strategy: str
) -> None:
    model, processor = glm(3, **sizes), glm_processor()
    decoder_of(model, strategy)
    count = sum(a * b for a, b in grids(size[0] // 32, size[1] // 32))
    given = glm_inputs(processor, ["a red cube", "two  cats,\n asleep on a sphere "], *size)
    asked = {**given, "max_new_tokens": count + 1, "do_sample": False}
    want = model.generate(**asked)
    made = model.generate(**asked, custom_generate=decode)
    assert made.shape[1] == given["input_ids"].shape[1] + count
    assert torch.equal(made, want[:, : made.shape[1]])
    short = model.generate(**{**asked, "max_new_tokens": 7}, custom_generate=decode)
    assert torch.equal(short, want[:, : short.shape[1]])


@pytest.mark.parametrize("strategy", ["vanilla", "scd", "sjd"])
def test_glm_image_draws_by_the_law_that_transformers_built(strategy: str) -> None:
    """Of ids that are no codes filters are told, and only then are they taken out."""
    model, processor = glm(4, codes=40), glm_processor()
    with torch.no_grad():
        model.lm_head.weight[40:] *= 10.0
    decoder_of(model, strategy)
    given = glm_inputs(processor, ["a red cube"] * 6, 32, 32)
    torch.manual_seed(1)
    made = model.generate(
        **given, max_new_tokens=258, do_sample=True, temperature=1.1, top_k=20, top_p=0.95,
        custom_generate=decode,
    )  # fmt: skip
    length = given["input_ids"].shape[1]
    with torch.no_grad():
        target = decoder_of(model, strategy).ready().model.target
        target = target.resize(prefix_length=length, height=1, width=1)
        states = target.forward_dense(made[:, :length], made[:, length:-1])
        logits = model.lm_head(states[:, length - 1 :]).flatten(0, 1)
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for warp in (TemperatureLogitsWarper(1.1), TopKLogitsWarper(20), TopPLogitsWarper(0.95)):
        logits = warp(None, logits)
    law = logits.softmax(-1)
    assert law[:, 40:].sum(-1).mean() > 0.1
    drawn_fairly(law[:, :40] / law[:, :40].sum(-1, keepdim=True), made[:, length:].flatten())


def test_glm_image_refuses_what_is_not_its_prompt() -> None:
    model, processor = glm(5), glm_processor()
    given = glm_inputs(processor, ["a red cube"], 96, 96)
    asked = {"do_sample": False, "max_new_tokens": 300, "custom_generate": decode}
    wrong = {**given, "image_grid_thw": torch.tensor([[1, 3, 3], [1, 9, 9]])}
    with pytest.raises(RequestError, match="a batch is of one size"):
        model.generate(**wrong, **asked)
    with pytest.raises(RequestError, match="asks for the logits processor Repetition"):
        model.generate(**given, **asked, repetition_penalty=1.2)


# --- Chameleon -------------------------------------------------------------------------------------


def chameleon(seed: int, *, heads: int = 4, codes: int = 16) -> Any:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    from lantern_accel.families.chameleon.text import image_token_name

    names = ["<s>", "<pad>", "</s>", "<unk>", *(image_token_name(c) for c in range(codes))]
    names += ["<eoss>", "<racm3:break>", "<reserved08706>", "<image>", *(f"w{i}" for i in range(9))]
    config = ChameleonConfig(
        vocab_size=len(names), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512,
        vocabulary_map={name: i for i, name in enumerate(names)},
        vq_config={
            "embed_dim": 8, "num_embeddings": codes, "latent_channels": 8, "resolution": 10,
            "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
        },
    )  # fmt: skip
    return filled(ChameleonForConditionalGeneration(config), seed)


@pytest.mark.parametrize("guidance", [None, 3.0])
@pytest.mark.parametrize("strategy", ["vanilla", "scd"])
def test_chameleon_draws_image_tokens(strategy: str, guidance: float | None) -> None:
    model = chameleon(2)
    decoder_of(model, strategy)
    start, first, codes = 21, 4, 16
    ids = torch.tensor([[0, 25, 26, 27, 22, start]])
    more = {} if guidance is None else {"guidance_scale": guidance}
    made = model.generate(
        input_ids=ids, max_new_tokens=25, do_sample=False, custom_generate=decode, **more
    )
    assert made.shape == (1, 31) and torch.equal(made[:, :6], ids)

    want = ids
    with torch.no_grad():
        for _ in range(25):
            rows = [want] if guidance is None else [want, want[:, 5:]]
            logits = [
                model.lm_head(model.model(row).last_hidden_state[:, -1])[:, first : first + codes]
                for row in rows
            ]
            scores = logits[0]
            if guidance is not None:
                scores = logits[1] + guidance * (logits[0] - logits[1])
            want = torch.cat((want, scores.argmax(-1, keepdim=True) + first), 1)
    assert torch.equal(made, want)
    with pytest.raises(RequestError, match="does not end with the token 21"):
        model.generate(input_ids=ids[:, :-1], max_new_tokens=25, custom_generate=decode)
