"""On a real Gaudi: the checks that nothing else can answer. Never run by this project's authors.

``pytest -m device tests/unit/backends/hpu`` on a machine with a card.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import LanternWarning
from lantern_accel_hpu.spec import Spec

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def card() -> None:
    """Skip all of this without a card; the software HPU is none."""
    if Spec().settings.is_software(os.environ) or not Spec().probe().available:
        pytest.skip("needs a Gaudi")


@pytest.fixture(scope="module")
def backend(card: None) -> Iterator[object]:
    with open_backend("hpu") as opened:
        yield opened


def test_every_check_of_the_kit_passes(backend) -> None:
    from lantern_accel.testing.kit import checks_of, run_checks

    report = run_checks(backend, checks_of(backend))
    assert report.passed, report.table()
    assert report.needs_card == 0


def test_float32_gives_the_cpus_tokens() -> None:
    import lantern_accel

    tokens = []
    for device in ("cpu", "hpu"):
        with lantern_accel.load(device=device, dtype="float32") as pipeline:
            tokens.append(pipeline.generate("red heart", seed=7).tokens)
    assert tokens[0].equal(tokens[1])


def test_nothing_compiles_or_falls_back_after_the_first_image() -> None:
    import lantern_accel

    with lantern_accel.load(device="hpu") as pipeline:
        pipeline.generate("red heart", seed=1)
        before = pipeline.backend.counters()
        with warnings.catch_warnings():
            warnings.simplefilter("error", LanternWarning)
            pipeline.generate("dog face", seed=2)
        after = pipeline.backend.counters()
    assert after == before
    assert not [name for name in after if name.startswith("cpu_fallback.aten::")]


def test_the_meters_read(backend) -> None:
    memory = backend.memory()
    assert 0 < memory.in_use <= memory.peak <= memory.limit
    facts = backend.facts()
    assert "GAUDI" in facts.name.upper()
    assert facts.sdk
    if backend.energy_mj() is None:
        assert "no energy meter" in backend.support("energy").reason
