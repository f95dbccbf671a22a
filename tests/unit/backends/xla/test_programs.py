"""Replaying a traced program, on a double of torch_xla's runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.xla_double import Double
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.errors import BackendError
from lantern_accel.testing import tiny
from lantern_accel_xla.backend import DeviceBackend
from lantern_accel_xla.options import Options
from lantern_accel_xla.programs import Program, Traced


def device(mode: str = "program") -> tuple[DeviceBackend, Double]:
    runtime = Double()
    return DeviceBackend(runtime, Options(mode)), runtime


def add(state: torch.Tensor, value: float) -> None:
    state.add_(value)


def captured(backend: DeviceBackend, runtime: Double, step: Callable[[], None]) -> Program:
    runtime.step = step
    replay = backend.capture(step, "step")
    assert isinstance(replay, Program)
    return replay


def test_a_program_is_compiled_once_and_gives_what_the_step_gives():
    backend, runtime = device()
    state, weight, length = torch.zeros(3), torch.arange(3.0), torch.zeros(1)
    copy = backend.host_copy(length)

    def step() -> None:
        state.add_(weight)
        length.add_(1)

    replay = captured(backend, runtime, step)
    assert (replay.captured, replay.how, replay.tracing()) == (True, "compiled", None)
    # The length may be on its way to the host, so that its memory is not given away.
    assert replay.donors == {id(state)}
    assert {id(one) for one in replay.changed} == {id(state), id(length)}
    state.zero_()
    length.zero_()
    for count in (1, 2, 3):
        replay()
        assert torch.equal(state, count * weight) and int(length) == count
        copy.post()
    assert runtime.counts["compilations"] == 1
    assert [int(copy.read()) for _ in range(3)] == [1, 2, 3]
    replay.release()
    with pytest.raises(BackendError, match="was released"):
        replay()


def test_a_buffer_that_a_captured_step_writes_is_copied_at_every_post(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, runtime = device()
    state = torch.zeros(3)
    replay = captured(backend, runtime, lambda: add(state, 1.0))
    assert replay.donors == {id(state)}
    posted: list[torch.Tensor] = []
    taken = runtime.data
    monkeypatch.setattr(runtime, "data", lambda given: posted.extend(given) or taken(given))
    copy = backend.host_copy(state)
    replay()
    copy.post()
    assert posted[0] is not state and torch.equal(copy.read(), state)


def test_a_request_that_was_loaded_lazily_is_launched_before_the_program():
    backend, runtime = device()
    state = torch.zeros(2)
    replay = captured(backend, runtime, lambda: add(state, 1))
    before = runtime.synced
    replay()
    assert runtime.synced == before
    runtime._changed = {id(state)}
    replay()
    assert runtime.synced == before + 1


@pytest.mark.parametrize("mode", ["program", "lazy"])
def test_a_host_read_is_refused_with_the_check_that_names_it(mode):
    backend, runtime = device(mode)
    state = torch.zeros(2)
    runtime.step = lambda: add(state, float(state.sum()))
    with pytest.raises(BackendError, match=r"needs a value on the host.*conform xla --only static"):
        backend.capture(runtime.step, "step")


@pytest.mark.parametrize("mode", ["program", "lazy"])
def test_a_step_that_is_another_program_each_time_is_refused(mode):
    backend, runtime = device(mode)
    state, times = torch.zeros(2), [0]

    def step() -> None:
        times[0] += 1
        state.add_(1.5 * times[0])

    runtime.step = step
    with pytest.raises(BackendError, match=r"(another|second) program"):
        replay = backend.capture(step, "step")
        replay()


def test_a_traced_step_says_what_tracing_costs():
    backend, _ = device("lazy")
    state = torch.zeros(2)
    replay = backend.capture(lambda: add(state, 1), "step")
    assert isinstance(replay, Traced)
    assert (replay.how, replay.tracing()) == ("traced", None)
    replay()
    assert (replay.tracing() or 0) > 0
    assert backend.support("capture").how == "traced"


def test_an_uncaptured_step_is_launched_where_it_ends_and_a_captured_one_never():
    backend, runtime = device("eager")
    with backend.inference():
        engine = tiny.tiny_engine(backend, "eagle")
        tiny.start(engine, 0)
        before = runtime.synced
        engine.step()
        assert runtime.synced == before + 2  # what came before it, and the step
        with backend.capturing():
            engine.step()
        assert runtime.synced == before + 2
    assert not backend.support("capture")


def test_images_are_those_of_the_cpu():
    backend, _ = device("eager")
    with backend.inference():
        got = tiny.tiny_engine(backend, "lantern++")
        tiny.start(got, 3)
        tokens = got.run().tokens
    from lantern_accel.device.plugins import open_backend

    with open_backend("cpu") as cpu, cpu.inference():
        want = tiny.tiny_engine(cpu, "lantern++")
        tiny.start(want, 3)
        assert torch.equal(tokens, want.run().tokens)


class Copied(TorchDispatchMode):
    """Notes what is copied as it is: torch_xla lets both have one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.pairs.append(args[:2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["eagle2", "scd", "self"])
def test_no_two_buffers_that_a_step_changes_share_memory(strategy):
    """The next write to one would give away the memory of the other."""
    backend, _ = device("eager")
    with backend.inference():
        engine = tiny.tiny_engine(backend, strategy)
        tiny.start(engine, 0)
        with Copied() as copied:
            engine.step()
    names = {id(one): name for name, one in engine.changes.items()}
    pairs = [tuple(names.get(id(one)) for one in pair) for pair in copied.pairs]
    assert copied.pairs and not [pair for pair in pairs if all(pair)]


def test_an_operator_that_torch_xla_does_not_lower_is_refused():
    backend, _ = device()
    rule = backend.conformance().rules["operators"]
    assert "on the host" in rule(torch.ops.aten.searchsorted.Tensor, (), {})
    assert rule(torch.ops.prim.device.default, (), {}) == ""  # a question, and no operator
    assert rule(torch.ops.aten.zeros_like.default, (), {}) == ""
