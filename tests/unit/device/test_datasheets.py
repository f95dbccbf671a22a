"""Device profiles: every figure has a source, and a damaged file says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lantern_accel.device.datasheets import ProfileError, all_profiles, load_profile, profile_names

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
        ('source = "by hand"', "", r"peak_flops\.float32\.source is missing"),
        ('source = "by hand"', 'source = ""', r"peak_flops\.float32\.source .*at least 1"),
        ('source = "by hand"', 'source = "  "', r"peak_flops\.float32\.source .*at least 1"),
        ("[peak_flops.float32]", "[peak_flops]\n[on_chip_bytes]", "peak_flops .*at least 1"),
        ('"measured"', '"guessed"', r"peak_flops\.float32\.kind"),
        ("value = 2", "value = -2", r"peak_flops\.float32\.value must be above 0"),
        ("value = 2", "value = inf", r"peak_flops\.float32\.value .*finite"),
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


@pytest.mark.parametrize(
    "held",
    [
        b"a=" + b"[" * 5000 + b"]" * 5000,
        GOOD.replace("value = 2", "value = " + "9" * 5000).encode(),
        b"\xff\xfe",
    ],
    ids=["deep", "digits", "bytes"],
)
def test_a_profile_that_is_no_text_is_one_sentence(held: bytes, tmp_path: Path) -> None:
    (tmp_path / "abacus.toml").write_bytes(held)
    with pytest.raises(ProfileError, match=r"abacus") as caught:
        load_profile("abacus", tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "aim", ["/dev/zero", "/proc", "abacus.toml"], ids=["device", "folder", "loop"]
)
def test_a_profile_that_is_no_file_is_one_sentence(aim: str, tmp_path: Path) -> None:
    (tmp_path / "abacus.toml").symlink_to(aim)
    with pytest.raises(ProfileError, match=r"abacus") as caught:
        load_profile("abacus", tmp_path)
    assert len(str(caught.value)) < 1000


def test_the_devices_that_are_asked_about_have_a_profile() -> None:
    wanted = {"cpu", "rtx3090", "a100", "h100", "h200", "gaudi2", "gaudi3", "mi300x"}
    wanted |= {"rtx4090", "rtx5090", "a10", "l4", "l40s", "b200", "arcb580"}
    assert wanted <= {one.name for one in all_profiles()}


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_what_a_projection_needs(name: str) -> None:
    profile = load_profile(name)
    assert profile.bandwidth_bytes_per_s is not None
    assert profile.memory_bytes is not None
    assert "bfloat16" in profile.peak_flops
    for field, figure in profile.figures().items():
        assert len(figure.source) > 10, field
    for dtype, reached in profile.reached_flops.items():
        assert reached.kind == "cited", "others measured it"
        assert reached.value <= profile.peak_flops[dtype].value


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("cuda", "NVIDIA GeForce RTX 3090", "rtx3090"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "AMD Instinct MI300X", "mi300x"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx4090"),
        ("cuda", "NVIDIA GeForce RTX 5090", "rtx5090"),
        ("cuda", "NVIDIA A10", "a10"),
        ("cuda", "NVIDIA L4", "l4"),
        ("cuda", "NVIDIA L40S", "l40s"),
        ("cuda", "NVIDIA B200", "b200"),
        ("torch", "Intel(R) Arc(TM) B580 Graphics", "arcb580"),
        ("hpu", "GAUDI2", "gaudi2"),
        ("hpu", "GAUDI3", "gaudi3"),
        ("cuda", "NVIDIA GeForce RTX 3090 Ti", None),
        ("cuda", "NVIDIA GeForce RTX 4090 D", None),
        ("cuda", "NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("cuda", "NVIDIA A10G", None),
        ("cuda", "NVIDIA L40", None),
        ("cuda", "NVIDIA GB200", None),
        ("cuda", "NVIDIA H100 PCIe", None),
        ("cuda", "NVIDIA A100-PCIE-40GB", None),
        ("cpu", "NVIDIA H200", None),
        ("cpu", "AMD EPYC 9654 96-Core Processor", None),
    ],
)
def test_a_run_is_known_by_the_name_that_its_driver_gives(
    backend: str, device: str, name: str | None
) -> None:
    assert [p.name for p in all_profiles() if p.matches(backend, device)] == (
        [name] if name else []
    )


def test_the_command_lists_and_checks_them(capsys: pytest.CaptureFixture[str]) -> None:
    from lantern_accel.cli import main

    assert main(["hardware"]) == 0
    said = capsys.readouterr().out
    assert "gaudi2: Intel Gaudi 2, 96 GB, 432 TFLOP/s bfloat16" in said
    assert "24 GiB, 350 W" in said  # a 24 GB card has 24 x 2^30 bytes
    assert main(["hardware", "gaudi2"]) == 0
    assert "(datasheet: Intel" in capsys.readouterr().out
    assert main(["hardware", "--json"]) == 0
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} == set(profile_names())
    assert main(["hardware", "gaudi9"]) == 2
    assert "did you mean gaudi" in capsys.readouterr().err
