"""What a stage left is read back, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_accel.errors import DataError
from lantern_accel.training.loop import TrainConfig
from lantern_emoji.folder import read_made


@pytest.mark.parametrize(
    ("text", "field", "told"),
    [
        (None, "", "holds no trained target; train it first"),
        ("[]", "", "target.json is not what training a target writes"),
        ('{"steps": 3', "", "is not what"),
        ('{"steps": "three"}', "", "is not what"),
        ('{"settings": {"steps": 3}}', "config", "is not what"),
        ("[1]", "config", "is not what"),
    ],
)
def test_what_a_stage_left_is_read_or_refused(
    tmp_path: Path, text: str | None, field: str, told: str
) -> None:
    path = tmp_path / "target.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_made(TrainConfig, path, "target", field)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    path.write_text('{"config": {"steps": 3}}')
    assert read_made(TrainConfig, path, "target", "config").steps == 3
