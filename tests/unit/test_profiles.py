"""Device profiles: every figure has a source, and a damaged file says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_accel.profiles import (
    ProfileError,
    load_profile,
    profile_names,
    profiles_dir,
)

GOOD = """
name = "abacus"
backend = "abacus"
vendor = "Beads"
model = "10 rods"
[peak_flops.float32]
value = 2
kind = "measured"
source = "by hand"
"""


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.peak_flops


def test_profiles_are_found_in_a_checkout() -> None:
    assert "cpu" in profile_names()
    assert (profiles_dir() / "cpu.toml").is_file()


def test_an_unknown_profile_names_its_neighbours() -> None:
    with pytest.raises(ProfileError, match="no device profile is named 'cpuu'; did you mean cpu"):
        load_profile("cpuu")


def test_a_good_profile_keeps_unknown_figures_none(tmp_path: Path) -> None:
    (tmp_path / "abacus.toml").write_text(GOOD)
    profile = load_profile("abacus", tmp_path)
    assert profile.peak_flops["float32"].value == 2
    assert profile.power_w is None


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('source = "by hand"', "", r"peak_flops\.float32\.source: Field required"),
        ('source = "by hand"', 'source = ""', r"peak_flops\.float32\.source: .*at least 1"),
        ('"measured"', '"guessed"', r"peak_flops\.float32\.kind"),
        ("value = 2", "value = -2", r"peak_flops\.float32\.value: .*greater than 0"),
        ("value = 2", "value = inf", r"peak_flops\.float32\.value: .*finite"),
        ("float32", "float33", "peak_flops"),
        ('vendor = "Beads"', 'vendor = "Beads"\ncolour = "red"', "colour"),
        ('name = "abacus"', 'name = "other"', "is 'other', the file's name says 'abacus'"),
        ('name = "abacus"', "name = ", "cannot be read"),
    ],
)
def test_a_damaged_profile_says_where(tmp_path: Path, before: str, after: str, says: str) -> None:
    (tmp_path / "abacus.toml").write_text(GOOD.replace(before, after, 1))
    with pytest.raises(ProfileError, match=says) as caught:
        load_profile("abacus", tmp_path)
    assert "abacus.toml" in str(caught.value)
