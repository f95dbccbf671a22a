"""The checks as pytest cases, for a backend author's test module; needs pytest.

One import and one fixture::

    import pytest
    from lantern_accel.device.plugins import open_backend
    from lantern_accel.testing.cases import test_conforms, test_conforms_to_its_own_checks


    @pytest.fixture(scope="module")
    def backend():
        with open_backend("mine") as opened:
            yield opened

gives one case per check (``test_conforms[static.host_read]``) and one for the backend's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lantern_accel.device.backend import Backend
from lantern_accel.testing.kit import CHECKS, Check, Outcome, run_check


def judge(outcome: Outcome) -> None:
    """End a pytest case as its check ended."""
    if outcome.state == "not applicable":
        pytest.skip(outcome.detail)
    if outcome.state == "failed":
        figure = "" if outcome.error is None else f" (error {outcome.error:.2g})"
        pytest.fail(f"{outcome.name}: {outcome.detail}{figure}", pytrace=False)


@pytest.mark.parametrize("check", list(CHECKS))
def test_conforms(backend: Backend, check: str) -> None:
    """The device passes one check of the kit."""
    judge(run_check(backend, check, CHECKS[check]))


def test_conforms_to_its_own_checks(backend: Backend) -> None:
    """The device passes the checks that its backend adds."""
    own: Mapping[str, Check] = backend.conformance().checks
    outcomes = [run_check(backend, name, check) for name, check in own.items()]
    for outcome in sorted(outcomes, key=lambda one: one.state != "failed"):
        judge(outcome)
    if not outcomes:
        pytest.skip(f"backend {backend.name!r} adds none")
