"""The first command draws: a device that auto chose and that fails is replaced, with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import cards

import lantern_accel
from lantern_accel.errors import BackendError, DoesNotFitError, LanternWarning

FAILS = ("open", "first allocation", "capture", "use", "any step")


@pytest.fixture
def draw(command: Any, tiny_model: Path, tmp_path: Path) -> Any:
    """Run the command into ``a.png``; give its exit code and the one line that it says."""

    def run(*words: str) -> tuple[int, str]:
        asked = ("--model", tiny_model, "--strategy", "lantern++:k=3", "-o", tmp_path / "a.png")
        done = command("generate", "red heart", *asked, *words)
        (line,) = done.stderr.splitlines()
        return done.returncode, line

    return run


@pytest.mark.parametrize("fails", FAILS)
def test_the_command_draws_on_the_cpu_with_one_line(
    fails: str, draw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = cards.install(monkeypatch, fails)
    code, line = draw()
    assert code == 0
    assert line.startswith("warning: device auto: cpu serves in place of card (")
    assert cards.GONE in line
    Image.open(tmp_path / "a.png").load()
    assert all(card.closed for card in spec.opened)


@pytest.mark.parametrize("fails", FAILS[:4])
def test_a_card_that_was_asked_for_ends_with_one_sentence(
    fails: str, draw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards.install(monkeypatch, fails)
    code, line = draw("--device", "card")
    assert code == 4 and line.startswith("error: ") and cards.GONE in line
    assert not (tmp_path / "a.png").exists()


def test_a_step_that_cannot_be_captured_runs_uncaptured_and_says_what_it_costs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.install(monkeypatch, "captures nothing")
    with lantern_accel.load(tiny_model, device="card", dtype="float32") as pipeline:
        with pytest.warns(LanternWarning) as said:
            drawn = pipeline.generate("red heart", strategy="lantern++", k=3, seed=1)
        told = str(said[0].message)
        assert len(said) == 1
        assert told.startswith("prefill, step cannot be captured on cpu")
        assert "ms a call); the step waits for the host" in told
        assert drawn.tokens.shape == (1, 16)
        pipeline.release_engines()
        pipeline.backend.capture_asked = True
        with pytest.raises(BackendError, match="waits for the host"):
            pipeline.generate("red heart", strategy="lantern++", k=3, seed=1)


def test_what_is_no_fault_of_the_device_moves_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.install(monkeypatch, "nothing")
    with lantern_accel.load(tiny_model, dtype="float32") as pipeline:

        def large(*given: object) -> None:
            raise DoesNotFitError("a batch of 9 fits")

        monkeypatch.setattr(pipeline.engines.capacity, "batches", large)
        with pytest.raises(DoesNotFitError):
            pipeline.generate("red heart", strategy="lantern++", k=3)
        assert pipeline.backend.name == "card"


def test_a_device_that_has_drawn_is_not_replaced(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = cards.install(monkeypatch, "nothing")
    with lantern_accel.load(tiny_model, dtype="float32") as pipeline:
        pipeline.generate("red heart", seed=1, strategy="vanilla")
        spec.opened[-1].fails = "use"
        with pytest.raises(BackendError, match="too old"):
            pipeline.generate("red heart", strategy="lantern++", k=3, seed=1)


@pytest.mark.parametrize("callback", ["on_progress", "on_images"])
def test_an_error_of_the_callers_function_comes_out_as_it_is(
    callback: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.install(monkeypatch, "nothing")
    mine, calls = RuntimeError("my own"), []
    mine.__cause__ = ValueError("and its cause")

    def fail(*given: object) -> None:
        calls.append(given)
        raise mine

    with lantern_accel.load(tiny_model, dtype="float32") as pipeline:
        more: dict[str, Any] = {callback: fail}
        with pytest.raises(RuntimeError) as caught:
            pipeline.generate("red heart", strategy="vanilla", **more)
        assert caught.value is mine and isinstance(mine.__cause__, ValueError)
        assert len(calls) == 1 and pipeline.backend.name == "card"
        pipeline.generate("red heart", strategy="vanilla")
