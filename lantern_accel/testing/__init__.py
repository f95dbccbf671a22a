"""The conformance kit: is a backend correct, static and replayable? One import for a backend author.

>>> from lantern_accel.testing import conform
>>> report = conform("cpu", only="static")  # doctest: +SKIP
>>> assert report.passed, report.table()  # doctest: +SKIP
"""

from __future__ import annotations

from lantern_accel.testing.kit import CHECKS, Outcome, Report, conform, run_checks
from lantern_accel.testing.tiny import TinyModel, tiny_engine, tiny_model
from lantern_accel.testing.trace import Recorder, Violation

__all__ = [
    "CHECKS",
    "Outcome",
    "Recorder",
    "Report",
    "TinyModel",
    "Violation",
    "conform",
    "run_checks",
    "tiny_engine",
    "tiny_model",
]
