"""Emu3 of transformers' own classes: images of ``generate`` decode here, and the same are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.8")

from support.chi_square import drawn_fairly
from support.emu3 import said
from support.hub_models import filled

from lantern_accel.errors import LanternWarning
from lantern_accel.families.emu3.text import Emu3Ids
from lantern_accel.integrations import accelerate

IDS = Emu3Ids.before(491)
CODES = list(range(491, 555))
ENDS = [IDS.frame_end, IDS.image_end, IDS.eos]
START = [IDS.image_start, 18, 9, 17, IDS.image]
PROMPTS = torch.tensor([[IDS.bos, 5, 6, 7, 8, *START], [IDS.pad, IDS.pad, IDS.bos, 9, 4, *START]])
MASK = PROMPTS.ne(IDS.pad).long()
NEGATIVE = torch.tensor([[IDS.pad, IDS.bos, *START], [IDS.bos, 33, *START]])


def made(seed: int, kind: str = "Emu3ForConditionalGeneration", **sizes: Any) -> Any:
    import transformers

    config = said("hf_config")
    config["text_config"] |= sizes
    config.pop("dtype")
    given: Any = transformers.Emu3Config(**config)
    if kind == "Emu3ForCausalLM":
        given = transformers.Emu3TextConfig(**config["text_config"])
    return filled(getattr(transformers, kind)(given).float(), seed)


def grammar(rows: int, columns: int) -> Callable[[int, Tensor], list[int]]:
    """Return the rule of transformers' own documentation for an image."""

    def allowed(_: int, written: Tensor) -> list[int]:
        place = int((written == IDS.image).nonzero()[0])
        n = len(written) - place
        after = n - rows * (columns + 1)
        if after > 0:
            return [(*ENDS, IDS.pad)[min(after, 4) - 1]]
        return [IDS.row_end] if n % (columns + 1) == 0 else CODES

    return allowed


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        ({}, "scd"),
        ({"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}, "vanilla"),
    ],
)
def test_images_are_its_own(sizes: dict[str, Any], strategy: str) -> None:
    model = made(3, **sizes)
    asked = {
        "attention_mask": MASK, "prefix_allowed_tokens_fn": grammar(3, 2), "do_sample": False,
        "guidance_scale": 3.0, "negative_prompt_ids": NEGATIVE, "max_new_tokens": 40,
        "negative_prompt_attention_mask": NEGATIVE.ne(IDS.pad).long(),
        "return_dict_in_generate": True,
    }  # fmt: skip
    want = model.generate(PROMPTS, **asked).sequences
    assert accelerate(model, strategy=strategy) is model
    drawn = model.generate(PROMPTS, **asked).sequences
    assert torch.equal(drawn, want) and drawn[0, -3:].tolist() == ENDS
    codes = drawn[:, PROMPTS.shape[1] :]
    model.decode_image_tokens(image_tokens=codes, height=3, width=2)
    asked = {**asked, "max_new_tokens": 5, "return_dict_in_generate": False}
    assert torch.equal(model.generate(input_ids=PROMPTS, **asked), want[:, : PROMPTS.shape[1] + 5])
    assert vars(model)["_lantern_accel"].last is not None
    text = {"max_new_tokens": 4, "do_sample": False}
    words = model.generate(PROMPTS[:1, :4], **text)
    model.restore()
    assert torch.equal(model.generate(PROMPTS[:1, :4], **text), words)


def test_the_language_model_alone() -> None:
    model = made(4, "Emu3ForCausalLM")
    asked = {
        "prefix_allowed_tokens_fn": grammar(2, 3), "do_sample": True, "top_k": 1,
        "guidance_scale": 2.0, "max_new_tokens": 40, "num_return_sequences": 2,
    }  # fmt: skip
    want = model.generate(PROMPTS[:1], **asked)
    accelerate(model)
    assert torch.equal(model.generate(PROMPTS[:1], **asked), want)
    assert vars(model)["_lantern_accel"].last is not None


def test_images_are_drawn_by_the_law_that_was_asked_for() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model = accelerate(made(6), strategy="scd")
    torch.manual_seed(3)
    out = model.generate(
        PROMPTS[:1], attention_mask=MASK[:1], prefix_allowed_tokens_fn=grammar(2, 2),
        do_sample=True, temperature=0.8, top_k=12, top_p=0.9, max_new_tokens=9,
        num_return_sequences=300,
    )  # fmt: skip
    with torch.no_grad():
        logits = model(out[:, :-1], attention_mask=torch.ones_like(out[:, :-1])).logits
    places = torch.tensor([0, 1, 3, 4]) + PROMPTS.shape[1]
    scores = logits[:, places - 1].flatten(0, 1)[:, CODES]
    for warp in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)):
        scores = warp(None, scores)
    drawn_fairly(scores.softmax(-1), out[:, places].flatten() - CODES[0])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenalty"),
        (
            {"prefix_allowed_tokens_fn": None, "max_new_tokens": 6},
            "has no prefix_allowed_tokens_fn",
        ),
        ({"prefix_allowed_tokens_fn": lambda *_: CODES, "max_new_tokens": 6}, "that is not Emu3's"),
        ({"guidance_scale": 0.5}, "guidance_scale=0.5"),
        ({"output_scores": True}, "output_scores=True"),
        ({"eos_token_id": 3}, "that no eos_token_id ends"),
    ],
)
def test_what_is_not_decoded_here_is_transformers_own(changes: dict[str, Any], why: str) -> None:
    model = made(5)
    asked = {
        "prefix_allowed_tokens_fn": grammar(2, 3), "do_sample": False, "max_new_tokens": 14, **changes
    }  # fmt: skip
    want = model.generate(PROMPTS[:1], **asked)
    accelerate(model)
    with pytest.warns(LanternWarning, match=f"decodes this image itself: .*{why}"):
        assert torch.equal(model.generate(PROMPTS[:1], **asked), want)
