"""Plug-ins that misbehave: each is reported in a sentence, and stops nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from support import cards

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.device import plugins, timeouts
from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import Replay
from lantern_accel.device.entry_points import check_backend, why
from lantern_accel.device.timeouts import TooLong, in_time
from lantern_accel.errors import BackendError, LanternWarning

Given = Callable[..., cards.CardSpec]


@pytest.fixture
def never() -> Iterator[Callable[..., None]]:
    """What hangs until the test is over, so that no thread outlives it."""
    over = threading.Event()
    yield lambda *given: over.wait() and None
    over.set()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Return a way to install the card with methods of its specification or backend replaced."""
    plugins.backend_specs()["cpu"].probe()  # what the first look loads is not what is measured here
    monkeypatch.setattr(plugins, "LOOKING", 1.0)
    for user in ("device.timeouts", "generation.pipeline"):
        monkeypatch.setattr(f"lantern_accel.{user}.CLOSING", 0.3)
    monkeypatch.setattr(cards.CardSpec, "seconds_to_probe", 1.0, raising=False)

    def install(spec: dict[str, Any] | None = None, **backend: Any) -> cards.CardSpec:
        made = cards.install(monkeypatch, "nothing")
        for name, value in (spec or {}).items():
            monkeypatch.setattr(type(made), name, value, raising=False)
        for name, value in backend.items():
            monkeypatch.setattr(cards.Card, name, value, raising=False)
        return made

    return install


def leave(*given: object) -> None:
    raise SystemExit(3)


# --- looking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["probe", "prepare"])
def test_a_hook_that_hangs_is_reported_within_seconds(
    given: Given, never: Any, hook: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given({hook: never})
    began = time.perf_counter()
    assert main(["devices", "--json"]) == 0
    assert time.perf_counter() - began < 8
    report = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert report["cpu"]["state"] == "ready"
    assert report["card"]["state"] == "broken"
    says = f"backend 'card' failed in {hook}: TooLong: it did not return within 1 s"
    assert report["card"]["reason"].startswith(says)
    with pytest.warns(LanternWarning, match="auto skips a backend"):
        assert plugins.open_backend("auto").name == "cpu"


@pytest.mark.parametrize(
    "tell",
    [print, lambda text: os.write(1, text.encode()), lambda text: subprocess.run(["echo", text])],
)
def test_what_a_hook_prints_is_no_part_of_the_json(
    given: Given, capfd: pytest.CaptureFixture[str], tell: Callable[[str], object]
) -> None:
    given({"prepare": lambda self, environ: tell("looking for cards")})
    assert main(["devices", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)
    assert "looking for cards" in said.err


def test_a_hook_that_ends_the_program_does_not(given: Given) -> None:
    """Those before it: tests/unit/device/test_plugins.py."""
    given({"configure": leave})
    with pytest.raises(BackendError, match=r"'card' failed in configure: .*SystemExit: 3"):
        plugins.open_backend("card", {"beads": 1})


def test_importing_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = threading.Event()
    importing.set()
    monkeypatch.setattr(timeouts, "_importing_torch", importing.is_set)

    def slow() -> str:
        time.sleep(0.4)
        importing.clear()
        return "there"

    assert in_time(slow, 0.2) == "there"
    with pytest.raises(TooLong):
        in_time(lambda: time.sleep(1), 0.1)


def test_threads_that_a_call_sets_hold_for_the_caller() -> None:
    before = torch.get_num_threads()
    try:
        in_time(lambda: torch.set_num_threads(before + 1), 5)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("priority", "high", "priority: input should be a valid integer"),
        ("priority", True, "priority: "),
        ("variants", {"graph": "off"}, "variants: input should be a valid tuple"),
        ("variants", ("graph",), "variants.0: "),
        ("aliases", "gpu", "aliases: "),
        ("summary", None, "summary: "),
    ],
)
def test_a_specification_of_wrong_types_is_no_backend(name: str, value: object, says: str) -> None:
    spec = cards.CardSpec("nothing")
    setattr(spec, name, value)
    with pytest.raises(ValidationError) as caught:
        check_backend(spec)
    assert says in why(caught.value)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("facts", {"name": "Card"}),
        ("memory", None),
        ("counters", ["compiled"]),
        ("compute_dtypes", ("bfloat16",)),
        ("compute_dtypes", ()),
        ("compute_dtypes", torch.float32),
    ],
)
def test_a_device_that_answers_with_other_types(given: Given, method: str, value: object) -> None:
    given(**{method: lambda self: value})
    says = f"'card' failed in {method}: it returned"
    with pytest.raises(BackendError, match=says):
        plugins.open_backend("card")
    with pytest.warns(LanternWarning, match=f"cpu serves in place of card .*{says}"):
        assert plugins.open_backend("auto").name == "cpu"


def test_a_word_that_a_backend_answers_to_opens_it(given: Given) -> None:
    given({"answers": lambda self, word: word == "beads"})
    assert plugins.open_backend("beads:0").name == "card"
    with pytest.raises(BackendError, match="no backend is named 'rods'"):
        plugins.open_backend("rods")


# --- running ---------------------------------------------------------------------------------------


def drawn(model: Path, **settings: Any) -> Any:
    k = 3 if settings.setdefault("strategy", "lantern++") == "lantern++" else None
    with lantern_accel.load(model, device="card", dtype="float32") as pipeline:
        return pipeline.generate("red heart", k=k, seed=1, **settings)


def test_capture_that_returns_nothing_runs_uncaptured(given: Given, tiny_model: Path) -> None:
    given()
    want = drawn(tiny_model)
    given(capture=lambda self, step, name="step": None)
    with pytest.warns(LanternWarning) as said:
        found = drawn(tiny_model)
    text = " ".join(str(one.message) for one in said)
    assert "prefill, step cannot be captured" in text
    assert "failed in capture: it returned a NoneType, not a Replay" in text
    assert torch.equal(found.tokens, want.tokens)


@pytest.mark.parametrize("idle", ["prefill", "step"])
@pytest.mark.parametrize("strategy", ["lantern++", "vanilla", "scd", "auto"])
def test_replays_that_do_nothing_give_no_image(
    given: Given, tiny_model: Path, idle: str, strategy: str
) -> None:
    def capture(self: Backend, step: Callable[[], None], name: str = "step") -> Replay:
        return Replay((lambda: None) if name.split()[0] == idle else step)

    given(capture=capture)
    with pytest.raises(BackendError, match=r"captured step has no effect.*--only replay"):
        drawn(tiny_model, strategy=strategy)


# --- closing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "ends the program", "hangs"])
def test_finished_images_survive_what_close_does(
    given: Given,
    never: Any,
    how: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: object) -> None:
        raise OSError("the card is gone")

    says = {
        "raises": "OSError: the card is gone",
        "ends the program": "RuntimeError: SystemExit: 3",
        "hangs": "TooLong: it did not return within 0.3 s",
    }
    given(close={"raises": fail, "ends the program": leave, "hangs": never}[how])
    out = tmp_path / "a.png"
    words = ["generate", "red heart", "--model", str(tiny_model), "--device", "card"]
    words += ["--strategy", "vanilla"]
    assert main([*words, "-o", str(out), "--stats", str(tmp_path / "a.json")]) == 0
    Image.open(out).load()
    assert json.loads((tmp_path / "a.json").read_text())["device_name"] == "Card"
    said = capsys.readouterr().err
    closed = f"warning: backend 'card' was not closed ({says[how]})"
    assert said == f"{closed}; what was generated is kept\n"
    with pytest.warns(LanternWarning):
        assert drawn(tiny_model).tokens.shape == (1, 16)


@pytest.mark.long
def test_a_device_that_fails_and_hangs_when_it_is_closed_is_replaced(
    given: Given, never: Any, tiny_model: Path
) -> None:
    def fail(self: Backend, *given: Any) -> Any:
        raise RuntimeError(cards.GONE)

    given(close=never, linear=fail)
    with (
        pytest.warns(LanternWarning, match="cpu serves in place of card"),
        lantern_accel.load(tiny_model, dtype="float32") as pipeline,
    ):
        assert pipeline.generate("red heart", strategy="vanilla").stats.device == "cpu"
