"""A tiny seeded model: small enough to check a backend in seconds, random enough to show mistakes.

Its drafter has all that a drafter can have: it reads a lower block of the target too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.decoding.trees import parse_tree
from lantern_accel.device.backend import Backend
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.drafter import DrafterConfig, EagleDrafter
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.nn.transformer import pack
from lantern_accel.strategy.values import (
    DynamicTree,
    Sampling,
    StaticTree,
    Strategy,
    named_strategy,
)

VOCAB, GRID, PREFIX = 48, 5, 4


@dataclass(frozen=True)
class TinyModel:
    """Target, drafter and neighbour table on a device; captions are random features."""

    target: LlamaGenGPT
    drafter: EagleDrafter
    neighbours: Tensor


def tiny_model(ops: TensorOps, device: torch.device, dtype: torch.dtype) -> TinyModel:
    """Build the model, the same on every device, ``dtype`` weights."""
    target_config = LlamaGenConfig(
        dim=32, n_layer=2, n_head=4, ffn_dim=48, vocab_size=VOCAB, grid=GRID,
        prefix_length=PREFIX, caption_dim=16,
    )  # fmt: skip
    drafter_config = DrafterConfig(
        dim=32,
        taps=(1,),
        n_head=4,
        ffn_dim=48,
        vocab_size=VOCAB,
        grid=GRID,
        prefix_length=PREFIX - 1,
    )
    generator = torch.Generator().manual_seed(11)
    parts = (LlamaGenGPT(target_config, ops=ops), EagleDrafter(drafter_config, ops=ops))
    for part in parts:
        for path, module in part.named_modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
                drawn = torch.randn(weight.shape, generator=generator) * scale
                drawn = drawn + (1.0 if "norm" in path else 0.0)
                # Replaced, not moved: Module.to cannot move fake tensors.
                moved = drawn.to(device=device, dtype=dtype)
                setattr(module, name, torch.nn.Parameter(moved, requires_grad=False))
        part.eval()
        pack(part, ops)
        part.rope_cos, part.rope_sin = part.rope_cos.to(device), part.rope_sin.to(device)
    codebook = torch.randn(VOCAB, 4, generator=generator)
    return TinyModel(*parts, neighbour_table(codebook, 12).to(device))


def tiny_strategy(name: str) -> Strategy:
    """Return a strategy by name over trees that suit the tiny model."""
    static = parse_tree("0,1,2,00,01,10,000")
    assert isinstance(static, StaticTree)
    chosen = named_strategy(name, static=static, dynamic=DynamicTree(top_k=3, depth=2, total=9))
    return chosen.override(k=8 if "lantern" in name else None)


def tiny_engine(
    backend: Backend,
    strategy: str,
    *,
    batch: int = 1,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Engine:
    """Build an engine on the tiny model, guided, top-k 32."""
    model = tiny_model(backend, backend.device, dtype)
    sampling = Sampling(temperature=temperature, cfg_scale=2.5, top_k=32)
    return Engine(
        model.target,
        model.drafter,
        backend,
        tiny_strategy(strategy),
        sampling,
        batch=batch,
        neighbours=model.neighbours,
    )


def start(engine: Engine, seed: int, prefill: Callable[[], None] | None = None) -> None:
    """Load a request (see :func:`load`) and prefill; ``prefill`` replays a captured one."""
    load(engine, seed)
    (prefill or engine.prefill)()


def load(engine: Engine, seed: int) -> None:
    """Load random captions and random padding, both fixed by ``seed``."""
    g = engine.geometry
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(g.rows, g.prefix, 16, generator=generator)
    pads = torch.randint(0, g.prefix, (g.batch, 1), generator=generator)
    mask = torch.arange(g.prefix) >= pads
    weight = engine.verifying.target.weight
    rows = features * torch.cat([mask] * g.branches).unsqueeze(-1)
    engine.load(
        rows.to(device=weight.device, dtype=weight.dtype),
        mask.to(weight.device),
        engine.uniforms(seed, list(range(g.batch))),
    )
