"""Both runners on the recording double: one graph a bucket, nothing after warm-up, faults named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.few import small_tree
from support.gaudi import Gaudi, compiling, on_cpu
from torch._dynamo.exc import TorchDynamoException

from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, DeviceLostError, LanternWarning, NotCapturableError
from lantern_accel.testing import tiny
from lantern_accel_hpu import bridge
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge
from lantern_accel_hpu.graphs import Compiled, Warmed
from lantern_accel_hpu.layers import Layered

OPTIONS = {"use_inplace_index_copy": False}
Open = Callable[..., tuple[DeviceBackend, Gaudi]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open the real backend on a double, in a mode, computing on the CPU."""

    def make(mode: str) -> tuple[DeviceBackend, Gaudi]:
        hpu = Gaudi(lazy=mode == "graph")
        # What the real bridge's modules would say; the flush is logged, as a step mark would be sent.
        monkeypatch.setattr(Bridge, "flush", lambda self: hpu.log.append("flush"))
        monkeypatch.setattr(
            Bridge, "allocate_pinned", lambda self, *of: torch.empty(of[0], dtype=of[1])
        )
        monkeypatch.setattr(Bridge, "compile_options", lambda self: OPTIONS)
        monkeypatch.setattr(torch, "compile", compiling(hpu))
        return on_cpu(DeviceBackend(Bridge(hpu), mode)), hpu

    return make


def adding(buffer: torch.Tensor) -> Callable[[], None]:
    """Return a step that adds 1 to a buffer."""

    def step() -> None:
        buffer.add_(1)

    return step


def _captured(backend: Backend, batch: int, strategy: str = "lantern++") -> tuple[Any, Any, Any]:
    engine = tiny.tiny_engine(backend, strategy, batch=batch)
    tiny.load(engine, 0)
    prefill = backend.capture(engine.prefill, "prefill")
    return engine, prefill, backend.capture(engine.step, "step")


def _reference(batch: int, seed: int) -> torch.Tensor:
    with open_backend("cpu") as cpu:
        engine = tiny.tiny_engine(cpu, "lantern++", batch=batch)
        tiny.start(engine, seed)
        return engine.run().tokens


@torch.inference_mode()
def test_steps_of_different_content_are_one_graph_a_bucket(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long tests ask the same of compiled steps, on the software HPU."""
    backend, hpu = opened("graph")
    small_tree(monkeypatch)
    buckets = {batch: _captured(backend, batch) for batch in (1, 2)}
    # The step of each bucket; lazy mode does not capture prefill.
    assert hpu.log.count("capture_begin") == backend.counters()["buckets.graphs"] == 2
    assert backend.counters()["buckets.step"] == backend.counters()["buckets.prefill"] == 2
    before = hpu.counted["graph_compilation"].stats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch, (engine, prefill, step) in buckets.items():
            for index in range(12 // batch):
                if index % 5 == 0:
                    tiny.start(engine, index, prefill)
                step()
            assert step.captured
            # What the runner computes is what the CPU computes.
            tiny.start(engine, 3, prefill)
            assert torch.equal(engine.run(step).tokens, _reference(batch, 3))
    assert hpu.counted["graph_compilation"].stats() == before
    assert hpu.log.count("capture_begin") == 2
    assert not [name for name in backend.counters() if name.startswith("late.")]


def test_every_capture_is_a_graph_of_its_own_however_many_there_are(opened: Open) -> None:
    """torch.compile gives up at the eighth graph of one function; it is asked as the bridge needs it."""
    backend, hpu = opened("compile")

    buffers = [torch.full((2,), n) for n in range(12)]
    replays = [backend.capture(adding(one), "step") for one in buffers]
    before = [one.clone() for one in buffers]
    for replay in replays:
        replay()
    assert all(torch.equal(now, was + 1) for now, was in zip(buffers, before, strict=True))
    assert backend.counters()["buckets.graphs"] == 12 == hpu.log.count("compile")
    asked = {"backend": "hpu_backend", "fullgraph": True, "dynamic": False, "options": OPTIONS}
    assert hpu.compile_calls == [asked] * 12


def test_prefill_runs_lazily_because_it_updates_parts_of_buffers(opened: Open) -> None:
    backend, hpu = opened("graph")
    replay = backend.capture(lambda: None, "prefill")
    assert not replay.captured
    assert "capture_begin" not in hpu.log
    hpu.log.clear()
    replay()
    assert hpu.log == ["flush", "flush"]


def test_captures_wait_for_each_other(opened: Open) -> None:
    backend, hpu = opened("graph")
    held = {}  # by whether a capture is under way

    def step() -> None:
        held[hpu.capturing_graph is not None] = bridge._CAPTURE.locked()

    backend.capture(step, "step")
    assert held == {False: False, True: True} and not bridge._CAPTURE.locked()


def test_a_fall_back_in_a_capture_names_the_operator_and_the_way_out(opened: Open) -> None:
    backend, hpu = opened("graph")
    falls = ["outside", "inside"]

    def step() -> None:
        if ("outside", "inside")[hpu.capturing_graph is not None] in falls:
            hpu.fall_back("aten::sort")

    with pytest.raises(
        BackendError,
        match=r"no graph can be made of the step \(aten::sort has no HPU kernel",
    ):
        backend.capture(step, "step")
    assert "capture_begin" not in hpu.log
    # One that only the capture sees: its bridge says what happened, and the counter which operator.
    # Lazy mode cannot leave a capture that failed, so that nothing may serve in its place.
    falls.remove("outside")
    with pytest.raises(
        BackendError, match=r"aten::sort has no HPU .* a new process .*mode=eager"
    ) as told:
        backend.capture(step, "step")
    assert not isinstance(told.value, NotCapturableError)
    assert hpu.capturing_graph is None and "reset" in hpu.log
    falls.clear()
    replay = backend.capture(step, "step")
    assert replay.captured and replay._graph._stream is hpu.first_stream


def test_graphs_are_refused_where_the_bridge_has_none() -> None:
    def newer() -> None:  # 1.24 has the name in every mode
        raise RuntimeError("HPUGraph class is available in lazy mode only.")

    without, named = Gaudi(), Gaudi()
    named.HPUGraph = newer
    for hpu in (without, named):
        with pytest.raises(BackendError, match="no HPUGraph, which only lazy mode has; use the mo"):
            DeviceBackend(Bridge(hpu), "graph")


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_what_compiles_or_falls_back_after_warm_up_is_reported_once(
    opened: Open, mode: str
) -> None:
    backend, hpu = opened(mode)
    again = [False]
    compile_ = hpu.compile_operator if mode == "eager" else hpu.compile
    counter = "recipe_cache.TotalMiss" if mode == "eager" else "graph_compilation.TotalNumber"

    def step() -> None:
        if torch.compiler.is_compiling():
            return
        if again[0]:
            compile_(2)
            hpu.fall_back("aten::sort.stable")

    replay = backend.capture(step, "step")
    replay()
    assert not [name for name in backend.counters() if name.startswith("late.")]
    again[0] = True
    if mode == "compile":  # a compiled step runs no Python: the fault comes from outside
        replay._compiled = step  # type: ignore[attr-defined]
    says = (
        r"the step was warmed up, and yet this run raised .*cpu_fallback.TotalNumber by 1.* "
        r"\(aten::sort.stable ran on the CPU\)"
    )
    with pytest.warns(LanternWarning, match=says) as caught:
        for _ in range(3):
            replay()
            backend.synchronize()
    assert len(caught) == 1
    assert f"{counter} by 2" in str(caught[0].message)
    counters = backend.counters()
    assert counters[f"late.{counter}"] == 6
    assert counters["cpu_fallback.aten::sort.stable"] == 3


def test_what_compiles_behind_the_hosts_back_is_seen_when_the_device_was_waited_for(
    opened: Open,
) -> None:
    """Right after a launch the counters say nothing yet; what the host does between is no step's."""
    backend, hpu = opened("eager")
    source = torch.zeros(1)
    progress = backend.host_copy(source)
    replay = backend.capture(lambda: None, "step")
    hpu.compile_operator()  # loading a request, say
    replay()
    hpu.later(lambda: hpu.compile_operator(2))
    progress.post()
    with pytest.warns(LanternWarning, match=r"the step was .* recipe_cache.TotalMiss by 2:"):
        progress.read()
    hpu.compile_operator()  # decoding pixels, say
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay()
        assert backend.counters()["late.recipe_cache.TotalMiss"] == 2
        assert backend.counters()["between.recipe_cache.TotalMiss"] == 1
        backend.capture(lambda: hpu.compile_operator(), "other")  # which is not between steps
        replay()
        assert backend.counters()["between.recipe_cache.TotalMiss"] == 1


LATE = "Graph compile failed. synStatus=synStatus 26 [Generic failure]."
#: What a compiler says of a step, which is what the user reads.
SAID = (
    RuntimeError(LATE),
    RuntimeError("aten::view.dtype isn't registered in KernelRegistry!"),
    TorchDynamoException("Eager fallback in nodes: ['sort:torch.ops.aten.sort.stable']"),
)


@pytest.mark.parametrize("mode", ["compile", "graph"])
@pytest.mark.parametrize("error", SAID, ids=["refused", "no lowering", "left"])
def test_a_step_that_the_compiler_refuses_runs_eagerly_and_says_what_that_costs(
    opened: Open, mode: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = opened(mode)
    told = rf"no graph can be made of the step \({type(error).__name__}: {re.escape(str(error))}\)"

    def refuse(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "compile", lambda *of, **options: refuse)
    real = Warmed._run
    monkeypatch.setattr(Warmed, "_run", refuse)
    if mode == "graph":  # which has no layers
        monkeypatch.setattr("lantern_accel_hpu.backend.Layered", None)
    with pytest.raises(NotCapturableError, match=rf"^SLOW: every call of the step.*reason: {told}"):
        backend.capture(lambda: None, "step")
    backend.capture_asked = True  # then it is an error, in the compiler's words
    with pytest.raises(NotCapturableError, match=f"^{told}"):
        backend.capture(lambda: None, "step")
    monkeypatch.setattr(Warmed, "_run", real)
    assert not backend.counters().get("buckets.step")


@pytest.mark.parametrize("name", ["prefill", "step"])
@pytest.mark.parametrize("errors", [1, 2, 4])
def test_errors_that_come_late_are_a_refusal_and_are_all_taken(
    opened: Open, name: str, errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that compile and launch keep an error each, until the device is waited for."""
    backend, hpu = opened("compile")
    met = []  # by what is given to the device: the graph itself, and what runs in its place

    def launch() -> None:
        met.append(len(hpu.errors))
        hpu.errors = [RuntimeError(LATE)] * errors

    monkeypatch.setattr(torch, "compile", lambda *of, **options: launch)
    with pytest.raises(NotCapturableError, match="Graph compile failed"):
        backend.capture(lambda: met.append(len(hpu.errors)), name)
    assert not hpu.errors and len(met) > 1 and not any(met)


@pytest.mark.parametrize("errors", [1, 2, 4])
def test_late_errors_of_a_part_of_a_step_are_all_taken(
    opened: Open, errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a refused step that fails late runs as it is, then and later."""
    backend, hpu = opened("compile")
    seen: list[int] = []

    def part(value: int) -> int:
        seen.append(len(hpu.errors))
        return value + 1

    def launch(*given: Any) -> int:
        hpu.errors = [RuntimeError(LATE)] * errors
        return 0

    monkeypatch.setattr("lantern_accel_hpu.layers.compile_step", lambda *of: launch)
    step = SimpleNamespace(_parts={}, _bridge=backend.bridge)
    assert Layered._first(step, part, (6,)) == 7  # type: ignore[arg-type]  # what it reads of a step
    assert seen == [0] and not hpu.errors and step._parts == {part: part}


def test_an_error_that_comes_late_is_what_it_says(opened: Open) -> None:
    backend, hpu = opened("compile")
    # A lost card is no refusal, in whichever thread it was seen.
    with pytest.MonkeyPatch.context() as patch:
        lost = RuntimeError("synStatus=17 [Device reset]")
        patch.setattr(Compiled, "_run", lambda self: hpu.errors.extend([RuntimeError(LATE), lost]))
        with pytest.raises(DeviceLostError):
            backend.capture(lambda: None, "step")
    # What earlier work lost is not this function's, which would run on what is not there.
    hpu.errors = [RuntimeError(LATE)]
    with pytest.raises(BackendError, match="compiler refused a graph") as told:
        backend.capture(lambda: None, "step")
    assert not isinstance(told.value, NotCapturableError)
    # A request's error takes those with it that would meet the next request.
    hpu.errors = [RuntimeError(LATE), RuntimeError(LATE)]
    assert "while decoding" in str(backend.explain(RuntimeError("synStatus 26 launch")))
    assert not hpu.errors
    hpu.errors = [RuntimeError(LATE), lost]
    assert isinstance(backend.explain(RuntimeError(LATE)), DeviceLostError)
    # A device that goes on failing is not waited for without end.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hpu, "synchronize", lambda: (_ for _ in ()).throw(RuntimeError(LATE)))
        assert len(backend.bridge.drain()) == 5


@torch.inference_mode()
def test_a_request_is_loaded_and_read_without_a_recipe_of_its_own(opened: Open) -> None:
    backend, hpu = opened("eager")
    engine, prefill, step = _captured(backend, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.start(engine, 1, prefill)
        hpu.log.clear()
        engine.run(step, on_progress=lambda count: None)
    # Steps run without a look at the counters, and the host waits for events alone.
    assert "synchronize" not in hpu.log
    assert hpu.log.count("event.synchronize") >= 1


def test_warm_up_goes_on_until_a_run_compiles_nothing(opened: Open) -> None:
    backend, hpu = opened("eager")
    runs = []

    def step() -> None:
        runs.append(1)
        if len(runs) < 3:
            hpu.compile_operator()

    replay = backend.capture(step, "step")
    assert len(runs) == 3
    assert replay.seconds > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay()


def test_a_step_that_torch_cannot_compile_names_the_mode_that_runs_it(opened: Open) -> None:
    backend, _ = opened("compile")
    total = torch.zeros(1)

    def step() -> None:
        if total.item() > 0:  # a host read: the graph would break here
            total.add_(1)

    with pytest.raises(BackendError, match=r"no graph can be made of the step .*mode 'eager'"):
        backend.capture(step, "step")


def test_no_memory_for_a_capture_is_an_error_with_figures(opened: Open) -> None:
    backend, hpu = opened("graph")
    hpu.in_use = hpu.limit - 2**28

    def step() -> None:
        raise RuntimeError("Allocation failed for size::4294967296 (4096)MB")

    says = r"ran out of memory while running the step \(.* \(4096\)MB\): 0.25 GiB of 94.00 GiB"
    with pytest.raises(BackendError, match=says):
        backend.capture(step, "step")


def test_a_part_of_a_layered_step_leaves_the_rest_to_layers(opened: Open) -> None:
    backend, _ = opened("compile")
    with backend._layers.region(max):
        with backend._layers.region(None):
            assert backend.region is None
        assert backend.region is max
    assert backend.region is None
