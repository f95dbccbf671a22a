"""A stack of decoder blocks against plain float64 on the host: all of a pass but its head."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from lantern_accel.decoding.trees import topology_of
from lantern_accel.device.backend import Backend
from lantern_accel.device.kv_cache import Pass
from lantern_accel.nn.transformer import Block, Decoder, RMSNorm, pack
from lantern_accel.strategy.trees import TreeTables, parse_drafts, tree_paths
from lantern_accel.testing.attention import attention_of
from lantern_accel.testing.result import Compared, Measured, doing
from lantern_accel.testing.rotation import angles, rotation_of
from lantern_accel.testing.tiny import normal
from lantern_accel.testing.tolerances import MARGIN, ROUNDING, short

#: Heads, their width, the feed-forward's, and epsilon: LlamaGen's B and 3B, Janus, and a tiny one.
STACKS = ((3, 64, 272, 1e-5), (2, 100, 144, 1e-5), (2, 128, 200, 1e-6), (4, 8, 48, 1e-5))
LAYERS, ROWS, CAPACITY = 2, 2, 45
#: Roundings between what a block reads and what it adds, one behind the other.
OPERATIONS = 8


def _blocks(heads: int, width: int, hidden: int, eps: float, first: bool) -> nn.ModuleList:
    """Build seeded blocks in float32; ``first``: the first has a norm before attention."""
    dim = heads * width
    blocks = Decoder.plain(dim, heads, hidden, eps, LAYERS, input_norm=first).blocks()
    for number, weight in enumerate(blocks.parameters()):
        drawn = normal(number, *weight.shape)
        made = drawn * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1 + 0.2 * drawn
        weight.data.copy_(made)
    return blocks


def _norm(x: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double().cpu()


class Host:
    """The same blocks in float64: weights as they were before a device packed them."""

    def __init__(self, blocks: nn.ModuleList, norm: RMSNorm) -> None:
        self.blocks = [
            {name: value.detach().double().clone() for name, value in block.named_parameters()}
            for block in blocks
        ]
        self.kinds, self.norm = list(blocks), norm
        self.keys: list[Tensor] = [torch.empty(0)] * len(blocks)
        self.values = list(self.keys)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, seen: Tensor
    ) -> list[Tensor]:
        """Return the states after every block, and the last ones normalised, ``[R, T, D]`` each."""
        states = []
        for layer, (block, weights) in enumerate(zip(self.kinds, self.blocks, strict=True)):
            assert isinstance(block, Block)
            heads = block.attention.heads
            y = _norm(x, block.attention_norm)
            qkv = (y @ weights["attention.wqkv.weight"].t()).view(*y.shape[:2], 3, heads, -1)
            q, k = (rotation_of(qkv[:, :, side], cos, sin) for side in (0, 1))
            if self.keys[layer].numel() == 0:
                shape = (len(x), CAPACITY, heads, q.shape[-1])
                self.keys[layer], self.values[layer] = (x.new_zeros(shape) for _ in range(2))
            at = slots.view(*slots.shape, 1, 1).expand_as(k)
            self.keys[layer] = self.keys[layer].scatter(1, at, k)
            self.values[layer] = self.values[layer].scatter(1, at, qkv[:, :, 2])
            y = attention_of(q, self.keys[layer], self.values[layer], seen).flatten(-2)
            x = x + y @ weights["attention.wo.weight"].t()
            gate, up = (_norm(x, block.ffn_norm) @ weights["feed_forward.w13.weight"].t()).chunk(
                2, -1
            )
            x = x + (gate * gate.sigmoid() * up) @ weights["feed_forward.w2.weight"].t()
            states.append(x)
        return [*states, _norm(x, self.norm)]


def trunk(backend: Backend) -> Measured:
    """Compare a prompt, a token and a tree in two blocks over one cache, with taps and without."""
    checked, device = Compared(backend, "trunk"), backend.device
    tables = TreeTables(tree_paths(parse_drafts("0,1,2,00,01,10,000")))
    (tree,) = topology_of(tables, 1, torch.device("cpu"))["visible"]
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for dtype, (number, (heads, width, hidden, eps)) in itertools.product(
        checked.dtypes, enumerate(STACKS)
    ):
        dim = heads * width
        blocks, norm = _blocks(heads, width, hidden, eps, number != 1), RMSNorm(dim, eps)
        norm.weight.data.copy_(1 + 0.2 * normal(9, dim))
        for part in (blocks, norm):
            part.to(dtype).requires_grad_(False)
        host = Host(blocks, norm)
        for part in (blocks, norm):
            part.to(device)
        pack(blocks, backend)
        cache = backend.allocate(backend.kv_layout(LAYERS, ROWS, CAPACITY, heads, width, dtype))
        known = 0
        for kind, block, taps in (
            ("a prompt", causal, ()),
            ("a token", causal[:1, :1], (1,)),
            ("a tree", tree, ()),
        ):
            count = len(block)
            what = f"trunk of {heads} heads of {width}, {kind}, in {short(dtype)}"
            doing(what)
            x = normal(count, ROWS, count, dim).to(dtype)
            cos, sin = angles(count, width, ROWS)
            slots = (known + torch.arange(count)).expand(ROWS, -1)
            seen = torch.zeros(ROWS, 1, count, cache.layout.capacity, dtype=torch.bool)
            seen[..., :known] = True
            seen[1:, ..., : min(known, 2)] = False  # a row whose first tokens are pads
            seen[..., known : known + count] = block
            known += count
            states = host(x.double(), cos, sin, slots, seen[..., :CAPACITY])
            want = torch.cat([states[0], states[-1]] if taps else states[-1:], dim=-1)
            at = Pass(
                cos.to(device), sin.to(device), backend.mask(seen.to(device), dtype), cache,
                backend.address(cache, slots.to(device, backend.index)),
            )  # fmt: skip
            got = backend.trunk(blocks, x.to(device), at, taps, norm.to(device))
            # Every operation rounds numbers as large as the state; a sum over n has about root n.
            each = ROUNDING[dtype] + ROUNDING[torch.float32] * hidden**0.5
            near = MARGIN * each * (2 * LAYERS * OPERATIONS) ** 0.5 * float(want.abs().max())
            checked.hold(got, want, torch.full_like(want, near), what, dtype)
    return checked.to_measured(f"passes of {LAYERS} blocks")
