"""The described trunk: every kind of block against a few lines of plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.nn.rotary import rotary_table
from lantern_accel.nn.transformer import REFERENCE, Decoder, HeadNorms, Norms, Pass, plan_blocks

CPU = torch.device("cpu")
PLAIN = Decoder(dim=24, layers=2, heads=6, kv_heads=6, head_dim=4, hidden=20, eps=1e-5)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of ``x [T, H, d]``."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def expected(d: Decoder, block: torch.nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what a causal block makes of ``x [T, D]``, head by head."""
    w = dict(block.named_parameters())

    def attention(y: Tensor) -> Tensor:
        out = y @ w["attention.wqkv.weight"].t() + w.get("attention.wqkv.bias", 0)
        heads = out.unflatten(-1, (-1, d.head_dim))
        qk, v = heads[:, : d.heads + d.kv_heads], heads[:, d.heads + d.kv_heads :]
        if d.head_norm != "none":
            scale, shift = w["attention.qk_norm.weight"], w["attention.qk_norm.bias"]
            qk = F.layer_norm(qk, (d.head_dim,), eps=1e-5) * scale + shift
        qk = turned(qk, cos, sin)
        results = []
        for head in range(d.heads):
            group = head // d.groups
            scores = qk[:, head] @ qk[:, d.heads + group].t() / d.head_dim**0.5
            hidden = torch.ones_like(scores).triu(1).bool()
            results.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, group])
        return torch.cat(results, -1) @ w["attention.wo.weight"].t()

    def feed(y: Tensor) -> Tensor:
        gate, up = (y @ w["feed_forward.w13.weight"].t()).chunk(2, -1)
        return (F.silu(gate) * up) @ w["feed_forward.w2.weight"].t()

    for work, name in ((attention, "attention"), (feed, "ffn")):
        first = w[f"{name}_norm.weight"]
        if d.norms == "after":
            x = x + norm(work(x), first)
        elif d.norms == "both":
            x = x + norm(work(norm(x, first)), w[f"{name}_post_norm.weight"])
        else:
            x = x + work(norm(x, first))
    return x


@pytest.mark.parametrize("norms", ["before", "after", "both"])
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "bias", "head_norm"),
    [(6, 4, False, "none"), (2, 4, True, "none"), (1, 8, False, "layer"), (3, 2, True, "layer")],
)
def test_every_kind_of_block(
    norms: Norms, kv_heads: int, head_dim: int, bias: bool, head_norm: HeadNorms
) -> None:
    d = replace(
        PLAIN, norms=norms, kv_heads=kv_heads, head_dim=head_dim, bias=bias, head_norm=head_norm
    )
    generator = torch.Generator().manual_seed(kv_heads)
    blocks = d.blocks().requires_grad_(False)
    for weight in blocks.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    x = torch.randn(1, 7, d.dim, generator=generator)
    cos, sin = rotary_table(torch.arange(7), d.head_dim, 100.0, CPU)
    at = Pass(cos.view(1, 7, 1, -1), sin.view(1, 7, 1, -1))
    want = x[0]
    for block in blocks:
        want = expected(d, block, want, cos, sin)
    assert torch.allclose(d.run(REFERENCE, blocks, x, at)[0], want, atol=2e-5)

    # The same through a cache that holds a group's keys once: four positions, then three.
    cache = REFERENCE.allocate(
        REFERENCE.kv_layout(d.layers, 1, 8, d.kv_heads, d.head_dim, torch.float32)
    )
    parts = []
    for first, last in ((0, 4), (4, 7)):
        place = torch.arange(first, last).view(1, -1)
        seen = torch.arange(8) <= place.unsqueeze(-1)
        at = Pass(
            cos[first:last].view(1, -1, 1, cos.shape[-1]),
            sin[first:last].view(1, -1, 1, sin.shape[-1]),
            REFERENCE.mask(seen.unsqueeze(1), torch.float32),
            cache,
            REFERENCE.address(cache, place),
        )
        parts.append(d.run(REFERENCE, blocks, x[:, first:last], at))
    assert torch.allclose(torch.cat(parts, 1)[0], want, atol=2e-5)


def test_a_plain_trunk_is_made_of_blocks_that_devices_have_kernels_for() -> None:
    assert plan_blocks(PLAIN.blocks()) is not None
    for other in (
        replace(PLAIN, kv_heads=3),
        replace(PLAIN, bias=True),
        replace(PLAIN, head_norm="layer"),
        replace(PLAIN, norms="both"),
        replace(PLAIN, head_dim=8),
    ):
        assert plan_blocks(other.blocks()) is None


def test_axes_take_sections_in_order_and_the_rest_of_a_head_stays() -> None:
    positions = torch.tensor([[3, 5], [7, 11], [13, 17]])
    cos, sin = rotary_table(positions, 12, 50.0, CPU, rotated=8, sections=(1, 1, 1, 1))
    for n in range(2):
        for pair, axis in enumerate((0, 1, 2, 0)):
            angle = positions[axis, n] * 50.0 ** (-2 * pair / 8)
            assert cos[n, pair] == pytest.approx(float(angle.cos()), abs=1e-6)
            assert sin[n, pair] == pytest.approx(float(angle.sin()), abs=1e-6)
    assert cos[:, 4:].eq(1).all() and sin[:, 4:].eq(0).all()
    with pytest.raises(ValueError, match="not 4 pairs"):
        rotary_table(positions, 8, 50.0, CPU, sections=(1, 1))
