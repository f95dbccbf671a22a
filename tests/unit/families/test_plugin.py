"""A family in a package of its own registers, loads, draws, is traced, planned, profiled, reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.profiles import small_ceilings

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.device.entry_points import load_plugins
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import ModelError
from lantern_accel.families.base import Family
from lantern_accel.families.registry import broken_families, families, family, family_names, forget
from lantern_accel.memory.plan import planner_for
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model
from lantern_accel.testing import CHECKS, kit, static, tiny

PACKAGE = Path(__file__).parents[2] / "support" / "pebbles"
OURS = ["llamagen", "emu3", "lumina2", "chameleon", "janus", "glm_image"]


def register(folder: Path, name: str, point: str) -> None:
    """Write the metadata that pip would."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lantern_accel]\n{point}\n")
    load_plugins.cache_clear()
    forget()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, on the path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site"
    for module in [m for m in sys.modules if m.startswith(("lantern_accel_pebbles", "gone_"))]:
        sys.modules.pop(module)
    load_plugins.cache_clear()
    forget()


@pytest.fixture
def beach(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The family, installed, and a model of it in its own layout."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    register(site, "pebbles", "pebbles = lantern_accel_pebbles")
    kind = family("pebbles")
    manifest = kind.tiny()
    torch.manual_seed(1)
    weights = {}
    ops = lantern_accel.device.TensorOps()
    for part, prefix in (("target", "sand."), ("drafter", "wind."), ("vq", "paint.")):
        for name, value in kind.build(manifest, part, ops).state_dict().items():
            weights[prefix + name] = value
    folder = tmp_path / "beach"
    folder.mkdir()
    save_file(weights, folder / "beach.safetensors")
    said = manifest.model_dump(mode="json", exclude={"defaults"})
    (folder / "beach.json").write_text(json.dumps({**said, "name": "my-beach"}))
    return folder


def test_it_registers_and_is_recognised_by_its_files(beach: Path) -> None:
    assert family_names() == [*OURS, "pebbles"]
    assert broken_families() == {}
    assert load_plugins().broken == {}
    assert find_model(beach).manifest.family == "pebbles"
    found = check(beach)
    assert found.usable and [one.part for one in found.parts] == ["target", "drafter", "vq"]


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        ("vanilla", {}),
        ("eagle2", {"drafts": "dynamic:3,2,6"}),
        ("lantern++", {"drafts": "0,1,00", "k": 4}),
    ],
)
def test_it_generates_rows_that_end_where_they_must(
    beach: Path, strategy: str, asked: dict[str, Any]
) -> None:
    options = {"model": str(beach), "device": "cpu", "dtype": "float32", "seed": 3, **asked}
    done = lantern_accel.generate(["red pebble", "wet pebble"], strategy=strategy, **options)
    assert [image.size for image in done.images] == [(16, 12), (16, 12)]


@pytest.mark.long
def test_the_kit_traces_it(beach: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "CHECKED", ("lantern++",))
    monkeypatch.setattr(
        tiny, "families", lambda: [one for one in families() if one.name == "pebbles"]
    )
    chosen = kit.select(["static.host_read", "static.one_graph", "decode.greedy", "decode.allowed"])
    with open_backend("cpu") as backend:
        report = kit.run_checks(backend, chosen)
    assert report.passed, report.table()
    assert "pebbles" in report.families


def test_its_memory_is_planned(beach: Path) -> None:
    planner = planner_for(beach, memory=2**33)
    plan = planner.plan(planner.strategy("vanilla"))
    assert (
        plan.fits and plan.model == "my-beach" and set(plan.weights) == {"target", "drafter", "vq"}
    )


@pytest.mark.long
def test_a_fault_in_it_fails_its_check_by_name(
    beach: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pebbles = type(family("pebbles"))
    monkeypatch.setattr(pebbles, "build", lambda *rest: 1 / 0)
    monkeypatch.setattr(static, "CHECKED", ("vanilla",))
    with open_backend("cpu") as backend:
        found = kit.run_check(backend, "static.host_read", CHECKS["static.host_read"])
    assert (found.state, "pebbles, vanilla" in found.detail) == ("failed", True)


def test_it_is_profiled_and_reported(
    beach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_ceilings(monkeypatch)
    run, page = tmp_path / "run.json", tmp_path / "report.md"
    words = ["profile", "--model", str(beach), "--device", "cpu", "--quick", "-o", str(run)]
    words += ["--strategy", "vanilla", "--samples", "2", "--seconds", "0", "--quality-images", "2"]
    assert main(words) == 0
    read = json.loads(run.read_text())
    assert read["settings"]["prompts"]["used"][0] == "grey pebble"
    assert read["cells"][0]["step_ms"]["verify"] > 0
    assert main(["compare", str(run), "-o", str(page)]) == 0
    assert "my-beach" in page.read_text()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("", "has no hook"),
        ("family = 'gone_family:None_'", "no attribute 'None_'"),
        ("family = 'gone_family'", "write 'package.module:Class'"),
        ("family = 'json:JSONDecoder'", "is a JSONDecoder, not a Family"),
        ("family = 'json:JSONDecoder'; api = 7", "written for family API 7"),
    ],
)
def test_a_broken_family_is_reported_and_hides_no_other(
    site: Path, source: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site.mkdir()
    hook = """
from lantern_accel.device.hookspecs import hookimpl
from lantern_accel.families.spec import FamilySpec
api = 1
{}
@hookimpl
def lantern_accel_families():
    return [FamilySpec(name="gone", summary="gone", family=family, api_version=api)]
"""
    if source.startswith("family"):
        source = hook.format(source)
    (site / "gone_family.py").write_text(source)
    register(site, "gone", "gone = gone_family")
    assert list(broken_families()) == ["gone"]
    assert says in broken_families()["gone"]
    assert [one.name for one in families()] == OURS
    with pytest.raises(ModelError, match="'gone' failed to load"):
        family("gone")
    assert open_backend("cpu").name == "cpu"


def test_the_tutorial_lists_every_method_with_its_level() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    levels = {
        name.strip(" `"): level.strip()
        for names, level in rows
        for name in names.split(",")
        if level.strip() in ("required", "default")
    }
    methods = {
        name
        for name in vars(Family)
        if not name.startswith("_") and callable(getattr(Family, name))
    }
    assert set(levels) == methods
    assert {k for k, v in levels.items() if v == "required"} == Family.__abstractmethods__
