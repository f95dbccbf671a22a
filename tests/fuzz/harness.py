"""Run one case in this process, watched: no traceback, at most ten seconds, no picture from NaN."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lantern_accel
from fuzz.damage import apply_bytes, apply_json, apply_tensors
from fuzz.words import placed
from lantern_accel.cli import main
from lantern_accel.cli.edge import FAULT
from lantern_accel.device.datasheets import load_profile
from lantern_accel.errors import EXIT_CODES, LanternError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.training.loop import TrainConfig, load_checkpoint

#: Seconds that one input may take.
LIMIT = 10.0
Case = dict[str, Any]


class Hung(BaseException):
    """An input took longer than :data:`LIMIT`."""


class Reached(BaseException):
    """The command was about to measure or train: the input was taken."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: ``ran``, ``refused``, ``reached``, or a fault's name and its details."""

    kind: str
    details: str
    seconds: float

    @property
    def fault(self) -> bool:
        return self.kind in ("traceback", "hang", "nan")


def write_whole_files(folder: Path) -> None:
    """Write what cases start from: tiny models, a run, a configuration, prompts, features, images."""
    import torch
    from PIL import Image
    from safetensors.torch import save_file
    from support.models import write_tiny_model
    from support.runs import invented_run

    from lantern_accel_cpu.native.library import load_or_warn

    os.environ["LANTERN_ACCEL_CPU_LIBRARIES"] = _libraries()
    load_or_warn()  # compiled before any case is timed
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
    importlib.import_module("matplotlib.pyplot")  # makes a list of fonts, which takes seconds
    write_tiny_model(folder / "tiny")
    write_tiny_model(folder / "classes", conditioning="class")
    write_tiny_model(folder / "undrafted", drafter=False)
    (folder / "run.json").write_text(invented_run().model_dump_json())
    (folder / "config.json").write_text(json.dumps({"steps": 3, "lr": 0.001, "seed": 1}))
    (folder / "prompts.txt").write_text("red heart\n\ndog face\n")
    features = {"embeddings": torch.randn(1, 5, 24), "mask": torch.ones(1, 5)}
    save_file(features, folder / "embeddings.safetensors")
    (folder / "images").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "images" / "a.png")
    (folder / "keys.txt").write_text("one\ntwo\n")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "red heart"}) + "\n")
    line = json.dumps({"file": "a.png", "prompt": "a red heart"})
    (folder / "images" / "captions.jsonl").write_text(line + "\n")
    (folder / "notes.json").write_text(
        json.dumps({"command": "x", "seeds": {"0": 3}, "finished": [0]})
    )
    shipped = Path(__file__).parents[2] / "profiles" / "datasheets"
    shutil.copyfile(sorted(shipped.glob("*.toml"))[0], folder / "profile.toml")


def furnish(own: Path) -> None:
    """Put what hostile words name into a case's folder."""
    os.mkfifo(own / "pipe")
    (own / "loop").symlink_to(own / "loop")
    (own / "file").write_text("")
    (own / "empty").write_bytes(b"")
    (own / "text").write_text("no such thing")
    (own / "closed").mkdir(mode=0)


def _place(case: Case, whole: Path, own: Path) -> None:
    """Write the case's damaged files: ``name: [base, kind, edit]``."""
    for name, (base, kind, edit) in case.get("files", {}).items():
        out, source = own / name, whole / base
        out.parent.mkdir(parents=True, exist_ok=True)
        if kind == "model":  # a model folder whose other files are whole
            for part in sorted((whole / base).parent.iterdir()):
                if not (out.parent / part.name).exists():
                    (out.parent / part.name).symlink_to(part)
            out.unlink()
            kind, edit = edit
        if kind == "json":
            out.write_text(apply_json(source, edit), encoding="utf-8", errors="surrogateescape")
        elif kind == "bytes":
            out.write_bytes(apply_bytes(source.read_bytes(), edit))
        elif kind == "tensors":
            apply_tensors(source, out, edit)
        else:
            shutil.copyfile(source, out)


@functools.cache
def _libraries() -> str:
    """Return the folder of the native kernels, compiled once and for all cases."""
    from lantern_accel.files import cache_dir

    return os.environ.get("LANTERN_ACCEL_CPU_LIBRARIES") or str(cache_dir() / "native")


def _starved() -> float:
    """Return the seconds that this process was ready to run and other processes had the cores."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    began, starved = time.monotonic(), _starved()

    def stop(number: int, frame: Any) -> None:
        left = seconds - (time.monotonic() - began) + (_starved() - starved)
        if left <= 0:
            raise Hung
        signal.setitimer(signal.ITIMER_REAL, left)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _reach(*args: Any, **kwargs: Any) -> Any:
    raise Reached


#: Where the work begins that is no question of input.
WORK = (
    "lantern_accel_profiles.measure.run.Profiler.measure",
    "lantern_accel_profiles.tuning.trees.TreeTuner.measure_rates",
    "lantern_accel_profiles.tuning.auto.AutoTuner.prepare",
    "lantern_accel_profiles.measure.steps.make_model",
    "lantern_accel_profiles.evaluation.run.Evaluator.run",
    "lantern_accel.generation.quantized.quantized_model",
    "lantern_accel.serving.app.Server.run",
    "lantern_accel_profiles.evaluation.grid.save_grid",
    "lantern_accel.memory.plan.measure",
    "lantern_accel.testing.kit.run_checks",
    "lantern_accel.cli.separate.KitRun.conform",
    "lantern_accel.training.drafter.train_drafter",
    "lantern_accel.training.head.train_head",
    "lantern_emoji.data.prepare_data",
    "lantern_accel.models.hub.fetch",
)


@contextlib.contextmanager
def watched(seen: dict[str, bool]) -> Iterator[None]:
    """Stop before long work, and note where the logits that are drawn from were no numbers."""
    import torch

    from lantern_accel.decoding.verify import TargetRunner

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            logits: torch.Tensor = found[1] if isinstance(found, tuple) else found
            if not logits.is_meta:
                seen["nan"] |= bool((logits.isnan() | (logits == float("inf"))).any())
            return found

        return run

    with contextlib.ExitStack() as stack:
        for name in WORK:
            stack.enter_context(mock.patch(name, _reach))
        for owner, name in ((TargetRunner, "prefill"), (TargetRunner, "run")):
            real = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, noting(real)))
        yield


def run_case(case: Case, whole: Path) -> Outcome:
    """Run a case in a folder of its own; the folder is gone afterwards."""
    own = Path(tempfile.mkdtemp(prefix="fuzz-"))
    seen = {"nan": False}
    began, starved = time.monotonic(), _starved()
    out, err = io.StringIO(), io.StringIO()
    environ = {"LANTERN_ACCEL_CACHE": str(own / "cache"), "HF_HUB_OFFLINE": "1", "HOME": str(own)}
    environ["LANTERN_ACCEL_CPU_LIBRARIES"] = _libraries()
    environ["MPLCONFIGDIR"] = str(whole / "matplotlib")
    try:
        furnish(own)
        _place(case, whole, own)
        with (
            mock.patch.dict(os.environ, environ),
            _inside(own),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
            watched(seen),
            _within(LIMIT),
        ):
            code = TARGETS[case["target"]](case, whole, own)
        kind = "ran" if code == 0 else "refused"
        if code not in set(EXIT_CODES) - {FAULT}:
            kind = "traceback"
        elif code == 0 and seen["nan"] and list(own.glob("*.png")):
            kind = "nan"
        told = err.getvalue()
        if kind == "traceback":
            told += "".join(p.read_text() for p in (own / "cache").glob("errors/*"))
        elif "Traceback (most recent" in told:
            kind = "traceback"
    except Reached:
        kind, told = "reached", ""
    except Hung:
        kind, told = "hang", err.getvalue()
    except Exception:
        kind, told = "traceback", traceback.format_exc()
    finally:
        (own / "closed").chmod(0o700)
        shutil.rmtree(own, ignore_errors=True)
    return Outcome(kind, told[-6000:], time.monotonic() - began - (_starved() - starved))


# --- what a case is given to ----------------------------------------------------------------------


def _ends(call: Callable[[], object]) -> int:
    """Return the exit code that a call stands for: 2 where it is refused with one of our errors."""
    try:
        call()
    except LanternError:
        return 2
    return 0


def _command(case: Case, whole: Path, own: Path) -> int:
    return main([placed(word, whole, own) for word in case["words"]])


def _call(case: Case, whole: Path, own: Path) -> int:
    """Call ``generate`` with values of any type."""
    given = {name: _value(value) for name, value in case["given"].items()}
    prompt = given.pop("prompt", "red heart")
    return _ends(lambda: _pipeline(whole).generate(prompt, **given))


@functools.cache
def _pipeline(whole: Path) -> Pipeline:
    return lantern_accel.load(whole / "tiny", device="cpu", dtype="float32")


def _value(value: Any) -> Any:
    """Turn a name into what JSON cannot say."""
    import numpy as np
    import torch

    special: dict[Any, Any] = {
        "object!": object(), "nan!": float("nan"), "inf!": float("inf"), "bytes!": b"a", "set!": {1},
        "tensor!": torch.zeros(2), "array!": np.zeros(2), "type!": int,
        "path!": Path("x"), "complex!": 1j,
        "huge!": 10**5000, "tuple!": (1, 2), "lambda!": len, "generator!": iter("ab"),
    }  # fmt: skip
    return special.get(value, value) if isinstance(value, str) else value


def _profile(case: Case, whole: Path, own: Path) -> int:
    """Read a device's TOML."""
    return _ends(lambda: load_profile("profile", own))


def _checkpoint(case: Case, whole: Path, own: Path) -> int:
    """Continue a training checkpoint."""
    return _ends(lambda: load_checkpoint(own / "checkpoint.pt", TrainConfig(steps=3)))


def _entry(case: Case, whole: Path, own: Path) -> int:
    """Read a damaged entry of the cache: the same table, whatever the entry holds."""
    import torch

    from lantern_accel.nn.neighbours import cached_neighbour_table

    book = _pipeline(whole).model.family.codebook(_pipeline(whole).model)[0]
    want = cached_neighbour_table(book, 3, normalise=True, cache=own)
    (entry,) = (own / "neighbours").glob("*.safetensors")
    entry.write_bytes(apply_bytes(entry.read_bytes(), case["edit"]))
    assert torch.equal(cached_neighbour_table(book, 3, normalise=True, cache=own), want)
    return 0


TARGETS: dict[str, Callable[[Case, Path, Path], int]] = {
    "command": _command,
    "call": _call,
    "profile": _profile,
    "checkpoint": _checkpoint,
    "entry": _entry,
}


def keep(case: Case, folder: Path) -> Path:
    """Write a case that failed to the folder of cases, by its content's name."""
    text = json.dumps(case, indent=1, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return path
