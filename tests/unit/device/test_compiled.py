"""What compilers make is kept in the cache folder, and a cache that cannot be written breaks nothing."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path

import pytest

from lantern_accel.device import compiled
from lantern_accel.device.compiled import keep, keep_torch

SPECS = {
    "cpu": {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"},
    "cuda": {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"},
    "hpu": {"PT_HPU_RECIPE_CACHE_CONFIG": "recipes"},
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANTERN_HPU_SOFTWARE", raising=False)
    monkeypatch.setattr(compiled, "_ours", {})


@pytest.mark.parametrize("name", SPECS)
def test_every_backend_that_compiles_keeps_its_work(name: str, tmp_path: Path) -> None:
    spec = importlib.import_module(f"lantern_accel_{name}.spec").Spec()
    environ: dict[str, str] = {}
    spec.prepare(environ)
    for variable, folder in SPECS[name].items():
        kept = tmp_path / "cache" / "compiled" / folder
        assert environ[variable].partition(",")[0] == str(kept)
        assert kept.is_dir()
    theirs = dict.fromkeys(SPECS[name], "/mine,True,1")
    environ = dict(theirs)
    spec.prepare(environ)
    assert {variable: environ[variable] for variable in theirs} == theirs


def test_recipes_are_kept_as_the_bridge_reads_them() -> None:
    environ: dict[str, str] = {}
    importlib.import_module("lantern_accel_hpu.spec").Spec().prepare(environ)
    _, emptied, megabytes = environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")
    assert (emptied, int(megabytes) > 1000) == ("False", True)
    older = {"PT_RECIPE_CACHE_PATH": "/mine"}
    importlib.import_module("lantern_accel_hpu.spec").Spec().prepare(older)
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in older


def test_another_cache_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    keep_torch(environ)
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "other"))
    keep_torch(environ)
    assert environ["TRITON_CACHE_DIR"] == str(tmp_path / "other" / "compiled" / "triton")


@pytest.mark.parametrize("where", ["/dev/null/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written_sets_nothing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    environ: dict[str, str] = {}
    keep_torch(environ)
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_torch(environ)
        keep(environ, "MINE", "mine")
    assert environ == {}


def test_a_folder_that_a_variable_cannot_hold_is_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "a,b"))
    environ: dict[str, str] = {}
    keep(environ, "RECIPES", "recipes", "{},False,1")
    assert environ == {}


def test_torch_compiles_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.codecache import cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_torch(os.environ)
    try:
        assert cache_dir() == str(tmp_path / "cache" / "compiled" / "inductor")
    finally:
        for name in SPECS["cpu"]:
            monkeypatch.delenv(name, raising=False)
