"""Counters of the last programs: launches that may run at once share none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuda_double import doubled_backend

from lantern_accel_cuda.kernels import counters
from lantern_accel_cuda.kernels.counters import LEAST, Counters, counters_of, recording

CPU = torch.device("cpu")


def test_counters_are_zeros_that_keep_their_address_while_they_are_enough() -> None:
    own = Counters()
    first = own.of(CPU, 3)
    assert len(first) == LEAST and first.dtype == torch.int32 and not bool(first.any())
    assert own.of(CPU, LEAST) is first
    more = own.of(CPU, LEAST + 1)
    assert len(more) == LEAST + 1 and own.of(CPU, 3) is more
    assert first.data_ptr() != more.data_ptr()  # a recorded step may still have the first ones


def test_each_stream_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    card, now = torch.device("cuda", 0), [7]

    def stream(device: object) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=now[0])

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(counters, "_streams", {})
    monkeypatch.setattr(Counters, "of", lambda self, device, count: self)
    one: Any = counters_of(card, 1)
    assert counters_of(card, 9) is one
    now[0] = 8
    assert counters_of(card, 1) is not one
    with recording(Counters()):
        assert counters_of(card, 1) not in counters._streams.values()


def test_each_backend_s_recordings_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def step() -> None:
        seen.append(counters_of(CPU, 1))

    def different(which: list[torch.Tensor]) -> int:
        return len({one.data_ptr() for one in which})

    backends = [doubled_backend(monkeypatch)[0] for _ in range(2)]
    for backend in backends:
        for name in ("prefill", "step"):  # replays of one backend run one after another
            backend.capture(step, name)
    half = len(seen) // 2
    assert different(seen[:half]) == different(seen[half:]) == 1
    step()
    assert different(seen) == 3
    backends[0].close()
    backends[0].capture(step, "step")
    assert different(seen) == 4
