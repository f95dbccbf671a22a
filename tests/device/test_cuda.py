"""On a real GPU: conformance under every choice of options, and the double's promises kept.

Skipped where there is none, with the reason that ``lantern-accel devices`` gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lantern_accel
from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import backend_specs, open_backend
from lantern_accel.testing import kit, tiny

SPEC = backend_specs()["cuda"]
PROBE = SPEC.probe()

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not PROBE.available, reason=f"no GPU: {PROBE.reason}"),
    # Triton and torch.compile warn about choices of their own.
    pytest.mark.filterwarnings("ignore"),
]


def _name(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "default"


@pytest.fixture
def backend() -> Iterator[Backend]:
    with open_backend("cuda") as opened:
        yield opened


@pytest.mark.parametrize("options", SPEC.variants, ids=_name)
def test_the_kit_passes_with_these_options(options: dict[str, Any]) -> None:
    only = ["kv", "attention", "accept", "decode", "replay", "gpu"] if options else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = kit.conform("cuda", options=options, only=only)
    assert report.passed, report.table()


def test_the_last_card_works_and_the_one_after_it_is_an_error() -> None:
    with open_backend(f"cuda:{PROBE.count - 1}") as last:
        report = kit.run_checks(last, kit.select(["kv", "replay"], kit.checks_of(last)))
        assert report.passed, report.table()
    with pytest.raises(lantern_accel.LanternError, match="is out of range"):
        open_backend(f"cuda:{PROBE.count}")


def test_a_replay_is_faster_than_the_host_can_launch(backend: Backend) -> None:
    with torch.inference_mode():
        engine = tiny.tiny_engine(backend, "lantern++")
        tiny.start(engine, 0)
        replay = backend.capture(engine.step, "step")
        seconds = []
        for run in (engine.step, replay):
            run()
            with backend.stopwatch() as watch:
                for _ in range(10):
                    run()
            seconds.append(watch.seconds)
    assert replay.captured
    assert seconds[1] < seconds[0]


def test_the_bundled_model_draws_the_same_in_float32_as_on_the_cpu() -> None:
    tokens = []
    for device in ("cpu", "cuda"):
        with lantern_accel.load(device=device, dtype="float32") as pipeline:
            made = pipeline.generate("pizza", strategy="vanilla", temperature=0, seed=1)
            tokens.append(made.tokens.cpu())
    agree = (tokens[0] == tokens[1]).float().mean()
    # A near tie in one place changes what follows, so all of them cannot be asked for.
    assert agree > 0.5


def test_meters_answer(backend: Backend) -> None:
    use = backend.memory()
    assert 0 < use.free <= use.limit
    held = torch.ones(2**24, device=backend.device)
    assert backend.memory().in_use >= use.in_use + held.nbytes
    with backend.stopwatch() as watch:
        for _ in range(10):
            held = held * 1.0
    assert 0 < watch.seconds < 10
    assert backend.facts().memory_bytes > 2**30
