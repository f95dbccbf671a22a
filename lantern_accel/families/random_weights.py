"""Models of real sizes with random weights: what a step costs does not depend on the weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import ModelError, did_you_mean
from lantern_accel.families.llamagen.drafter import DrafterConfig, EagleDrafter
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.sizes import LLAMAGEN, llamagen_config
from lantern_accel.nn.transformer import pack, rotary_table_2d

#: Sizes of other families' trunks, run through LlamaGen's block: the same matrices, not the same model.
TRUNKS = {
    # Anole and Lumina-mGPT share Chameleon-7B's sizes; an image has 32 x 32 tokens.
    "anole-7b": LlamaGenConfig(
        dim=4096,
        n_layer=32,
        n_head=32,
        ffn_dim=11008,
        vocab_size=65536,
        grid=32,
        conditioning="text",
        prefix_length=120,
        caption_dim=4096,
    )
}
_SIZED = re.compile(r"llamagen-(b|l|xl|xxl|3b)-(\d+)")


@dataclass(frozen=True)
class RandomModel:
    """Target, drafter and neighbour table (int32 ``[V, k]``) on a device."""

    name: str
    target: LlamaGenGPT
    drafter: EagleDrafter
    neighbours: Tensor


def sized(name: str) -> LlamaGenConfig:
    """Return a configuration by name, ``llamagen-SIZE-PIXELS``, or from a JSON file of its fields.

    Raises :class:`ModelError` for an unknown name or field.
    """
    known = {**LLAMAGEN, **TRUNKS}
    if name in known:
        return known[name]
    match = _SIZED.fullmatch(name)
    if match and int(match[2]) % 16 == 0 and int(match[2]) > 0:
        return llamagen_config(match[1].upper(), int(match[2]))
    path = Path(name)
    if path.suffix != ".json":
        raise ModelError(
            f"no size is named {name!r}{did_you_mean(name, known)} (also llamagen-SIZE-PIXELS with b, "
            "l, xl, xxl or 3b and a multiple of 16 pixels, or a JSON file of a configuration)"
        )
    try:
        return LlamaGenConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the sizes"
        raise ModelError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None


def drafter_config(config: LlamaGenConfig) -> DrafterConfig:
    """Return the EAGLE drafter of a target: one layer of the same sizes."""
    return DrafterConfig(
        dim=config.dim,
        n_head=config.n_head,
        ffn_dim=config.hidden_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=config.prefix_length - 1,
    )


def weights_bytes(config: LlamaGenConfig, dtype: torch.dtype) -> int:
    """Return what target and drafter take in memory."""
    with torch.device("meta"):
        parts: tuple[nn.Module, ...] = (LlamaGenGPT(config), EagleDrafter(drafter_config(config)))
    numbers: int = sum(t.numel() for part in parts for t in part.state_dict().values())
    return numbers * dtype.itemsize


def random_model(
    name: str,
    config: LlamaGenConfig,
    ops: TensorOps,
    dtype: torch.dtype,
    *,
    neighbours: int = 64,
    seed: int = 0,
) -> RandomModel:
    """Make seeded random weights on the device of ``ops``, never elsewhere first."""
    device = ops.device
    with torch.device("meta"):
        target = LlamaGenGPT(config, ops=ops)
        drafter = EagleDrafter(drafter_config(config), ops=ops)
    # Shapes without memory have no numbers to draw.
    drawn = device.type != "meta"
    generator = torch.Generator(device).manual_seed(seed) if drawn else None
    for part in (target, drafter):
        for path, module in part.named_modules():
            for key, weight in list(module.named_parameters(recurse=False)):
                made = torch.empty(weight.shape, dtype=dtype, device=device)
                if "norm" in path:
                    made.fill_(1.0)
                else:
                    made.normal_(0.0, 0.02, generator=generator)
                setattr(module, key, nn.Parameter(made, requires_grad=False))
            for key, buffer in list(module.named_buffers(recurse=False)):
                # LlamaGen stores its unconditional caption as a buffer.
                made = torch.zeros(buffer.shape, dtype=dtype, device=device)
                setattr(module, key, made)
        prefix = config.prefix_length - (part is drafter)
        tables = rotary_table_2d(
            prefix, config.grid, config.head_dim, config.rope_base, config.prefix_rotary
        )
        part.rope_cos, part.rope_sin = (table.to(device) for table in tables)
        part.eval()
        pack(part, ops)
    wide = min(neighbours, config.vocab_size - 1)
    steps = torch.arange(1, wide + 1, dtype=torch.int32, device=device)
    codes = torch.arange(config.vocab_size, dtype=torch.int32, device=device).unsqueeze(1)
    return RandomModel(name, target, drafter, (codes + steps) % config.vocab_size)
