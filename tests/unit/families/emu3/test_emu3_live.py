"""Emu3 of transformers' own classes, of several sizes: written by them, read by us, drawn alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")

from support.emu3 import RECORDED, said
from support.hub_models import filled

import lantern_accel

SIZES = (
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
    {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1},
    {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
)


def made(sizes: dict[str, Any], seed: int) -> Any:
    """Return a random model of transformers' class, with the recorded vocabulary."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    config = said("hf_config")
    config["text_config"] |= sizes
    config.pop("dtype")
    return filled(Emu3ForConditionalGeneration(Emu3Config(**config)).float(), seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))])
def test_a_saved_model_draws_the_same(seed: int, tmp_path: Path) -> None:
    model = made(SIZES[seed], seed)
    model.save_pretrained(tmp_path)
    parts = {"device": "cpu", "dtype": "float32", "text_encoder": RECORDED}
    with lantern_accel.load(tmp_path, **parts) as pipe:  # type: ignore[arg-type]  # of many types
        manifest, text = pipe.model.manifest, pipe.model.text
        prompt, negative, (rows, columns) = (
            "two cats, 7 hats",
            "blurry",
            ((4, 3), (2, 5), (3, 3))[seed],
        )
        ids, other = text.ids([prompt, negative], rows, columns)  # type: ignore[union-attr]  # it has a text
        special, first = manifest.ids, len(ids)
        ends = [special.frame_end, special.image_end, special.eos]
        codes = list(range(special.first, special.first + 64))

        def allowed(_: int, written: torch.Tensor) -> list[int]:
            n = len(written) - first
            if n >= rows * (columns + 1):
                return [ends[n - rows * (columns + 1)]]
            return [special.row_end] if n % (columns + 1) == columns else codes

        count = rows * (columns + 1) + len(ends)
        want = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, first, dtype=torch.long),
            guidance_scale=3.0, negative_prompt_ids=torch.tensor([other]),
            negative_prompt_attention_mask=torch.ones(1, len(other), dtype=torch.long),
            prefix_allowed_tokens_fn=allowed, max_new_tokens=count, do_sample=False,
        )[0, first:]  # fmt: skip
        side = manifest.token_pixels
        asked = {"negative_prompt": negative, "size": (columns * side, rows * side)}
        for strategy in ("vanilla", "scd"):
            drawn = pipe.generate(prompt, temperature=0, cfg_scale=3.0, strategy=strategy, **asked)  # type: ignore[arg-type]  # of many types
            assert torch.equal(manifest.ids_of(drawn.tokens)[0], want)
        with torch.no_grad():
            pixels = model.decode_image_tokens(image_tokens=want[None], height=rows, width=columns)
            grid = drawn.tokens.long().view(1, rows, -1)[:, :, :columns]
            ours = pipe.model.vq.decode(grid)
        assert (ours - pixels.reshape(ours.shape)).abs().max() < 1e-4
