"""A stopwatch that does not wait for its device is caught before anything is measured with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from lantern_accel.device.backend import Backend, DeviceFacts, Stopwatch
from lantern_accel.errors import BackendError
from lantern_accel_profiles.measure import ceilings
from lantern_accel_profiles.measure.ceilings import check_stopwatch


class Asynchronous(Backend):
    """A device that works in a thread of its own: launching returns at once."""

    name, version = "later", "1"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None

    def facts(self) -> DeviceFacts:
        return DeviceFacts(backend="later", device="cpu", name="later", torch="2")

    def launch(self, seconds: float) -> None:
        self.last = self.queue.submit(time.sleep, seconds)

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.result()

    def close(self) -> None:
        self.queue.shutdown()


class Result:
    """What a launch gives: reading it waits for the device."""

    def __init__(self, device: Asynchronous) -> None:
        self.device = device

    def flatten(self) -> Result:
        return self

    def __getitem__(self, index: slice) -> Result:
        return self

    def cpu(self) -> torch.Tensor:
        if self.device.last is not None:
            self.device.last.result()
        return torch.zeros(1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asynchronous]:
    monkeypatch.setattr(ceilings, "STOPWATCH_WORK", 0.02)
    with Asynchronous() as opened:
        assert isinstance(opened, Asynchronous)
        yield opened


def work(device: Asynchronous) -> Callable[[int], Callable[[], torch.Tensor]]:
    def make(count: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            device.launch(0.005 * count)
            return Result(device)  # type: ignore[return-value]

        return run

    return make


def test_a_stopwatch_that_waits_is_right(device: Asynchronous) -> None:
    found = check_stopwatch(device, work(device))
    assert found.ratio == pytest.approx(1, abs=0.2)
    assert found.stopwatch == Stopwatch.name


class Milliseconds(Stopwatch):
    name = "events"

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.seconds *= 1000


@pytest.mark.parametrize(
    ("name", "wrong", "fragment"),
    [
        ("stopwatch", lambda device: Stopwatch(lambda: None), r"reads 0\.\d\d of the time"),
        ("stopwatch", lambda device: Milliseconds(device.synchronize), r"\(events\) reads \d{3,4}\."),
        ("synchronize", lambda device: None, "does not measure the device"),
    ],
    ids=["does not wait", "other units", "synchronize does nothing"],
)  # fmt: skip
def test_a_stopwatch_that_is_wrong_is_caught(
    device: Asynchronous,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wrong: Callable[[Asynchronous], Stopwatch | None],
    fragment: str,
) -> None:
    monkeypatch.setattr(device, name, lambda: wrong(device))
    with pytest.raises(BackendError, match=fragment):
        check_stopwatch(device, work(device))


def test_the_host_itself_passes() -> None:
    from lantern_accel.device.plugins import open_backend

    with open_backend("cpu") as backend:
        for attempt in range(3):  # the machine may be busy
            try:
                assert check_stopwatch(backend).work_seconds > 0
                return
            except BackendError:
                if attempt == 2:
                    raise


def test_what_else_runs_on_the_machine_fails_no_right_stopwatch(device: Asynchronous) -> None:
    calls = 0

    def make(count: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            nonlocal calls
            calls += 1
            device.launch(0.02 * (3 if calls % 2 else 1))  # every other piece is held up
            return Result(device)  # type: ignore[return-value]

        return run

    assert check_stopwatch(device, make).ratio == pytest.approx(1, abs=0.1)
