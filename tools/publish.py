"""Measure all figures of README and the benchmarks on this machine: ``python tools/publish.py``.

Two runs of every part, each in a process and with a cache of its own, so that `auto` measures again. What
is compared is decoded in turns. A part's result is a file below ``build/published``; the same command at
the same commit goes on with the parts that are missing. ``python tools/figures.py`` then makes the tables
and the chart. ``--clone`` names a clone of FoundationVision/LlamaGen, whose sampler is measured too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import KINDS, PUBLISHED, ROOT, kernels

from lantern_accel.files import write_json, write_whole

LISTS = ROOT / "tools" / "lantern-emoji"
#: The seed of the draw from the training list, how many prompts of each kind, and how many at a size.
DRAW, PROMPTS, SIZED_PROMPTS = 2711, 24, 4
#: Strategies of the bundled model: name, and whether the draft head may draft.
STRATEGIES = (
    ("vanilla", True), ("auto", True), ("auto", False), ("lantern", True), ("lantern++", True),
)  # fmt: skip
SIZE, BATCHES, RUNS, SEEDS, LAPS = "llamagen-b-256", (1, 4), 2, (1, 2), 5
#: Parts, and their minutes on two cores, roughly; the last two are measured once.
MINUTES = {"bundled": 6.0, "sized": 4.0, "beside-bundled": 1.0, "beside-B": 2.0}
ONCE = {"passes-b": 1.0, "passes-xl": 4.0}

Cell = tuple[str, bool, int]
"""A strategy's name, whether the draft head may draft, and the batch size."""

Draw = Callable[[Cell, int, int], tuple[float, float, float]]
"""From a cell, a prompt's number and a seed: seconds an image, tokens a step, total variation a token."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def prompts(count: int = PROMPTS) -> dict[str, list[str]]:
    """Return prompts by kind: composed ones, and a fixed draw from the training list."""
    from lantern_accel.generation.built_in_prompts import REPORTING, TUNING

    composed, trained = (
        [line.strip() for line in (LISTS / name).read_text(encoding="utf-8").split("\n") if line]
        for name in ("composed.txt", "prompts.txt")
    )
    # Without the built-in prompts, which constants were chosen on.
    pool = sorted(set(trained) - {*TUNING, *REPORTING})
    return dict(
        zip(KINDS, (composed[:count], random.Random(DRAW).sample(pool, count)), strict=True)
    )


def in_turns(cells: Sequence[Cell], count: int, seeds: Sequence[int], draw: Draw) -> list[Any]:
    """Return one row a cell and prompt; a prompt's cells are drawn in an order that changes."""
    for cell in cells:
        draw(cell, 0, seeds[0])
    rows: list[Any] = []
    began = time.monotonic()
    for number in range(count):
        found: dict[Cell, list[tuple[float, float, float]]] = {cell: [] for cell in cells}
        for seed in seeds:
            for cell in cells if (number + seed) % 2 else cells[::-1]:
                found[cell].append(draw(cell, number, seed))
        for (name, head, batch), each in found.items():
            seconds, tokens, lost = (list(one) for one in zip(*each, strict=True))
            row = {"strategy": name, "head": head, "batch": batch, "prompt": number}
            rows.append(row | {"seconds": seconds, "tokens_per_step": tokens, "lost": lost})
        left = (time.monotonic() - began) * (count / (number + 1) - 1)
        say(f"  {number + 1} of {count} prompts, about {left / 60:.1f} min left of this part")
    return rows


def run_bundled(given: Any, model: str = "lantern-emoji") -> Iterator[dict[str, Any]]:
    """Measure whole requests of the bundled model, with its draft head and without."""
    import lantern_accel
    from lantern_accel_profiles.measure.environment import describe

    asked = [one for of in given.prompts.values() for one in of]
    with lantern_accel.load(model) as whole, lantern_accel.load(model) as bare:
        bare.model.target.draft_head = None  # as without one

        def generate(cell: Cell, number: int, seed: int) -> tuple[float, float, float]:
            name, head, batch = cell
            stats = (
                (whole if head else bare)
                .generate(
                    asked[number], strategy=name, num_images=batch, batch_size=batch, seed=seed
                )
                .stats
            )
            seconds = (stats.seconds.total - stats.seconds.measuring) / batch
            return seconds, stats.step_compression, stats.total_variation_per_token

        for row in in_turns(_cells(STRATEGIES), len(asked), given.seeds, generate):
            yield row | {"model": "bundled", "prompt": asked[row["prompt"]]}
        environment = describe(whole.backend, whole.dtype)
        yield {"environment": environment.model_dump(mode="json")}


def run_size(
    given: Any, model: str = "lantern-emoji", size: str = SIZE
) -> Iterator[dict[str, Any]]:
    """Measure random weights of a size, whose steps add as many tokens as those of the bundled model."""
    import lantern_accel

    asked = [one for of in given.prompts.values() for one in of]
    for batch in BATCHES:
        with lantern_accel.load(model) as whole, lantern_accel.load(model) as bare:
            bare.model.target.draft_head = None  # as without one
            made = {
                head: _replaying(small, asked, batch, given.seeds[:1], size)
                for head, small in ((True, whole), (False, bare))
            }

            def generate(
                cell: Cell, number: int, seed: int, made: Any = made
            ) -> tuple[float, float, float]:
                name, head, batch = cell
                large, replay = made[head]
                replay.request = number, seed
                strategy, sampling = large.strategy(name), large.sampling()
                done, seconds = large.decode_only([number] * batch, strategy, sampling, seed)
                return seconds / batch, done.step_compression, 0.0

            cells = [(name, head, batch) for name, head in STRATEGIES[:3]]
            for row in in_turns(cells, len(asked), given.seeds[:1], generate):
                yield row | {"model": size, "prompt": asked[row["prompt"]]}
            for large, _ in made.values():
                large.close()


def _cells(strategies: Sequence[tuple[str, bool]]) -> list[Cell]:
    return [(name, head, batch) for batch in BATCHES for name, head in strategies]


def _replaying(small: Any, asked: list[str], batch: int, seeds: Sequence[int], size: str) -> Any:
    """Return a pipeline with random weights of a size, and what replays the small one's counts."""
    from replayed_counts import Recorder, Replay

    from lantern_accel.device.plugins import open_backend
    from lantern_accel.families.base import Conditions
    from lantern_accel.families.random_weights import manifest_of_size, random_model, with_head
    from lantern_accel.generation.pipeline import Pipeline

    backend = open_backend(small.backend.name, {})
    with backend.inference():
        manifest = manifest_of_size(size)
        if getattr(small.model.target, "draft_head", None) is not None:
            manifest = with_head(manifest)  # its drafts are replayed
        model = random_model(manifest, backend, small.dtype)
    large = Pipeline(model, backend, small.dtype)

    def conditions(prompts: Any, size: Any = None) -> Conditions:
        found = model.family.tiny_conditions(model, len(prompts), 0)
        values = found.condition.to(backend.device)
        values = values.to(small.dtype) if values.is_floating_point() else values
        return Conditions(values, found.mask.to(backend.device), found.shape)

    if getattr(manifest.target, "conditioning", "text") != "class":  # classes are prompts' numbers
        large.conditions = conditions  # type: ignore[method-assign]  # of captions that it has none for
    return large, Replay(large, Recorder(small, asked, batch, seeds))


def run_others(given: Any, size: str) -> Iterator[dict[str, Any]]:
    """Measure plain decoding in turns with the official sampler and transformers' loop."""
    from race_official import main as race

    runners = ["transformers", "ours"]
    if given.clone is None:
        yield {
            "skipped": "the official sampler: give a clone of FoundationVision/LlamaGen as --clone"
        }
    else:
        runners.insert(0, "official")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "race.json"
        words = [f"--runner={one}" for one in runners] + [f"--repeats={given.laps}", "-o", str(out)]
        if race([*([str(given.clone)] if given.clone else []), "--size", size, *words]):
            raise RuntimeError("the race ended in the error above")
        for one in json.loads(out.read_text(encoding="utf-8"))["runners"]:
            laps = [lap["seconds"] for lap in one["laps"]]
            yield {"model": size, "program": one["name"], "note": one["note"], "seconds": laps}


def passes(given: Any, size: str) -> Iterator[dict[str, Any]]:
    """Measure passes over rows in turns with llama.cpp's on weights of the same shapes."""
    from race_llama import rows

    try:
        import gguf  # noqa: F401  # only whether it is there
        import llama_cpp  # noqa: F401  # only whether it is there
    except ImportError as missing:
        yield {"skipped": f"llama.cpp: {missing}; pip install gguf llama-cpp-python"}
        return
    yield from rows(size, given.laps, say)


def run_part(part: str, given: Any) -> list[dict[str, Any]]:
    """Return the rows of a part."""
    from lantern_accel.device.host_load import HostLoad

    name, _, of = part.partition("-")
    does: Any = {"bundled": run_bundled, "sized": run_size, "beside": run_others, "passes": passes}[
        name
    ]
    load = HostLoad()
    found = list(does(given, of) if of else does(given))
    return [*found, {"others": load.share()}]


def collect(results: dict[str, list[dict[str, Any]]], given: Any, commit: str) -> dict[str, Any]:
    """Return the file of a machine from its parts' rows."""
    made: dict[str, Any] = {
        "kind": "lantern_accel.published", "schema_version": 1, "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "kernels": kernels(),
        "quick": given.quick, "prompts": given.prompts, "rows": [], "skipped": [], "others": {},
    }  # fmt: skip
    for name, rows in results.items():
        part, _, run = name.partition(".")
        for row in rows:
            if "environment" in row:
                made["environment"] = row["environment"]
            elif "others" in row:
                made["others"][name] = row["others"]
            elif "skipped" in row:
                made["skipped"] = sorted({*made["skipped"], row["skipped"]})
            else:
                made["rows"].append({"part": part, "run": int(run), **row})
    return made


def settings_of(quick: bool, clone: Path | None) -> SimpleNamespace:
    """Return how much is measured."""
    count, seeds, laps = (2, SEEDS[:1], 2) if quick else (PROMPTS, SEEDS, LAPS)
    return SimpleNamespace(
        quick=quick, clone=clone, laps=laps, seeds=seeds, prompts=prompts(count)
    )  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clone", type=Path, help="of FoundationVision/LlamaGen")
    parser.add_argument("--quick", action="store_true", help="two prompts, one run: a try")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="a part's, or the machine's file")
    asked = parser.parse_args(words)
    given = settings_of(asked.quick, asked.clone and asked.clone.resolve())
    if asked.part:
        if asked.part == "sized":
            given.prompts = {k: v[:SIZED_PROMPTS] for k, v in given.prompts.items()}
        write_json(asked.output, run_part(asked.part, given))
        return 0
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    if (
        subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
        and not given.quick
    ):
        parser.error("the checkout has changes that no commit holds; commit them or stash them")
    folder = ROOT / "build" / "published" / (commit[:12] + ("-quick" if given.quick else ""))
    folder.mkdir(parents=True, exist_ok=True)
    runs = range(1, (1 if given.quick else RUNS) + 1)
    waiting = [(f"{part}.{run}", m) for run in runs for part, m in MINUTES.items()]
    waiting += [(f"{part}.1", minutes) for part, minutes in ONCE.items()]
    results: dict[str, list[dict[str, Any]]] = {}
    failed, spent, planned = [], 0.0, 0.0
    for at, (name, minutes) in enumerate(waiting):
        path = folder / f"{name}.json"
        if not path.is_file():
            left = sum(m for _, m in waiting[at:]) * (spent / planned if planned else 1.0)
            say(f"{name}, {at + 1} of {len(waiting)}; about {left:.0f} min left of all")
            began = time.monotonic()
            part, _, run = name.partition(".")
            command = [sys.executable, __file__, "--part", part, "-o", str(path)]
            command += ["--quick"] * given.quick
            command += ["--clone", str(given.clone)] if given.clone else []
            own = {"LANTERN_ACCEL_CACHE": str(folder / f"cache-{run}")}
            done = subprocess.run(command, env={**os.environ, **own}, check=False)
            spent, planned = spent + (time.monotonic() - began) / 60, planned + minutes
            if done.returncode:
                failed.append(name)
                continue
        results[name] = json.loads(path.read_text(encoding="utf-8"))
    if failed:
        say(f"not measured: {', '.join(failed)}; the same command tries them again")
        return 1
    made = collect(results, given, commit)
    named = folder if given.quick else PUBLISHED
    out = asked.output or named / f"{device_file(made['environment']['device'])}.json"
    write_whole(out, text_of(made))
    say(f"{out}; then: python tools/figures.py")
    return 0


def text_of(made: dict[str, Any]) -> str:
    """Return the file of a machine as JSON, a row a line."""
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in made["rows"])
    head = json.dumps({**made, "rows": None}, indent=1, sort_keys=True)
    return head.replace('"rows": null', f'"rows": [\n{rows}\n]') + "\n"


def device_file(facts: dict[str, Any]) -> str:
    """Return a device's name in a file's."""
    words = [str(facts["name"]), str(facts.get("generation") or ""), f"{facts['cores']} cores"]
    kept = "".join(c if c.isalnum() else " " for c in " ".join(words).lower())
    return "-".join(word for word in kept.split() if word not in ("r", "tm", "processor", "cpu"))


if __name__ == "__main__":
    sys.exit(main())
