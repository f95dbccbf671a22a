"""A tiny random model folder, and the command run as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import write_tiny_model
from support.profiles import PROMPTS, small_ceilings

import lantern_accel
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel_profiles.measure.prompts import read_prompts
from lantern_accel_profiles.measure.record import Plan
from lantern_accel_profiles.measure.run import Profiler, ProfileRequest, choose_strategies

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-conditional model folder of a few thousand parameters."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pipeline(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """The tiny model in float32, loaded with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as opened:
            yield opened


@pytest.fixture(scope="session")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional model folder, seven classes."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "classes", conditioning="class")


@pytest.fixture(scope="session")
def undrafted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without a drafter."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "undrafted", drafter=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``lantern-accel`` in this process; returns code, standard output and error."""
    from lantern_accel.cli import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        text = capsys.readouterr()
        return subprocess.CompletedProcess(
            [sys.executable, *map(str, words)], code, text.out, text.err
        )

    return run


@pytest.fixture(name="small_ceilings")
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    small_ceilings(monkeypatch)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    """What the tiny model knows, with blank lines."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture
def profiler(tiny_model, prompt_file, tmp_path):
    """Make profilers of the tiny model in this process."""
    opened = []

    def make(out=tmp_path / "run.json", names=("vanilla", "lantern++"), resume=False, **changes):
        pipeline = lantern_accel.load(tiny_model, device="cpu")
        opened.append(pipeline)
        values = {
            "strategies": choose_strategies(pipeline, names, [1.0]),
            "prompts": read_prompts(prompt_file, pipeline),
            "plan": Plan(quick=True, samples=3, seconds=0, quality_images=4),
        }
        return Profiler(pipeline, ProfileRequest(**(values | changes)), out, resume=resume)

    yield make
    for pipeline in opened:
        pipeline.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium, where there is one and the package ``playwright``."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("there is no Chromium; set CHROMIUM to one")
    with playwright.sync_playwright() as running:
        # As root, in a container, its sandbox cannot start; the page is our own.
        opened = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()
