"""What ends a session early is in its file, and an error says what is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.profiles import small_ceilings
from support.runs import invented_run

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, RequestError
from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.measure.run import Measurement, fresh_run

ENDS = [
    (BackendError("it broke"), BackendError, "it broke; what was finished is kept in"),
    (RuntimeError("lost\nmore"), BackendError, "failed while measuring (RuntimeError: lost); what"),
    (RequestError("no room"), RequestError, "no room"),
]


@pytest.mark.parametrize(("error", "kind", "fragment"), ENDS, ids=range(len(ENDS)))
def test_an_error_says_what_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    fragment: str,
) -> None:
    small_ceilings(monkeypatch)
    out = tmp_path / "run.json"
    with open_backend("cpu") as backend:
        fresh = fresh_run(backend, torch.float32, invented_run().settings, "a", "")
        measurement = Measurement(backend, torch.float32, fresh, out)
        with pytest.raises(kind, match=re.escape(fragment)), measurement.session():
            raise error
    stored = Run.model_validate_json(out.read_text())
    reason = stored.sessions[0].reason
    assert stored.state == "interrupted" and stored.sessions[0].ended
    assert reason in ("it broke", "RuntimeError: lost", "no room")
