"""Products of few rows and what follows them: against float64, and compiled without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compilations import Compilations
from support.cuda_double import doubled_backend
from support.interpreter import compiles, interpreted
from torch import Tensor

from lantern_accel.device.kv_cache import Pass
from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Decoder, RMSNorm
from lantern_accel_cuda import attention

#: Multiprocessors with which inputs are shared among programs, and with which they are not.
MANY, ONE = 8, 1
EPS = 1e-5


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: Tensor, gain: Tensor | None) -> Tensor:
    x = x.double()
    if gain is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()


def near(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    """Compare with float64: roundings of the result's dtype, of inputs and of a sum in float32."""
    eps = max(torch.finfo(got.dtype).eps, 2.0**-18)
    error = (got.double() - want).abs()
    assert bool((error <= 4 * eps * (want.abs() + scale)).all()), float(error.max())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small matrices go through several blocks of inputs and tiles."""
    from lantern_accel_cuda.kernels import few

    monkeypatch.setattr(few, "SHAPES", (few.Shape(16, 16, 4, 2),))


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cores", [MANY, ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_and_the_residual_are_those_of_float64(cores: int, dtype: torch.dtype) -> None:
    from lantern_accel_cuda.kernels import few

    x, weight = drawn(0, 1, 3, 72, dtype=dtype), drawn(1, 40, 72, dtype=dtype) * 72**-0.5
    assert (few.pieces_of(72, 40, few.SHAPES[0], cores) > 1) == (cores == MANY)
    want = x.double() @ weight.double().t()
    got = few.sums(x, weight, 0, cores)
    assert got.dtype == torch.float32
    near(got, want)
    residual = drawn(2, 1, 3, 40, dtype=dtype)
    want = want + residual.double()
    few.add(x, weight, residual, 0, cores)
    near(residual, want)


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cores", [MANY, pytest.param(ONE, marks=pytest.mark.long)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_gate_is_that_of_float64(cores: int, has_norm: bool) -> None:
    from lantern_accel_cuda.kernels import few

    x, weight = 3 * drawn(0, 2, 2, 72), drawn(1, 2 * 20, 72) * 72**-0.5
    gain = drawn(2, 72) if has_norm else None
    gate, up = (normed(x, gain) @ weight.double().t()).chunk(2, dim=-1)
    near(few.gate(x, gain, EPS, weight, 0, cores), torch.nn.functional.silu(gate) * up, 4.0)


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_queries_are_rotated_and_the_caches_written(shared: bool) -> None:
    from lantern_accel_cuda.kernels import few

    rows, nodes, heads, width = 2, 3, 2, 20
    layout = attention.layout(2, rows, 21, heads, width, torch.float32)
    ours, want = (TensorOps().allocate(layout) for _ in range(2))
    x, gain = drawn(0, rows, nodes, 40), drawn(1, 40)
    weight = drawn(2, 3 * heads * width, 40) * 40**-0.5
    angles = drawn(3, 1 if shared else rows, nodes, 1, 1, width // 2)
    rotary = (angles.cos(), angles.sin())
    slots = torch.tensor([[3, 9, 7], [0, 2, 20]])
    address = TensorOps().address(ours, slots)
    qkv = (normed(x, gain) @ weight.double().t()).float().unflatten(-1, (3, heads, width))
    turned = TensorOps().rotate(qkv[:, :, :2], rotary)
    TensorOps().write(want, 1, address, turned[:, :, 1], qkv[:, :, 2])
    k, v = ours.by_head(1, layout.capacity)
    q = few.rotate(x, gain, EPS, weight, *rotary, address, k, v, heads, 0, MANY)
    near(q, turned[:, :, 0].double(), 4.0)
    for got, here in zip(ours.buffers, want.buffers, strict=True):
        near(got, here.double(), 4.0)
        assert int(got.count_nonzero()) == int(here.count_nonzero())


@interpreted
def test_a_row_gives_the_same_bits_in_steps_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cuda.kernels import few
    from lantern_accel_cuda.kernels.counters import counters_of

    monkeypatch.setattr(few, "SHAPES", (few.Shape(16, 16, 4, 2),))
    x, weight, gain = drawn(0, 35, 72), drawn(1, 40, 72), drawn(2, 72)
    whole = few.gate(x, gain, EPS, weight, 0, MANY)
    for rows in (1, 17):
        assert torch.equal(few.gate(x[:rows], gain, EPS, weight, 0, MANY), whole[:rows])
    # The last program of a tile leaves its counter at 0.
    assert not bool(counters_of(torch.device("cpu"), 1).any())


@interpreted
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("classes", "lengths"),
    [
        ({0}, (1, 17)),
        pytest.param({0}, (1, 16, 33), marks=pytest.mark.long),
        pytest.param({0, None}, (1, 17), marks=pytest.mark.long),
    ],
    ids=["exact", "exact, 33", "fast"],
)
def test_exact_gives_a_node_the_same_bits_in_steps_of_any_length(
    classes: set[int | None], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and head, as a step has them; with torch's product for some rows they differ."""
    from lantern_accel_cuda import choosing, trust
    from lantern_accel_cuda.kernels import few

    def choice(site: Any, recorder: Any, timed: bool, *product: Any) -> choosing.Times:
        if timed:  # torch's product was faster for a window
            return {
                "16": {"0": 0.1, "torch": 0.2},
                "32": {"0": 0.2, "torch": 0.1},
                "64": {"0": 0.1},
            }
        return {most: {"0": 0.0} for most in ("16", "32", "64")}

    monkeypatch.setattr(few, "DTYPES", (torch.float32,))
    monkeypatch.setattr(choosing, "time_stage", choice)
    monkeypatch.setattr(trust, "persistent_dir", lambda name: None)
    backend, _ = doubled_backend(monkeypatch, preset="exact" if classes == {0} else "fast")
    vars(backend).pop("choices")
    dim, heads = 32, 2
    torch.manual_seed(0)
    blocks = Decoder.plain(dim, heads, 16, EPS).blocks()
    head, x, angles = drawn(5, 16, dim), drawn(4, 1, 33, dim), drawn(3, 1, 33, 1, dim // heads // 2)
    found = []
    for nodes in lengths:
        cache = backend.allocate(attention.layout(2, 1, 48, heads, dim // heads, torch.float32))
        address = backend.address(cache, torch.arange(3, 3 + nodes).view(1, -1))
        mask = torch.ones(1, 1, nodes, 48, dtype=torch.bool).tril(3)
        turn = angles[:, :nodes].cos(), angles[:, :nodes].sin()
        at = Pass(*turn, backend.mask(mask, torch.float32), cache, address)
        with torch.inference_mode():
            y = backend.trunk(blocks, x[:, :nodes].clone(), at, (), RMSNorm(dim, EPS))
        shape = backend.shape_of("sums", head, nodes)
        found.append((y if shape is None else few.sums(y, head, shape, MANY))[0, 0])
        assert shape in classes
    assert all(torch.equal(found[0], one) for one in found[1:]) == (classes == {0})


@interpreted
@pytest.mark.parametrize("chosen", [pytest.param(0, marks=pytest.mark.long), None])
def test_a_stack_of_blocks_is_the_reference_s(
    chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import few

    monkeypatch.setattr(few, "DTYPES", (torch.float32,))
    ours, _ = doubled_backend(monkeypatch, preset="fast")
    ours.choices = lambda *given: chosen
    served: list[str] = []
    honest = few._launch
    monkeypatch.setattr(few, "_launch", lambda *given: served.append("few") or honest(*given))
    dim, heads, nodes = 32, 2, 3
    torch.manual_seed(0)
    blocks = Decoder.plain(dim, heads, 48, EPS, 2).blocks()
    mask = torch.ones(1, 1, nodes, 24, dtype=torch.bool).tril(5)
    angles = drawn(3, 1, nodes, 1, dim // heads // 2)
    found = []
    for ops in (ours, TensorOps()):
        cache = ops.allocate(attention.layout(2, 1, 24, heads, dim // heads, torch.float32))
        address = ops.address(cache, torch.tensor([[3, 4, 5]]))
        at = Pass(angles.cos(), angles.sin(), ops.mask(mask, torch.float32), cache, address)
        with torch.inference_mode():
            out = ops.trunk(blocks, drawn(4, 1, nodes, dim), at, (1,), RMSNorm(dim, EPS))
        found.append((out, *cache.buffers))
    for got, want in zip(*found, strict=True):
        near(got, want.double(), 4.0)
    assert len(served) == (8 if chosen == 0 else 0)


@compiles
@pytest.mark.parametrize("rows", [3, 40, 64])
def test_blocks_of_rows_that_share_weights_start_together(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import few

    made, blocks = Compilations(monkeypatch), -(-rows // few.ROWS)
    x, weight = torch.zeros(rows, 640), torch.zeros(960, 640)
    few.sums(x, weight, 0, MANY)
    few.gate(x, None, EPS, weight, 1, MANY)
    # The first axis counts fastest. 16 programs fill the card: tiles of 32 do, those of 64 almost.
    assert made.grids == [(blocks, 30, 1), (blocks, 15, 2)]


@compiles
def test_the_operator_that_writes_the_caches_says_so() -> None:
    import lantern_accel_cuda.kernels.few  # noqa: F401

    schema = torch.ops.lantern_accel_cuda.few_rotate.default._schema
    written = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    assert written == ["k", "v"]
