"""The backend interface's reference behaviour, on the CPU and on the null device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lantern_accel.device.backend import (
    CAPABILITIES,
    Backend,
    DeviceFacts,
    DTypePolicy,
    Stopwatch,
    dtype_policy,
)
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError


class Plain(Backend):
    """A backend that writes only what it must."""

    name, version = "plain", "1.0"

    def facts(self) -> DeviceFacts:
        return DeviceFacts(backend=self.name, device=str(self.device), name="plain", torch="?")

    def synchronize(self) -> None:
        pass


@pytest.fixture
def plain() -> Plain:
    return Plain(torch.device("cpu"))


@pytest.fixture(params=["cpu", "null"])
def opened(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_backend(request.param) as backend:
        yield backend


def test_two_methods_are_enough(plain: Plain) -> None:
    assert Backend.__abstractmethods__ == {"facts", "synchronize"}
    assert plain.memory().in_use is None
    assert plain.energy_mj() is None
    assert plain.counters() == {}
    assert plain.facts().memory_bytes is None
    assert {name for name in CAPABILITIES if plain.support(name)} == {"float32"}


def test_every_no_has_a_reason(plain: Plain, opened: Backend) -> None:
    for backend in (plain, opened):
        for name in CAPABILITIES:
            answer = backend.support(name)
            assert bool(answer) == (answer.reason == "")


def test_an_unknown_capability_is_an_error(plain: Plain) -> None:
    with pytest.raises(BackendError, match="'captures'; did you mean capture"):
        plain.support("captures")


def test_dtypes_are_chosen_or_refused(plain: Plain) -> None:
    assert dtype_policy(plain) == DTypePolicy(compute=torch.float32)
    with pytest.raises(BackendError, match="does not compute in bfloat16; use auto or one of: fl"):
        dtype_policy(plain, "bfloat16")
    with pytest.raises(BackendError, match="no dtype is named 'float31'; did you mean float32"):
        dtype_policy(plain, "float31")


def test_a_dtype_that_is_asked_for_holds_for_all_operators(opened: Backend) -> None:
    policy = dtype_policy(opened, "bfloat16")
    assert policy.compute == torch.bfloat16 and policy.operators is None


def test_a_replay_runs_the_step_on_its_buffers(plain: Plain) -> None:
    counter = torch.zeros(1)

    def step() -> None:
        counter.add_(1)

    replay = plain.capture(step)
    counter.zero_()  # capturing may have run the step
    replay()
    replay()
    assert counter.item() == 2
    assert not replay.captured
    assert replay.nbytes == 0
    replay.release()
    replay.release()
    with pytest.raises(BackendError, match="was released; capture the step again"):
        replay()


def test_a_stopwatch_waits_for_the_device_before_and_after() -> None:
    events: list[str] = []
    with Stopwatch(lambda: events.append("sync")) as watch:
        events.append("work")
        time.sleep(0.01)
    assert events == ["sync", "work", "sync"]
    assert 0.01 <= watch.seconds < 5


def test_facts_of_an_opened_device(opened: Backend) -> None:
    facts = opened.facts()
    assert facts.backend == opened.name
    assert facts.torch == torch.__version__
    assert torch.zeros(1, device=opened.device).device == opened.device


def test_the_reference_cache_works_where_there_is_data_and_where_there_is_none(
    opened: Backend,
) -> None:
    layout = opened.kv_layout(2, 3, 8, 4, 16, torch.float32)
    cache = opened.allocate(layout)
    assert sum(buffer.nbytes for buffer in cache.buffers) == layout.nbytes
    slots = torch.zeros(3, 2, dtype=torch.int64, device=opened.device)
    k = torch.ones(3, 2, 4, 16, device=opened.device)
    opened.write(cache, 0, opened.address(cache, slots), k, k)
    assert all(buffer.shape == layout.shape for buffer in cache.buffers)


def test_cpu_knows_its_machine() -> None:
    with open_backend("cpu") as backend:
        facts = backend.facts()
        assert facts.name
        assert facts.memory_bytes is None or facts.memory_bytes > 2**28
        assert facts.threads == torch.get_num_threads()
        assert dtype_policy(backend, "float32").compute == torch.float32
        backend.memory(new_peak=True)


def test_cpu_threads_are_an_option_until_it_is_closed() -> None:
    before = torch.get_num_threads()
    with open_backend("cpu", {"threads": 1}) as backend:
        assert backend.facts().threads == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [0, -1, 10**6, "many", "1.5", object()])
def test_cpu_refuses_threads_out_of_range(threads: object) -> None:
    with pytest.raises(BackendError, match=r"'cpu' got threads=.*; give a number from 1 to"):
        open_backend("cpu", {"threads": threads})
