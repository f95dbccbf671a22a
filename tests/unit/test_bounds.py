"""Numbers that commands take, and figures that no measurement has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import invented_run

from lantern_accel.bounds import whole
from lantern_accel.errors import CheckpointError, show
from lantern_accel.families.tokenizer import check_vocabulary
from lantern_accel.files import read_json_file, read_text_file
from lantern_accel_profiles.measure.environment import busy_words
from lantern_accel_profiles.measure.record import Run, not_measured


@pytest.mark.parametrize("text", ["", "²", "٣", "1_0", " 1", "+1", "-1", "1.0", "9" * 20, "13"])
def test_a_number_is_ascii_digits_within_its_bounds(text: str) -> None:
    assert whole(text, 1, 12) is None is whole("9" * 5000)
    assert [whole("0"), whole("007"), whole("12", 1, 12)] == [0, 7, 12]


def test_values_are_shown_whatever_they_are() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise ValueError

    assert show(10**5000) == "a value that cannot be shown (int)"
    assert show(Rude()) == "a value that cannot be shown (Rude)"
    assert len(show("x" * 9000)) == 83


@pytest.mark.parametrize("value", [5.0, -1.0, None])
def test_a_total_variation_is_a_share_and_a_run_has_a_cell_once(value: float | None) -> None:
    data = invented_run().model_dump(mode="json")
    data["cells"][0]["samples"][0]["total_variation_per_token"] = value or 0.0
    data["cells"] += [] if value else data["cells"][:1]
    with pytest.raises(ValueError, match="lies between 0 and 1" if value else "two of its cells"):
        Run.model_validate(data)


def test_a_busy_machine_is_told_of() -> None:
    assert busy_words(0.01) == "" and busy_words(not_measured("no clock")) == ""
    assert busy_words(1.0).startswith("other programs use ")


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 3, "b": 48}

    check_vocabulary(Words(), 49, tmp_path)
    with pytest.raises(CheckpointError, match="ids up to 48, but the model's vocabulary has 48"):
        check_vocabulary(Words(), 48, tmp_path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/proc/self/mem"])
def test_devices_and_folders_are_not_read(path: str) -> None:
    for read in (read_text_file, read_json_file):
        with pytest.raises(OSError):
            read(Path(path))
