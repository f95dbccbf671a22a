"""The conformance kit: is a backend correct, static and replayable? One import for a backend author.

>>> from lantern_accel.testing import conform
>>> report = conform("cpu", only="static")  # doctest: +SKIP
>>> assert report.passed, report.table()  # doctest: +SKIP

:mod:`lantern_accel.testing.cases` has one pytest case per check.
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
from lantern_accel.testing.trace import OpRecorder, Violation

__all__ = [
    "CHECKS",
    "Failed",
    "Measured",
    "NeedsCard",
    "NotApplicable",
    "OpRecorder",
    "Outcome",
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
    "tiny_engine",
    "tiny_model",
]
