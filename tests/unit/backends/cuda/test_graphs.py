"""Capturing and replaying, on a double of torch's CUDA API: the backend's own code, no GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import CudaDouble, Graph, doubled_backend
from support.few import small_kit, small_tree
from support.models import write_tiny_model

from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import Replay
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    LanternWarning,
    NotCapturableError,
)
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.models.bundle import load_model
from lantern_accel.models.locate import find_model
from lantern_accel.testing import kit, tiny
from lantern_accel_cuda.graphs import WARMUPS, GraphReplay

Opened = tuple[Backend, CudaDouble]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return doubled_backend(monkeypatch)


def pipeline_on(backend: Backend, folder: Path) -> Pipeline:
    loaded = load_model(find_model(folder), backend, dtype=torch.float32, device=backend.device)
    return Pipeline(loaded, backend, torch.float32)


def _counter() -> tuple[torch.Tensor, list[int]]:
    return torch.zeros(1), []


def test_a_step_is_warmed_up_on_a_side_stream_then_captured_then_only_replayed(
    opened: Opened,
) -> None:
    backend, double = opened
    count, calls = _counter()

    def step() -> None:
        calls.append(1)
        assert double.current.side
        count.add_(torch.ones(1))

    replay = backend.capture(step, "step")
    assert len(calls) == WARMUPS + 1
    assert count.item() == WARMUPS  # a capture does not run what it records
    assert replay.captured
    assert replay.seconds > 0
    order = [line for line in double.done if "capture" in line or "waits for" in line]
    assert order[:2] == ["side 0 waits for default", "default waits for side 0"]
    assert order[-2:] == ["capture_begin thread_local", "capture_end"]
    for _ in range(5):
        replay()
    assert count.item() == WARMUPS + 5
    assert len(calls) == WARMUPS + 1
    assert double.current.name == "default"


def test_all_captures_share_a_stream_and_a_pool_until_none_is_left(opened: Opened) -> None:
    backend, double = opened
    count, _ = _counter()

    def step() -> None:
        count.add_(torch.ones(64))[0]

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
    assert backend._recorder.live == 3
    for replay in (first, second, third):
        replay.release()
        replay.release()
    assert double.done.count("reset") == 3
    assert backend._recorder.live == 0
    with pytest.raises(BackendError, match="was released; capture the step again"):
        first()
    backend.capture(wide, "step")
    assert double.graphs[-1].pool() == ("pool", 2)


def test_closing_releases_every_recording(opened: Opened) -> None:
    backend, double = opened
    count, _ = _counter()
    replays = [backend.capture(lambda: count.add_(1), "step") for _ in range(2)]
    with backend:
        pass
    assert all(graph.was_reset for graph in double.graphs)
    backend.close()
    with pytest.raises(BackendError, match="was released"):
        replays[0]()


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
    reference = Plain(torch.device("cpu"))
    with torch.inference_mode():
        for strategy in ("vanilla", "eagle2", "lantern++"):
            tokens = []
            for ops in (backend, reference):
                engine = tiny.tiny_engine(ops, strategy, batch=2)
                capacity = engine.verifying.cache.layout.capacity
                assert (capacity % 8 == 0) == (ops is backend)
                tiny.start(engine, 3)
                tokens.append(engine.run().tokens)
            assert torch.equal(*tokens)


class Plain(Backend):
    name, version = "plain", "1"

    def facts(self):  # never asked
        raise NotImplementedError

    def synchronize(self) -> None:
        pass


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
        seconds = replay.timed()
    # The double's clock goes on by a quarter of a second at every event.
    assert seconds == dict.fromkeys(("step", "draft", "verify", "accept", "commit"), 0.25)


def test_one_graph_keeps_no_phases_apart(opened: Opened) -> None:
    backend, _ = opened
    count, _ = _counter()
    assert backend.capture(lambda: count.add_(1), "step").timed() is None


def test_what_a_graph_cannot_hold_is_named_with_its_line(opened: Opened) -> None:
    backend, double = opened
    value = torch.ones(1)

    def step() -> None:
        if len(double.graphs):  # warm-up may read, a capture may not
            value.item()

    with pytest.raises(BackendError) as caught:
        backend.capture(step, "step")
    text = str(caught.value)
    assert "the step cannot be captured as a CUDA graph: aten::_local_scalar_dense at" in text
    assert "test_graphs.py" in text
    assert "value.item()" in text
    assert "graph=off" in text
    # torch's allocator never ends that capture: nothing more is recorded, and its cache is left alone.
    assert double.poisoned
    with pytest.raises(NotCapturableError, match=r"an earlier capture failed .*not permitted"):
        backend.capture(lambda: value.add_(1), "step")
    backend.close()


@pytest.mark.parametrize("at", range(8))
def test_a_driver_that_dies_within_a_capture_leaves_a_pipeline_that_draws(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """One of eight captures fails: what was recorded before serves on, the rest runs eagerly."""
    backend, double = doubled_backend(monkeypatch)
    count = torch.zeros(1)
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
    assert f"capturing the step {at} failed" in left[0]
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
            pipeline = pipeline_on(backend, folder)
            drawn.append(pipeline.generate(["red heart"], strategy="vanilla", seed=7).tokens)
            drawn.append(pipeline.generate(["red heart"], strategy="scd", seed=7).tokens)
        lines = [one for one in said if "cannot be captured" in str(one.message)]
        assert len(lines) == fails
        assert double.poisoned is fails
        backend.close()
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


def test_what_a_driver_keeps_of_a_graph_is_counted_and_another_process_is_not(
    opened: Opened,
) -> None:
    backend, double = opened
    count, _ = _counter()
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


def test_out_of_memory_in_a_capture_says_what_was_asked_and_what_is_free(opened: Opened) -> None:
    backend, double = opened
    double.free = 2**29

    def step() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 24 GiB"
        )

    with pytest.raises(BackendError) as caught:
        backend.capture(step, "step")
    text = str(caught.value)
    assert "ran out of memory while capturing the step: it asked for 2.50 GiB" in text
    assert "0.50 of 24.00 GiB are free; choose a smaller batch" in text
    assert double.capturing is None


def test_a_bug_in_a_step_stays_what_it_is(opened: Opened) -> None:
    backend, _ = opened

    def step() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        backend.capture(step, "step")


def test_a_lost_card_says_what_is_lost_and_what_is_kept(opened: Opened) -> None:
    backend, double = opened
    count, _ = _counter()
    replay = backend.capture(lambda: count.add_(1), "step")
    double.lost = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronous"
    with pytest.raises(DeviceLostError) as caught:
        replay()
    text = str(caught.value)
    assert "stopped working while replaying the step (CUDA error: unspecified launch" in text
    assert "the batch in progress is lost, what was returned or written before is kept" in text
    with pytest.raises(DeviceLostError, match="while waiting for it"):
        backend.synchronize()
    backend.close()


@pytest.mark.long
def test_dynamo_makes_one_graph_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    small_tree(monkeypatch)
    with torch.inference_mode():
        for strategy in ("lantern++", "eagle2"):
            engine = tiny.tiny_engine(backend, strategy)
            torch._dynamo.reset()
            found = torch._dynamo.explain(engine.step)()
            assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_opening_again_takes_no_new_stream(opened: Opened) -> None:
    """cuBLAS keeps a workspace for every stream that a product ran on."""
    backend, double = opened
    count, _ = _counter()
    backend.capture(lambda: count.add_(1), "step")
    backend.host_copy(count).post()
    backend.close()
    streams = {line.split(" waits")[0] for line in double.done if line.startswith("side")}
    again = type(backend)(0, backend.options)
    again.device = backend.device
    again.capture(lambda: count.add_(1), "step")
    again.host_copy(count).post()
    assert {line.split(" waits")[0] for line in double.done if line.startswith("side")} == streams
    again.close()


def test_memory_is_asked_back_once_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    count = torch.zeros(1)
    for name in ("prefill", "step", "step"):
        backend.capture(lambda: count.add_(1), name)
    assert double.done.count("empty_cache") == 1


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_what_float32_means_is_pinned_while_a_gpu_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul

    def now() -> tuple[bool, ...]:
        return (
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cudnn.allow_tf32,
            products.allow_bf16_reduced_precision_reduction,
            products.allow_fp16_reduced_precision_reduction,
        )

    monkeypatch.setattr("lantern_accel_cuda.settings._depth", [])
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    products.allow_bf16_reduced_precision_reduction = True
    products.allow_fp16_reduced_precision_reduction = True
    before = now()
    assert before == (True,) * 4
    backend, _ = doubled_backend(monkeypatch)
    other, _ = doubled_backend(monkeypatch)
    assert now() == (False,) * 4
    backend.close()
    backend.close()
    assert now() == (False,) * 4
    other.close()
    assert now() == before


@pytest.mark.filterwarnings("ignore:Please use the new API")
def test_what_was_set_by_newer_names_is_pinned_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if not hasattr(cudnn, "conv"):
        pytest.skip("this torch has only the older names")
    monkeypatch.setattr("lantern_accel_cuda.settings._depth", [])
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
