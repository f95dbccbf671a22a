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


def test_images_are_the_cpus_and_the_second_one_compiles_nothing() -> None:
    import lantern_accel

    tokens = []
    for device in ("cpu", "hpu"):
        with lantern_accel.load(device=device, dtype="float32") as pipeline:
            tokens.append(pipeline.generate("red heart", seed=7).tokens)
            before = pipeline.backend.counters()
            with warnings.catch_warnings():
                warnings.simplefilter("error", LanternWarning)
                pipeline.generate("dog face", seed=2)
            after = pipeline.backend.counters()
    assert tokens[0].equal(tokens[1])
    assert after == before and not any(name.startswith("cpu_fallback.aten::") for name in after)
