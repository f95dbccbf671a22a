"""What does a product of few rows is chosen by class of rows, and the times behind it are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import CudaDouble, doubled_backend
from support.interpreter import compiles
from torch import Tensor

from lantern_accel.errors import BackendError, DeviceLostError
from lantern_accel_cuda import choosing
from lantern_accel_cuda.choosing import Choices, Times

BF16 = torch.bfloat16
TIMES: Times = {
    "16": {"torch": 0.020, "0": 0.010, "1": 0.012},
    "32": {"torch": 0.020, "0": 0.015, "1": 0.012},
    "64": {"torch": 0.020, "0": 0.030, "1": 0.025},
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    return tmp_path


def test_each_class_of_rows_has_what_was_fastest_and_the_times_are_kept(cache: Path) -> None:
    asked: list[str] = []

    def measure(stage: str, outputs: int, inputs: int, dtype: torch.dtype) -> Times:
        asked.append(stage)
        return TIMES

    for _ in range(2):  # the second process measures nothing
        choices = Choices({"card": "x"}, measure)
        chosen = [choices("gate", 5120, 1280, BF16, n) for n in (1, 2, 16, 17, 32, 33, 64)]
        assert chosen == [0, 0, 0, 1, 1, None, None]
    assert asked == ["gate"]
    kept = {"gate 5120x1280 bfloat16": TIMES}
    assert choices.kept.read() == kept


class Kernels:
    """Products by torch in the kernels' place; ``fault`` is what shape 1 does to what it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
        from lantern_accel_cuda import layers

        self.shapes: list[int | None] = []

        def rotated(
            x: Tensor, norm: Any, w: Tensor, rotary: Any, address: Tensor, k: Tensor, v: Tensor,
            heads: int, shape: int | None, cores: int,
        ) -> Tensor:  # fmt: skip
            self.shapes.append(shape)
            q, *rest = (x @ w.t()).unflatten(-1, (3, heads, -1)).unbind(2)
            for cache, new in zip((k, v), rest, strict=True):
                cache.copy_(new.transpose(1, 2))
            if shape == 1:
                fault(q, k, v)
            return q

        monkeypatch.setattr(layers, "project_heads", rotated)
        monkeypatch.setattr(choosing, "LEAST_BYTES", 0)
        monkeypatch.setattr(choosing, "MOST_BYTES", 2**16)


def opened(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None] = lambda *given: None
) -> tuple[Any, CudaDouble, Kernels]:
    backend, double = doubled_backend(monkeypatch, preset="fast")
    vars(backend).pop("choices")
    return backend, double, Kernels(monkeypatch, fault)


WEIGHT = torch.zeros(3 * 2 * 64, 32, dtype=BF16)


@compiles
@pytest.mark.parametrize("wrong", [0, 1, 2], ids=["q", "k", "v"])
def test_a_shape_that_writes_something_else_is_not_timed(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, double, _ = opened(monkeypatch, lambda *written: written[wrong].mul_(1.1))
    backend.shape_of("rotate", WEIGHT, 2)
    (times,) = backend.choices.kept.read().values()
    assert [set(by) for by in times.values()] == [{"torch", "0"}] * 3
    assert double.done.count("capture_end") == 6
    # What the recordings held is given back once.
    assert double.done.count("empty_cache") == 1 and not backend.counters()["graph_bytes_kept"]


@compiles
def test_a_shape_that_cannot_be_compiled_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def refused(*written: Tensor) -> None:
        raise OutOfResources(120_000, 101_376, "shared memory")

    backend, _, _ = opened(monkeypatch, refused)
    assert backend.shape_of("rotate", WEIGHT, 2) is not None
    (times,) = backend.choices.kept.read().values()
    assert all(set(by) == {"torch", "0"} for by in times.values())


@compiles
def test_a_recording_that_dies_goes_through_the_recorder_s_clean_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, double, _ = opened(monkeypatch)
    double.refuses = "capture_end"
    assert [backend.shape_of("rotate", WEIGHT, rows) for rows in (2, 32, 64)] == [0, 0, 0]
    assert not backend.support("capture") and double.poisoned
    assert "empty_cache" not in double.done and backend.choices.kept.read() == {}
    backend.close()


@compiles
def test_a_shape_that_loses_the_gpu_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*written: Tensor) -> None:
        double.lost = "CUDA error: misaligned address"
        double.synchronize()

    backend, double, _ = opened(monkeypatch, lose)
    with pytest.raises(DeviceLostError, match="start again: torch's product serves 'rotate"):
        backend.shape_of("rotate", WEIGHT, 2)
    # An earlier loss is not blamed on a product.
    with pytest.raises(RuntimeError, match="misaligned"):
        backend.shape_of("gate", WEIGHT, 2)
    later, _, kernels = opened(monkeypatch, lose)
    assert later.shape_of("rotate", WEIGHT, 2) is None and kernels.shapes == []
    assert [*later.choices.kept.read()] == ["rotate 384x32 bfloat16"]


@compiles
def test_exact_times_nothing_and_serves_all_rows_in_one_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wrong in (False, True):
        backend, double = doubled_backend(monkeypatch, preset="exact")
        vars(backend).pop("choices")
        kernels = Kernels(monkeypatch, lambda *given: None)
        if wrong:
            monkeypatch.setattr(choosing, "DIFFERENCE", -1.0)
            with pytest.raises(BackendError, match="preset=fast"):
                backend.shape_of("rotate", WEIGHT * 1, 2)
        else:
            assert [backend.shape_of("rotate", WEIGHT, n) for n in (1, 2, 17, 33, 64)] == [0] * 5
            assert 1 not in kernels.shapes and "capture_end" not in " ".join(double.done)
            backend.choices.kept.path.unlink()


@compiles
def test_exact_is_refused_where_a_kernel_it_needs_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="exact")
    backend.trust = lambda kernel: not kernel.startswith("swiglu")
    with pytest.raises(BackendError, match="needs the kernel 'swiglu'"):
        backend.serves_few(torch.zeros(1, 2, 32, dtype=BF16))
    assert not backend.serves_few(torch.zeros(1, 65, 32, dtype=BF16))
