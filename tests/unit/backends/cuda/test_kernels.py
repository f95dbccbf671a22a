"""The Triton kernels of a layer, run by Triton's interpreter on host memory.

Interpreted tests run in a process of their own (:mod:`support.interpreter`).
"""

from __future__ import annotations

import pytest
import torch
from support.compilations import Compilations
from support.cuda_double import doubled_backend
from support.interpreter import compiles, interpreted

from lantern_accel.device.operations import TensorOps
from lantern_accel.testing import tiny
from lantern_accel_cuda import attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "nodes", "heads", "width", "stored", "capacity"),
    [
        (2, 1, 3, 64, 64, 72),
        pytest.param(3, 60, 2, 64, 64, 200, marks=pytest.mark.long),
        pytest.param(3, 60, 1, 100, 104, 200, marks=pytest.mark.long),
        (3, 5, 2, 100, 104, 144),
        (3, 17, 1, 16, 16, 32),
        pytest.param(3, 33, 1, 64, 64, 704, marks=pytest.mark.long),
    ],
)
def test_tree_attention_is_softmax_over_what_is_seen(
    dtype: torch.dtype, rows: int, nodes: int, heads: int, width: int, stored: int, capacity: int
) -> None:
    from lantern_accel_cuda.kernels import tree_attention

    random = torch.Generator().manual_seed(nodes)
    q = torch.randn(rows, nodes, 3, heads, width, generator=random).to(dtype)[:, :, 0]
    kv = torch.zeros(2, rows, heads, capacity, stored, dtype=dtype)
    kv[..., :width] = torch.randn(2, rows, heads, capacity, width, generator=random).to(dtype)
    visible = torch.rand(rows, 1, nodes, capacity, generator=random) < 0.3
    # Rows of several lengths: some slots, one, all; and a query that sees nothing.
    visible[0, ..., capacity // 2 :] = False
    visible[1, ..., 1:] = False
    visible[1, ..., 0] = True
    visible[2:] = True
    visible[0, 0, 0] = False
    got = tree_attention.attend(q, kv[0], kv[1], visible.to(torch.int8), 82)
    keys, values = kv[..., :width].double().unbind(0)
    scores = torch.einsum("rthd,rhld->rhtl", q.double(), keys) * width**-0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    want = torch.einsum("rhtl,rhld->rthd", weights, values)
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype]
    assert got.is_contiguous()


@interpreted
def test_blocks_that_nobody_sees_are_not_read() -> None:
    from lantern_accel_cuda.kernels import tree_attention

    cache = torch.ones(2, 1, 1, 128, 16, dtype=torch.float16)
    cache[..., 64:, :] = float("nan")
    mask = torch.zeros(1, 1, 2, 128, dtype=torch.int8)
    mask[..., :5] = 1
    got = tree_attention.attend(torch.ones(1, 2, 1, 16, dtype=torch.float16), *cache, mask, 1)
    assert torch.equal(got, torch.ones_like(got))
    blind = tree_attention.attend(torch.ones(1, 2, 1, 16).half(), *cache, mask * 0, 1)
    assert torch.equal(blind, torch.zeros_like(blind))


@interpreted
@pytest.mark.parametrize("seen", [5, 9, 40])
def test_all_programs_of_a_head_work_at_any_length(
    seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import tree_attention

    cache = torch.ones(2, 1, 1, 640, 16)
    mask = torch.zeros(1, 1, 1, 640, dtype=torch.int8)
    mask[..., : 16 * seen] = 1
    made, honest = list[torch.Tensor](), torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *given, **more: made.append(honest(*given, **more)) or made[-1]
    )
    tree_attention.attend(torch.ones(1, 1, 1, 16), *cache, mask, 3)
    # Scores are equal, so that the sum of a program's weights counts its slots.
    _, slots = (one[0, :, 0] for one in made if one.dim() == 3)
    assert len(slots) == 6 and int(slots.sum()) == 16 * seen
    assert int(slots.max()) - int(slots.min()) <= 16


@interpreted
def test_a_query_gives_the_same_bits_beside_others_that_see_further() -> None:
    from lantern_accel_cuda.kernels import tree_attention

    random = torch.Generator().manual_seed(3)
    q, cache = (
        torch.randn(*shape, generator=random).half()
        for shape in ((1, 9, 1, 64), (2, 1, 1, 592, 64))
    )
    # The first sees four blocks of 64 slots, as many as there are programs, and the last sees five.
    place = 240 + 8 * torch.arange(9)
    mask = (torch.arange(592) <= place.unsqueeze(1)).to(torch.int8).view(1, 1, 9, 592)
    whole = tree_attention.attend(q, *cache, mask, 2)
    alone = tree_attention.attend(q[:, :1], *cache, mask[:, :, :1], 2)
    assert torch.equal(alone, whole[:, :1])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_and_gate_are_the_references(dtype: torch.dtype) -> None:
    from lantern_accel_cuda.kernels import fused

    random = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 200, generator=random).to(dtype)
    weight = torch.randn(200, generator=random).to(dtype)
    near = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    want = TensorOps().rms_norm(x, weight, 1e-5)
    assert torch.allclose(fused.rms_norm(x, weight, 1e-5), want, rtol=near, atol=near)
    x = torch.randn(2, 3, 2 * 1300, generator=random).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    assert torch.allclose(fused.swiglu(x), want, rtol=near, atol=near)


@interpreted
@pytest.mark.parametrize("shared", [True, False], ids=["one table", "a table a row"])
def test_rotation_and_cache_write_are_the_references_bit_for_bit(shared: bool) -> None:
    from lantern_accel_cuda.kernels import fused

    random = torch.Generator().manual_seed(2)
    rows, nodes, heads, width = 2, 5, 3, 20
    layout = attention.layout(2, rows, 29, heads, width, torch.float32)
    ours, want = (TensorOps().allocate(layout) for _ in range(2))
    qkv = torch.randn(rows, nodes, 3 * heads * width, generator=random).unflatten(
        -1, (3, heads, -1)
    )
    angles = torch.rand(1 if shared else rows, nodes, 1, 1, width // 2, generator=random)
    rotary = (angles.cos(), angles.sin())
    slots = torch.tensor([[3, 4, 7, 1, 31], [0, 2, 5, 6, 30]])
    address = TensorOps().address(ours, slots)
    turned = TensorOps().rotate(qkv[:, :, :2], rotary)
    TensorOps().write(want, 1, address, turned[:, :, 1], qkv[:, :, 2])
    q = fused.rotate_write(qkv, rotary, ours, 1, address)
    assert torch.equal(q, turned[:, :, 0])
    for got, here in zip(ours.buffers, want.buffers, strict=True):
        assert torch.equal(got, here)
    written = sum(int(side.count_nonzero()) for side in want.buffers)
    assert written == 2 * rows * nodes * heads * width


@interpreted
@pytest.mark.long
def test_a_step_with_all_kernels_decides_as_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    state = []
    with torch.inference_mode():
        for preset in ("fast", "safe"):
            engine = tiny.tiny_engine(doubled_backend(monkeypatch, preset=preset)[0], "lantern++")
            tiny.start(engine, 0)
            engine.step()
            state.append(engine.state)
    assert torch.equal(state[0].tokens, state[1].tokens)
    assert torch.allclose(state[0].pending_features, state[1].pending_features, atol=1e-4)


@compiles
def test_the_cache_is_read_in_enough_pieces_to_fill_the_gpu() -> None:
    from lantern_accel_cuda.kernels.tree_attention import plan

    xl = plan(60, 704, 64, 40, 2, 82)
    assert 82 <= xl.splits * 40 <= 704 // xl.block_l * 40
    assert plan(1, 64, 64, 2, 2, 82).splits == 1
    assert plan(60, 704, 64, 1280, 2, 82).splits == 1


@compiles
def test_a_plain_step_s_heads_are_rotated_by_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lantern_accel_cuda.kernels import fused

    made = Compilations(monkeypatch)
    cache = TensorOps().allocate(attention.layout(1, 2, 16, 20, 64, torch.bfloat16))
    qkv, turn = torch.zeros(2, 1, 3, 20, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, 32)
    address = TensorOps().address(cache, torch.zeros(2, 1, dtype=torch.int64))
    fused.rotate_write(qkv, (turn, turn), cache, 0, address)
    assert (made.launches, made.grids) == (["_rotate_write"], [(2, 1, 10)])
