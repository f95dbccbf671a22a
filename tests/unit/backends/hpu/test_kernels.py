"""Habana's kernels, as documented, and the plain operators beside them give the reference's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gaudi
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import Filter
from lantern_accel.testing import tiny
from lantern_accel.testing.trace import OpRecorder
from lantern_accel_hpu import counting
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge, Kernels, softmax_of
from lantern_accel_hpu.counting import kth_largest
from lantern_accel_hpu.kernels import NOISE_BYTES, HPUOps

FUSED = Kernels(
    gaudi.FusedSDPA,
    gaudi.FusedRMSNorm,
    gaudi.apply_rotary_pos_emb,
    gaudi.RotaryPosEmbeddingMode.PAIRWISE,
)
REFERENCE = TensorOps()
ROWS, STEPS, HEADS, WIDTH = 3, 5, 4, 16
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=["plain", "fused"])
def ops(request: pytest.FixtureRequest) -> HPUOps:
    made = HPUOps()
    made.kernels = FUSED if request.param == "fused" else Kernels()
    return made


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert float((a.float() - b.float()).abs().max()) <= CLOSE[a.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_under_a_mask(ops: HPUOps, dtype: torch.dtype) -> None:
    q, k, v = (random(n, ROWS, s, HEADS, WIDTH).to(dtype) for n, s in ((1, STEPS), (2, 9), (3, 9)))
    visible = torch.rand(ROWS, 1, STEPS, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    visible[..., 0] = True
    for seen in (visible, visible[:1]):  # each row's own mask, and one for all
        want = REFERENCE.attend_dense(q, k, v, REFERENCE.mask(seen, dtype))
        close(ops.attend_dense(q, k, v, ops.mask(seen, dtype)), want)


def test_attention_without_a_mask_is_causal(ops: HPUOps) -> None:
    q, k, v = (random(n, ROWS, STEPS, HEADS, WIDTH) for n in (1, 2, 3))
    close(ops.attend_dense(q, k, v, None), REFERENCE.attend_dense(q, k, v, None))


def test_the_kernel_is_told_scale_softmax_and_whether_to_recompute() -> None:
    """One query's scores are a row: the vendor's models keep them, as long as nothing is quantised.

    Release 1.24's wrapper takes a window, too, and a float32 softmax for bfloat16 alone.
    """
    calls = []

    class Newer:
        @staticmethod
        def forward(ctx, q, k, v, *rest, window_size=(-1, -1), sinks=None):
            pass

        @staticmethod
        def apply(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: object) -> Tensor:
            calls.append(rest)
            return gaudi.FusedSDPA.apply(q, k, v, mask, *rest[:3])

    assert softmax_of(gaudi.FusedSDPA) == "None"
    ops = HPUOps()
    ops.kernels = Kernels(sdpa=Newer, softmax=softmax_of(Newer))
    for dtype, queries in ((torch.float32, STEPS), (torch.bfloat16, STEPS), (torch.float32, 1)):
        q = random(1, ROWS, STEPS, HEADS, WIDTH).to(dtype)
        mask = ops.mask(torch.ones(ROWS, 1, queries, STEPS, dtype=torch.bool), dtype)
        want = REFERENCE.attend_dense(q[:, :queries], q, q, mask)
        close(ops.attend_dense(q[:, :queries], q, q, mask), want)
    told = (0.0, False, 0.25)
    assert calls == [(*told, "None", True), (*told, "fp32", True), (*told, "None", False)]


def test_a_product_and_its_residual_are_two_operators_which_a_compiler_cannot_mistake() -> None:
    """An ``addmm`` of the residual becomes a ``linear`` with a matrix for a bias, rows lost."""
    assert HPUOps.linear_add is TensorOps.linear_add


@pytest.mark.parametrize("k", [64, 100, 1000])
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "masked", "ties", "far off", "few", "p first"]
)
def test_a_large_top_k_is_counted_and_is_the_references(k: int, kind: str) -> None:
    x = 3 * random(8, 2, 3, 2048)
    never = torch.full((1,), float("-inf"))
    given = Filter(temperature=torch.tensor([0.7]), top_k=k, never=never)
    if kind == "bfloat16":  # many equal values
        x = x.bfloat16().float()
    elif kind == "masked":
        x[..., 1500:] = float("-inf")
    elif kind == "ties":
        x = x.round()
    elif kind == "far off":  # what no one may draw, as a finite number
        x[..., ::3] = -1e9
    elif kind == "few":
        x[..., k - 7 :] = float("-inf")
    elif kind == "p first":
        given = replace(given, top_p=torch.tensor([0.9]), p_first=True)
    with OpRecorder(torch.device("cpu")) as seen:
        found = HPUOps().filter(x, given)
    assert not any(one[0] == "aten::topk" for one in seen.signature)
    assert torch.equal(found, REFERENCE.filter(x, given))
    assert torch.equal(kth_largest(x, k), x.topk(k).values[..., -1:])


#: Rows that are hard to search: values far apart, close to each other, equal, tiny, or no numbers.
HARD = {
    "normal": lambda x: x,
    "every magnitude": lambda x: (40 * x).exp() * x.sign(),
    "below the least normal number": lambda x: x * 1e-41,
    "neighbours": lambda x: (
        torch.tensor(3.1).view(torch.int32) + x.argsort(-1).argsort(-1).to(torch.int32)
    ).view(torch.float32),
    "negative neighbours": lambda x: -HARD["neighbours"](x),
    "all bits": lambda x: (x * 2.0**30).to(torch.int32).view(torch.float32).nan_to_num(nan=0.0),
    "integers": lambda x: (2 * x).round(),
    "one value": lambda x: torch.full_like(x, -0.0),
    "two far values": lambda x: torch.where(x > 0.1, 1e30, -1e30),
    "bounds": lambda x: torch.where(x > 1, float("inf"), torch.where(x < 0, -float("inf"), x)),
    "extremes": lambda x: torch.where(x > 0.2, torch.finfo(x.dtype).max, torch.finfo(x.dtype).min),
}


@pytest.mark.parametrize("many", [False, True], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", HARD)
def test_the_kth_largest_is_found_to_the_bit(
    kind: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MANY", 0 if many else 1 << 40)
    x = HARD[kind](random(12, 2, 3, 2100))
    made = counting.bars(x.device)
    for k in (1, 64, 1000, 2000, 2100):
        assert torch.equal(kth_largest(x, k, made), x.topk(k).values[..., -1:]), k


def test_no_number_in_a_row_stays_one() -> None:
    x = random(9, 1, 2, 1024)
    x[0, 0, 5] = float("nan")
    found = HPUOps().filter(x, Filter(top_k=500))
    assert found[0, 0].isnan().all()
    assert not found[0, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(ROWS, STEPS, 32), (ROWS, STEPS, HEADS, 32), (STEPS, 32)])
def test_norm_on_any_number_of_axes(
    ops: HPUOps, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = random(5, *shape).to(dtype), (1 + 0.1 * random(6, 32)).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "images"), [(1, 1), (1, ROWS), (ROWS, ROWS)])
def test_rotation_by_common_angles_and_by_each_rows_own(
    ops: HPUOps, rows: int, images: int, dtype: torch.dtype
) -> None:
    x = random(7, images, STEPS, 2, HEADS, WIDTH).to(dtype)
    angles = random(8, rows, STEPS, 1, 1, WIDTH // 2)
    cos, sin = angles.cos(), angles.sin()
    want = REFERENCE.rotate(x, REFERENCE.rotary(cos, sin))
    close(ops.rotate(x, ops.rotary(cos, sin)), want)


def test_caches_are_buffers_of_their_own_in_whole_blocks() -> None:
    ops = HPUOps()
    layout = ops.kv_layout(2, ROWS, 130, HEADS, WIDTH, torch.bfloat16)
    assert layout.capacity == 256  # the matrix engine has blocks of 128
    cache = ops.allocate(layout)
    places = {b.untyped_storage().data_ptr() for b in cache.buffers}
    assert len(cache.buffers) == len(places) == 2 * 2
    assert all(b._base is None and b.is_contiguous() for b in cache.buffers)
    assert sum(b.nbytes for b in cache.buffers) == layout.nbytes


def test_noise_is_a_table_where_it_takes_a_small_part_of_the_memory() -> None:
    for limit, most in ((96 * 10**9, NOISE_BYTES), (1600, 100)):
        hpu = gaudi.Gaudi()
        hpu.limit = limit
        assert DeviceBackend(Bridge(hpu)).preferences.noise_bytes == most


def test_addresses_are_what_index_copy_takes_and_stay_in_range() -> None:
    ops = HPUOps()
    layout = ops.kv_layout(1, ROWS, 10, HEADS, WIDTH, torch.float32)
    cache = ops.allocate(layout)
    slots = torch.tensor([[0, 9], [1, 2], [3, 9]], dtype=torch.int32)
    address = ops.address(cache, slots)
    assert (address.dtype, address.shape) == (torch.int64, (ROWS * HEADS * 2,))
    table = torch.arange(layout.rows * layout.heads * layout.capacity)
    found = table[address].view(ROWS, HEADS, 2)
    want = table.view(ROWS, HEADS, -1).gather(2, slots.long().unsqueeze(1).expand(-1, HEADS, -1))
    assert torch.equal(found, want)


@pytest.mark.parametrize("strategy", ["lantern++", "lantern"])
@torch.inference_mode()
def test_a_whole_decoding_agrees_with_the_reference(ops: HPUOps, strategy: str) -> None:
    tokens = []
    for one in (REFERENCE, ops):
        engine = tiny.tiny_engine(_backend(one), strategy, batch=2)
        tiny.start(engine, 3)
        tokens.append(engine.run().tokens)
    assert torch.equal(*tokens)


def _backend(ops: TensorOps):
    """Give operations the device that the tiny engine asks for."""
    ops.device = torch.device("cpu")
    return ops


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_the_kernels_can_be_compiled_into_one_graph() -> None:
    """The kernels are autograd functions: torch.compile must find no break in them.

    With eight arguments the vendor's wrapper asks a module that Dynamo does not trace.
    """
    ops = HPUOps()
    ops.kernels = FUSED
    q = random(1, ROWS, STEPS, HEADS, 16)
    weight = torch.ones(16)
    angles = random(2, 1, STEPS, 1, 8)

    def step() -> Tensor:
        mask = ops.mask(torch.ones(ROWS, 1, STEPS, STEPS, dtype=torch.bool), torch.float32)
        turned = ops.rotate(q, ops.rotary(angles.cos(), angles.sin()))
        return ops.attend_dense(turned, turned, ops.rms_norm(q, weight, 1e-5), mask)

    def eight() -> Tensor:
        turned = q.transpose(1, 2)
        return gaudi.FusedSDPA.apply(turned, turned, turned, None, 0.0, True, 0.25, "None")

    with torch.inference_mode():
        close(torch.compile(step, backend="eager", fullgraph=True)(), step())
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(eight, backend="eager", fullgraph=True)()
