"""What a wheel holds: the package, its backends and profiles, and nothing that only a checkout needs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names() -> set[str]:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    return {one.distribution_path for one in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}


def test_a_wheel_has_the_package_and_every_backend(names: set[str]) -> None:
    assert "lantern_accel/cli/conform.py" in names
    assert {name.split("/")[0] for name in names} == {
        "lantern_accel",
        "lantern_accel_profiles",
        *(one.name for one in (ROOT / "backends").iterdir() if one.is_dir()),
    }
    assert "lantern_accel_profiles/commands/profile.py" in names
    assert "lantern_accel/profiles_data/datasheets/cpu.toml" in names


def test_the_device_in_software_stays_in_the_checkout(names: set[str]) -> None:
    assert (ROOT / "backends/lantern_accel_hpu/software/__init__.py").is_file()
    assert not [name for name in names if "/software/" in name]
