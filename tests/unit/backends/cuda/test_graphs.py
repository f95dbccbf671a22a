"""Capturing and replaying, on a double of torch's CUDA API: the backend's own code, no GPU."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import CudaDouble, Graph, doubled_backend
from support.few import small_kit
from support.models import write_tiny_model

from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import Replay
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    LanternWarning,
    NotCapturableError,
)
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.models.bundle import load_model
from lantern_accel.models.locate import find_model
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.testing import kit, tiny
from lantern_accel_cuda.graphs import WARMUPS, GraphReplay

Opened = tuple[Backend, CudaDouble]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return doubled_backend(monkeypatch)


@pytest.fixture
def count() -> torch.Tensor:
    return torch.zeros(1)


def test_a_step_is_warmed_up_on_a_side_stream_then_captured_then_only_replayed(
    opened: Opened, count: torch.Tensor
) -> None:
    (backend, double), calls = opened, []

    def step() -> None:
        calls.append(1)
        assert double.current.side
        count.add_(torch.ones(1))

    replay = backend.capture(step, "step")
    assert len(calls) == WARMUPS + 1
    assert count.item() == WARMUPS  # a capture does not run what it records
    assert replay.captured
    assert replay.seconds > 0
    assert replay.time_phases() is None  # one graph keeps no phases apart
    order = [line for line in double.done if "capture" in line or "waits for" in line]
    assert order[:2] == ["side 0 waits for default", "default waits for side 0"]
    assert order[-2:] == ["capture_begin thread_local", "capture_end"]
    for _ in range(5):
        replay()
    assert count.item() == WARMUPS + 5
    assert len(calls) == WARMUPS + 1
    assert double.current.name == "default"


def test_all_captures_share_a_stream_and_a_pool_until_none_is_left(
    opened: Opened, count: torch.Tensor
) -> None:
    backend, double = opened

    def wide() -> None:
        torch.ones(256)
        count.add_(1)

    first = backend.capture(lambda: count.add_(torch.ones(1)), "step")
    second = backend.capture(wide, "step")
    third = backend.capture(wide, "step")
    assert {graph.pool() for graph in double.graphs} == {("pool", 1)}
    assert first.nbytes == 4
    assert second.nbytes == 256 * 4 - 4  # what it needs beyond the first one's
    assert third.nbytes == 0
    assert double.done.count("side 0 waits for default") == 3
    for replay in (first, second, third):
        replay.release()
        replay.release()
    assert double.done.count("reset") == 3
    # Memory is asked back once an engine, whose first function is prefill.
    last = [backend.capture(wide, name) for name in ("prefill", "step")]
    assert double.graphs[-1].pool() == ("pool", 2)
    assert double.done.count("empty_cache") == 2
    with backend:  # closing releases every recording, and may come twice
        pass
    assert all(graph.was_reset for graph in double.graphs)
    backend.close()
    for replay in (first, *last):
        with pytest.raises(BackendError, match="was released"):
            replay()


@pytest.mark.long
@pytest.mark.parametrize("graph", ["off", "step", "phases"])
def test_a_replayed_engine_decodes_what_the_eager_one_does(
    monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    backend, _ = doubled_backend(monkeypatch, graph=graph)
    small_kit(monkeypatch)
    monkeypatch.setattr("lantern_accel.testing.tiny.FORMS", ("vanilla", "lantern++"))
    checks = ["replay.eager", "kv", "attention"]
    checks += ["replay.buckets"] if graph == "step" else []
    report = kit.run_checks(backend, kit.select(checks))
    assert report.passed, report.table()
    assert bool(backend.support("capture")) == (graph != "off")
    with torch.inference_mode():
        engine = tiny.tiny_engine(backend, "lantern++")
        replay = backend.capture(engine.step)
    assert replay.captured == (graph != "off")


def test_padding_of_slots_and_heads_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    layout = backend.kv_layout(24, 2, 700, 32, 100, torch.bfloat16)
    assert layout.shape == (2 * 32 * 704, 104)
    with torch.inference_mode():
        for strategy in ("vanilla", "eagle2", "lantern++"):
            tokens = []
            for ops in (backend, REFERENCE):
                engine = tiny.tiny_engine(ops, strategy, batch=2)
                capacity = engine.verifying.cache.layout.capacity
                assert (capacity % 8 == 0) == (ops is backend)
                tiny.start(engine, 3)
                tokens.append(engine.run().tokens)
            assert torch.equal(*tokens)


def test_phases_are_graphs_of_their_own_with_the_papers_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, double = doubled_backend(monkeypatch, graph="phases")
    with torch.inference_mode():
        engine = tiny.tiny_engine(backend, "lantern++")
        tiny.start(engine, 0)
        replay = backend.capture(engine.step, "step")
        assert isinstance(replay, GraphReplay)
        double.done.clear()
        replay()
        names = [line for line in double.done if line.startswith("range")]
        assert names == [f"range {n}" for n in ("step", "draft", "verify", "accept", "commit")]
        assert double.done.count("replay") == 5
        seconds = replay.time_phases()
    # The double's clock goes on by a quarter of a second at every event.
    assert seconds == dict.fromkeys(("step", "draft", "verify", "accept", "commit"), 0.25)


def test_what_a_graph_cannot_hold_is_named_with_its_line(opened: Opened) -> None:
    backend, double = opened
    value = torch.ones(1)

    def step() -> None:
        if len(double.graphs):  # warm-up may read, a capture may not
            value.item()

    with pytest.raises(BackendError) as caught:
        backend.capture(step, "step")
    text = str(caught.value)
    assert "as a CUDA graph on cuda:0: aten::_local_scalar_dense at" in text
    assert "test_graphs.py" in text
    assert "value.item()" in text
    assert "graph=off" in text
    # torch's allocator never ends that capture: nothing more is recorded, and its cache is left alone.
    assert double.poisoned
    with pytest.raises(NotCapturableError, match=r"an earlier capture failed .*not permitted"):
        backend.capture(lambda: value.add_(1), "step")
    backend.close()


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_driver_that_dies_within_a_capture_leaves_a_pipeline_that_draws(
    opened: Opened, count: torch.Tensor, at: int
) -> None:
    """One of eight captures fails: what was recorded before serves on, the rest runs eagerly."""
    backend, double = opened
    made: list[Replay] = []
    left: list[str] = []
    for number in range(8):
        double.refuses = "capture_end" if number == at else ""
        try:
            made.append(backend.capture(lambda: count.add_(1), f"step {number}"))
        except NotCapturableError as error:
            left.append(str(error))
            made.append(Replay(lambda: count.add_(1)))
    assert [one.captured for one in made] == [True] * at + [False] * (8 - at)
    assert f"the step {at} cannot be captured" in left[0]
    assert all("an earlier capture failed" in line for line in left[1:])
    assert not backend.support("capture")
    before = count.item()
    for one in made:
        one()
    assert count.item() == before + 8
    backend.close()


def test_a_failed_capture_draws_the_same_image_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    drawn = []
    for fails in (False, True):
        backend, double = doubled_backend(monkeypatch)
        captures = 0
        honest = double.graph

        def third(double: CudaDouble = double, honest: Any = honest, fails: bool = fails) -> Any:
            nonlocal captures
            captures += 1
            double.refuses = "capture_end" if fails and captures == 3 else ""
            return honest()

        monkeypatch.setattr(torch.cuda, "CUDAGraph", third)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", LanternWarning)
            found = find_model(folder)
            loaded = load_model(found, backend, dtype=torch.float32, device=backend.device)
            pipeline = Pipeline(loaded, backend, torch.float32)
            drawn.append(pipeline.generate(["red heart"], strategy="vanilla", seed=7).tokens)
            drawn.append(pipeline.generate(["red heart"], strategy="scd", seed=7).tokens)
        lines = [one for one in said if "cannot be captured" in str(one.message)]
        assert len(lines) == fails
        assert double.poisoned is fails
        backend.close()
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


def test_what_a_driver_keeps_of_a_graph_is_counted_and_another_process_is_not(
    opened: Opened, count: torch.Tensor
) -> None:
    backend, double = opened
    honest = Graph.capture_end

    def keeps(size: int) -> Any:
        def end(graph: Graph) -> None:
            honest(graph)
            double.free -= size

        return end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "capture_end", keeps(2**20))
        assert backend.capture(lambda: count.add_(1), "step").nbytes == 2**20
        patch.setattr(Graph, "capture_end", keeps(2**30))
        assert backend.capture(lambda: count.add_(1), "step").nbytes == 0


FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 24 GiB"


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (
            torch.OutOfMemoryError(FULL),
            DeviceMemoryError,
            "while .*Tried to allocate 2.50 GiB. GPU 0",
        ),
        (ValueError("a bug"), ValueError, "a bug"),
    ],
)
def test_what_a_step_raises_in_a_capture(
    opened: Opened, error: Exception, raised: type[Exception], says: str
) -> None:
    backend, double = opened
    double.free = 2**29

    def step() -> None:
        raise error

    with pytest.raises(raised, match=says):
        backend.capture(step, "step")
    assert double.capturing is None


def test_a_lost_card_says_what_is_lost_and_what_is_kept(
    opened: Opened, count: torch.Tensor
) -> None:
    backend, double = opened
    replay = backend.capture(lambda: count.add_(1), "step")
    double.lost = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronous"
    with pytest.raises(
        DeviceLostError, match=r"replaying the step \(CUDA error: unspecified"
    ) as told:
        replay()
    assert "what was returned or written before is kept" in str(told.value)
    with pytest.raises(DeviceLostError, match="while waiting for it"):
        backend.synchronize()
    backend.close()


def test_opening_again_takes_no_new_stream(opened: Opened, count: torch.Tensor) -> None:
    """cuBLAS keeps a workspace for every stream that a product ran on."""
    first, double = opened
    again = type(first)(0, first.options)
    again.device = first.device
    streams = []
    for backend in (first, again):
        backend.capture(lambda: count.add_(1), "step")
        for _ in range(2):  # all copies share one stream
            backend.host_copy(count).post()
        backend.close()
        streams.append({line.split(" waits")[0] for line in double.done if line[:4] == "side"})
    assert streams[0] == streams[1] and len(streams[0]) == 2


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_what_float32_means_is_pinned_while_a_gpu_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    short = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]

    def now() -> list[bool]:
        found = [getattr(products, name) for name in short]
        return [torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.allow_tf32, *found]

    monkeypatch.setattr("lantern_accel_cuda.settings._open", set())
    monkeypatch.setattr("lantern_accel_cuda.settings._back", ExitStack())
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for name in short:
        setattr(products, name, True)
    assert now() == [True] * 4
    one, other = (doubled_backend(monkeypatch)[0] for _ in range(2))
    for closed in (one, one, other):
        assert now() == [False] * 4
        closed.close()
    assert now() == [True] * 4


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_what_was_set_by_newer_names_is_pinned_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if not hasattr(cudnn, "conv"):
        pytest.skip("this torch has only the older names")
    monkeypatch.setattr("lantern_accel_cuda.settings._open", set())
    monkeypatch.setattr("lantern_accel_cuda.settings._back", ExitStack())
    cudnn.conv.fp32_precision = products.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            _ = products.allow_tf32
        backend, _double = doubled_backend(monkeypatch)
        assert (cudnn.allow_tf32, products.allow_tf32) == (False, False)
        backend.close()
        assert (cudnn.conv.fp32_precision, products.fp32_precision) == ("tf32", "tf32")
    finally:
        cudnn.allow_tf32, products.allow_tf32 = True, False
