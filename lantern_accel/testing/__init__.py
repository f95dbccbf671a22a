"""The conformance kit: is a backend correct, static and replayable? One import for a backend author.

>>> from lantern_accel.testing import conform
>>> report = conform("cpu", only="static")  # doctest: +SKIP
>>> assert report.passed, report.table()  # doctest: +SKIP

In a test module, ``from lantern_accel.testing import *`` and a fixture ``backend`` give one pytest
case per check; see :mod:`lantern_accel.testing.cases`.
"""

from __future__ import annotations

from lantern_accel.testing.host import check_tokens, next_to_cpu
from lantern_accel.testing.kit import (
    CHECKS,
    Outcome,
    Report,
    checks_of,
    conform,
    run_check,
    run_checks,
)
from lantern_accel.testing.result import Failed, Measured, NeedsCard, NotApplicable, on_card
from lantern_accel.testing.tiny import TinyModel, tiny_engine, tiny_model
from lantern_accel.testing.trace import Recorder, Violation

#: Cases that need pytest, which only a test run has.
_CASES = ("test_conforms", "test_conforms_to_its_own_checks")

__all__ = [
    "CHECKS",
    "Failed",
    "Measured",
    "NeedsCard",
    "NotApplicable",
    "Outcome",
    "Recorder",
    "Report",
    "TinyModel",
    "Violation",
    "check_tokens",
    "checks_of",
    "conform",
    "next_to_cpu",
    "on_card",
    "run_check",
    "run_checks",
    "test_conforms",
    "test_conforms_to_its_own_checks",
    "tiny_engine",
    "tiny_model",
]


def __getattr__(name: str) -> object:
    if name in _CASES:
        from lantern_accel.testing import cases

        return getattr(cases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
