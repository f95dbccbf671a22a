"""Kill commands at random moments, run them again, and compare with unbroken runs.

    python tests/kills.py --kills 200 --json kills.json

Tiny models and data are made first; nothing is fetched. Every command is killed (SIGKILL) as often as it
takes to share out the kills, then run to its end. What was finished before a kill must still be there
afterwards, byte for byte, and the end must be that of the unbroken run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
Finished = dict[str, str]


@dataclass
class Job:
    """One command: its words, what counts as finished work, and what is compared at the end.

    ``afresh``: words of an unbroken run next to the broken one, and what reads its end. It shares the
    cache, where ``auto`` keeps what it has timed; in another cache it may have chosen otherwise.
    """

    name: str
    words: list[str]
    finished: Callable[[Path], Finished]
    end: Callable[[Path], Any]
    again: tuple[str, ...] = ()
    afresh: tuple[list[str], Callable[[Path], Any]] | None = None
    kills: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def digest(path: Path) -> str:
    """Return what tells a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def files(pattern: str) -> Callable[[Path], Finished]:
    """Return what lists the files of a pattern with their content."""
    return lambda folder: {
        str(p.relative_to(folder)): digest(p) for p in sorted(folder.glob(pattern))
    }


def pictures(stem: str) -> Callable[[Path], list[str]]:
    """Return what lists the content of numbered pictures, in order."""
    return lambda folder: [digest(path) for path in sorted(folder.glob(f"{stem}-*.png"))]


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where it was not begun."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def samples(name: str) -> Callable[[Path], Finished]:
    """Return what lists the samples of a measurement's file, each with its figures."""

    def read(folder: Path) -> Finished:
        return {
            f"{cell['strategy']['name']} {number}": json.dumps(sample, sort_keys=True)
            for cell in read_json(folder / name).get("cells", [])
            for number, sample in enumerate(cell["samples"])
        }

    return read


def parts(name: str) -> Callable[[Path], Finished]:
    """Return what lists the finished parts of an evaluation."""

    def read(folder: Path) -> Finished:
        found = read_json(folder / name)
        kept = ("likelihood", "ambiguity", "interchange", "frontier", "distances", "memorisation")
        return {key: json.dumps(found[key]) for key in kept if found.get(key) is not None}

    return read


def progress(folder: Path) -> Finished:
    """List what tuning has measured: prompts and timed trees, as counts that never fall."""
    found: Finished = {}
    for path in folder.glob("cache/trees/*.partial"):
        state = read_json(path)
        found |= {f"prompt {n}": "" for n in range(state["prompts"])}
        found |= {f"tree {n}": json.dumps(c) for n, c in enumerate(state["costs"])}
    return found


def checkpoints(stage: str) -> Callable[[Path], Finished]:
    """Return what lists the steps that a training stage's checkpoint holds."""

    def read(folder: Path) -> Finished:
        import torch

        path = folder / "work" / stage / "checkpoint.pt"
        if not path.is_file():
            return {}
        step = torch.load(path, map_location="cpu", weights_only=True)["step"]
        return {f"step {n}": "" for n in range(step + 1)}

    return read


def counted(name: str) -> Callable[[Path], Any]:
    """Return what of a measurement does not depend on the clock: cells, counts of samples, tokens."""

    def read(folder: Path) -> Any:
        run = read_json(folder / name)
        rows = [
            [cell["strategy"]["name"], cell["batch"], len(cell["samples"]),
             [[s["seed"], s["tokens"], s["steps"]] for s in cell["samples"]]]
            for cell in run["cells"]
        ]  # fmt: skip
        return [run["state"], rows, [q["images"] for q in run["quality"]]]

    return read


def tuned(folder: Path) -> Any:
    """Return what of a tuned tree does not depend on the clock: the acceptance that was counted."""
    (path,) = folder.glob("cache/trees/*.json")
    return read_json(path)["rates"]


def jobs(model: Path, base: Path) -> Iterator[Job]:
    """Go through every command that takes long."""
    given = ["-d", "cpu", "-m", str(model)]
    draw = ["generate", "red heart", "-n", "16", "-b", "1", "--seed", "3", *given, "-o"]
    afresh = [*draw, "q.png"], pictures("q")
    yield Job("generate", [*draw, "p.png"], files("p-*.png"), pictures("p"), ("--resume",), afresh)
    devices = ["--device", "cpu", "--model", str(model)]
    tune = ["tune", "--strategy", "eagle", "--repeats", "1", *devices]
    yield Job("tune", tune, progress, tuned)
    yield Job(
        "profile",
        ["profile", "--quick", "--strategy", "eagle", "--samples", "4", "-o", "run.json",
         "--seed", "1", *devices],
        samples("run.json"), counted("run.json"), ("--resume",),
    )  # fmt: skip
    yield Job(
        "evaluate",
        ["evaluate", "--quick", "--part", "ambiguity", "--part", "interchange", "--part",
         "frontier", "-o", "e.json", *devices],
        parts("e.json"), parts("e.json"),
    )  # fmt: skip
    for stage in ("tokenizer", "target", "drafter"):
        words = [stage, "--work", "work", "--device", "cpu"]
        yield Job(
            f"train {stage}",
            [*words, "--config", str(base / f"{stage}.json")],
            checkpoints(stage), files(f"work/{stage}/*.safetensors"),
        )  # fmt: skip


def run(
    job: Job,
    folder: Path,
    *,
    again: bool,
    seconds: float | None = None,
    words: list[str] | None = None,
) -> int | None:
    """Run a job in a folder, killing it after ``seconds``; None where it was killed.

    The process is a fork of this one, which has imported everything: what is killed is work.
    """
    child = os.fork()
    if not child:
        try:
            _become(folder)
            if job.name.startswith(("train ", "evaluate")):  # stages of the bundled model
                from lantern_emoji.app import main as command
            else:
                from lantern_accel.cli import main as command

            sys.argv = ["lantern-accel", *(words or job.words), *(job.again if again else ())]
            code = command(sys.argv[1:])
            sys.stdout.flush()
            os._exit(code)
        finally:
            os._exit(99)
    until = time.monotonic() + seconds if seconds is not None else math.inf
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def _become(folder: Path) -> None:
    """Make this process one of its own: its folder, its cache, its log."""
    os.chdir(folder)
    os.environ["LANTERN_ACCEL_CACHE"] = str(folder / "cache")
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)


def broken(job: Job, start: Path, want: Any, rng: random.Random, most: int) -> int:
    """Kill one job up to ``most`` times, let it end, and note what was lost; return the kills."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "run")
        shutil.copytree(start, folder)
        before: Finished = {}
        kills = 0
        while kills < most:
            begun = kills > 0 or bool(before)
            code = run(job, folder, again=begun, seconds=rng.uniform(0.2, 1.0) * job.seconds)
            now = job.finished(folder)
            ended = code == 0
            lost = [key for key, value in before.items() if now.get(key) != value]
            if lost and not (ended and job.name == "tune"):  # an ended tuner has its tree instead
                job.faults.append(f"lost {lost[:3]} after kill {kills}")
            before = now
            if code is not None:
                if code:
                    tail = (folder / "log.txt").read_text(errors="replace")[-300:]
                    job.faults.append(f"exit {code}: {tail}")
                break
            kills += 1
        else:
            if code := run(job, folder, again=True):
                job.faults.append(f"exit {code} at the end")
        found = job.end(folder)
        if job.afresh is not None:
            words, read = job.afresh
            if code := run(job, folder, again=False, words=words):
                job.faults.append(f"exit {code} of the unbroken run")
            want = read(folder)
        if found != want:
            job.faults.append("the end differs from the unbroken run's")
        return kills


def main() -> None:
    """Share the kills out over the jobs and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of jobs; all if left out")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    sys.path.append(str(ROOT / "tools" / "lantern-emoji"))
    from support.models import write_tiny_model
    from support.training import write_tiny_training

    import lantern_accel_cpu.native.library

    rng, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        (base / "work").mkdir()
        lantern_accel_cpu.native.library.load_or_warn()
        model = write_tiny_model(base / "model")
        write_tiny_training(base)
        chosen = [j for j in jobs(model, base) if not given.only or j.name in given.only]
        each = -(-given.kills // len(chosen))
        for job in chosen:
            stage = job.name.removeprefix("train ")
            start = base / "starts" / stage
            shutil.copytree(base / "start", start)
            if job.name.startswith("train "):  # what the stages before it made
                shutil.copytree(base / "work", start / "work")
                shutil.rmtree(start / "work" / stage, ignore_errors=True)
            whole = base / f"whole-{stage}"
            shutil.copytree(start, whole)
            at = time.monotonic()
            if code := run(job, whole, again=False):
                raise SystemExit(f"{job.name} ends with {code}: {(whole / 'log.txt').read_text()}")
            job.seconds = time.monotonic() - at
            want = job.end(whole)
            if job.name.startswith("train "):
                shutil.copytree(whole / "work", base / "work", dirs_exist_ok=True)
            while job.kills < each and len(job.faults) < 5:
                job.kills += max(broken(job, start, want, rng, min(5, each - job.kills)), 1)
            print(
                f"{job.name}: {job.kills} kills, {job.seconds:.1f} s unbroken, {job.faults}",
                flush=True,
            )
    figures = {
        "kills": sum(job.kills for job in chosen),
        "seconds": round(time.monotonic() - began, 1),
        "jobs": {job.name: {"kills": job.kills, "faults": job.faults} for job in chosen},
    }
    print(json.dumps(figures, indent=2))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(any(job.faults for job in chosen))


if __name__ == "__main__":
    main()
