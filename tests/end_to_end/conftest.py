"""A tiny random model folder, and the command run as a user would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import write_tiny_model

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-conditional model folder of a few thousand parameters."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


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
