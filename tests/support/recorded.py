"""The small models that the golden tensors were recorded from."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.families.keys import LLAMA
from lantern_accel.families.llamagen.model import (
    DrafterConfig,
    LlamaGenConfig,
    LlamaGenDrafter,
    LlamaGenGPT,
)
from lantern_accel.families.llamagen.official import DRAFTER_RULES
from lantern_accel.strategy.values import Sampling, Strategy
from support.engines import engine_of
from support.golden import golden, golden_metadata, load_into


def _frozen(module: torch.nn.Module) -> None:
    module.eval().requires_grad_(False)


@functools.cache
def official_llamagen(name: str) -> LlamaGenGPT:
    """``llamagen_c2i`` or ``llamagen_t2i``, from their official key layout."""
    config = json.loads(golden_metadata(f"{name}/weights")["config"])
    text = config.get("model_type", "c2i") == "t2i"
    sizes = {name: value for name, value in config.items() if name in LlamaGenConfig.model_fields}
    sizes |= {"grid": int(config.get("block_size", 256) ** 0.5)}
    sizes |= {"conditioning": "text" if text else "class"}
    sizes |= {"prefix_length": config.get("cls_token_num", 120 if text else 1)}
    model = LlamaGenGPT(LlamaGenConfig(**sizes))
    load_into(model, golden(f"{name}/weights"), name, LLAMA)
    _frozen(model)
    return model


@functools.cache
def lantern_target() -> LlamaGenGPT:
    config = LlamaGenConfig(
        dim=128, n_layer=4, n_head=4, ffn_dim=512, vocab_size=1024, grid=16, caption_dim=64
    )
    model = LlamaGenGPT(config)
    load_into(model, golden("lantern/target"), "target", LLAMA)
    _frozen(model)
    return model


@functools.cache
def lantern_drafter(mask_padding: bool = True) -> LlamaGenDrafter:
    config = DrafterConfig(
        dim=128,
        n_head=4,
        ffn_dim=512,
        vocab_size=1024,
        grid=16,
        prefix_length=119,
        norm_eps=1e-5,
        mask_padding=mask_padding,
    )
    model = LlamaGenDrafter(config)
    # The official loader took the drafter's embedding from the head of a single-file checkpoint.
    head = {"embed_tokens.weight": golden("lantern/target")["output.weight"]}
    load_into(model, {**golden("lantern/drafter"), **head}, "drafter", DRAFTER_RULES)
    _frozen(model)
    return model


def decode(
    target: Any,
    condition: Tensor,
    sampling: Sampling,
    *,
    mask: Tensor | None = None,
    strategy: Strategy | None = None,
    drafter: Any = None,
    neighbours: Tensor | None = None,
    batch: int | None = None,
) -> tuple[Tensor, list[list[int]], Engine]:
    """Decode conditional rows through the engine; with ``batch`` the rows of all branches are given.

    Returns tokens ``[B, N]``, for each image the accepted drafts of its steps, and the engine.
    """
    rows, given = condition, batch is not None
    batch = batch or condition.shape[0]
    models = target, drafter
    engine = engine_of(models, strategy or Strategy(), sampling, batch, neighbours=neighbours)
    if mask is None:
        mask = torch.ones(batch, target.config.prefix_length, dtype=torch.bool)
    if sampling.guided and not given:
        rows = torch.cat((condition, target.unconditional(batch)))
    accepted: list[list[int]] = [[] for _ in range(batch)]

    def step() -> None:
        engine.step()
        for image, count in enumerate(engine.state.last_length.tolist()):
            if count >= 0:
                accepted[image].append(count)

    with torch.inference_mode():
        engine.start(rows, mask, engine.randomness(0, list(range(batch))))
        decoded = engine.run(step)
    return decoded.tokens, accepted, engine
