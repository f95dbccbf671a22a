"""Janus's folders: what is read off them, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.janus import write_janus

from lantern_accel.errors import CheckpointError
from lantern_accel.families import registry
from lantern_accel.families.janus import official
from lantern_accel.families.registry import entry
from lantern_accel.models.locate import find_model


def test_a_generation_that_nothing_says_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_janus(tmp_path / "x")
    assert find_model(folder).manifest.variant == "pro"
    # Both generations have these sizes now, as Janus-Pro-1B and Janus-1.3B do.
    entries = [entry("janus-pro-1b"), entry("janus-1.3b")]
    for module in (official, registry):
        monkeypatch.setattr(module, "entries_like", lambda _: entries)
    with pytest.raises(CheckpointError, match=r"--model janus-pro-1b=.*x \(or janus-1.3b\)"):
        find_model(folder)
    found = find_model(f"janus-1.3b={folder}")
    assert (found.manifest.variant, found.manifest.name) == ("1.3b", "janus-1.3b")
