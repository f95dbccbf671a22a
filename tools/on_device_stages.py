"""The stages of ``tools/on_device.py``: commands in the order of what they are worth on a new device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantern_accel.cli.conform import GROUPS
from tools.on_device_report import (
    bench_text,
    conform_text,
    facts_text,
    generate_text,
    kernels_text,
    profile_text,
    race_text,
    stepcost_text,
    tune_text,
)

#: Sizes whose step costs come first, then what else is measured of them.
FIRST = ("llamagen-xl-384", "llamagen-b-256")
SIZES = ("llamagen-xl-384", "llamagen-3b-384")
#: Weights in fewer bits whose steps are raced against the same with all of them.
FEWER = ("int8", "int4")
#: Groups of the kit that a short look, and another set of options, are checked by.
SHORT = ("kv", "operation", "attention", "accept")
OTHERS = ("kv", "operation", "attention", "replay")
#: Processes with the device open at most, where the host has the processors.
JOBS = max(min(12, 3 * (os.cpu_count() or 1) // 4), 2)


@dataclass(frozen=True)
class Stage:
    """One command: its arguments, the file that it writes, and how that is shown.

    ``share``: of all minutes, the most that it may take. ``script``: one of ``tools/`` instead of
    ``lantern-accel``. ``resume``: what completes a file that is there; without, the command does so by
    itself, or begins again. ``extra``: arguments that change no result.
    """

    name: str
    arguments: list[str]
    result: Path
    show: Callable[[dict[str, Any]], str]
    share: float = 0.3
    script: str = ""
    resume: str = ""
    extra: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """What it runs, as the report names it."""
        return " ".join([self.script or "lantern-accel", *self.arguments])


def label(options: Mapping[str, Any]) -> str:
    """Name a set of options in a file's name; "" for the default."""
    return "".join(f"-{key}={value}" for key, value in options.items())


def stages(
    device: str,
    folder: Path,
    quick: bool,
    *,
    variants: Sequence[Mapping[str, Any]] = ({},),
    sizes: Sequence[str] = (),
    clone: Path | None = None,
    race_size: str = "XL",
    seconds: float | None = None,
    jobs: int = JOBS,
) -> list[Stage]:
    """Return all stages in order; ``quick`` leaves out what takes long.

    ``variants``: sets of the backend's options, the default first. ``clone``: the folder of the official
    LlamaGen. ``seconds``: that all may take, so that no check may take many. ``jobs``: processes that may
    hold the device at one time.
    """
    on = ["--device", device]
    once = ["--batch", "1"]
    repeats = ["--repeats", "1" if quick else "5"]

    def at(name: str) -> Path:
        return folder / f"{name}.json"

    def conform(
        options: Mapping[str, Any], groups: Sequence[str], share: float, called: str = "conform"
    ) -> Stage:
        name = f"{called}{label(options)}"
        only = [f"--only={group}" for group in groups]
        given = [f"--option={key}={value}" for key, value in options.items()]
        arguments = ["conform", device, *only, *given, f"--output={at(name)}"]
        # One that hangs is told before the stage is stopped.
        limit = [f"--limit={max(0.9 * share * seconds, 1):.0f}"] if seconds else []
        extra = [f"--jobs={jobs}", *limit]
        return Stage(name, arguments, at(name), conform_text, share, resume="--resume", extra=extra)

    def stepcost(
        size: str, options: Mapping[str, Any], nodes: str, images: list[str], more: str = ""
    ) -> Stage:
        name = f"stepcost-{Path(size).stem}{label(options)}"
        arguments = ["stepcost", f"--size={size}", *on, *images, f"--nodes={nodes}", *repeats]
        arguments += [f"--option={key}={value}" for key, value in options.items()]
        return Stage(
            name + more, [*arguments, f"--output={at(name)}"], at(name), stepcost_text, 0.25
        )

    def kernels(size: str) -> Stage:
        """Look at a captured step by kernel."""
        name = f"kernels-{Path(size).stem}"
        arguments = [size, *on, f"--output={at(name)}"]
        return Stage(name, arguments, at(name), kernels_text, 0.15, script="step_kernels.py")

    def fewer(size: str, weights: str) -> Stage:
        """Time plain steps and passes of 16 and 120 rows, with guidance, by weights in fewer bits."""
        name = f"weights-{Path(size).stem}-{weights}"
        arguments = ["stepcost", f"--size={size}", *on, *once, "--strategy=vanilla", "--nodes=8,60"]
        arguments += [f"--weights={weights}", *repeats, f"--output={at(name)}"]
        return Stage(name, arguments, at(name), stepcost_text, 0.25)

    def bench(name: str, images: list[str]) -> Stage:
        arguments = ["bench", *on, *images, *repeats, f"--output={at(name)}"]
        return Stage(name, arguments, at(name), bench_text)

    default, *others = variants
    picture = ["generate", "red heart", "dog face", *on, "--overwrite", "--seed=7", "--grid"]
    picture += ["--quiet", f"--output={folder / 'pictures.png'}"]
    chosen = sizes or (SIZES[:1] if quick else SIZES)
    ahead = [size for size in FIRST if size in chosen or not (sizes or quick)]
    found = [
        Stage("device", ["devices", device, "--json"], at("device"), facts_text, 0.2),
        # Its own kernels first: what they are compiled to is kept for all that follows.
        conform(default, ["own"], 0.3, "kernels"),
        *(stepcost(size, default, "16,8,60", once) for size in ahead[:1]),
        *(kernels(size) for size in ahead[:1] if not quick),
        *(stepcost(size, default, "16,8,60", once) for size in ahead[1:]),
        conform(default, SHORT if quick else GROUPS, 0.4),
        Stage(
            "generate",
            [*picture, f"--stats={at('generate')}"],
            at("generate"),
            generate_text,
            0.25,
        ),
        bench("bench-quick" if quick else "bench", once),
        *(fewer(chosen[0], weights) for weights in FEWER if not quick),
        *(stepcost(size, default, "16,8,60", once) for size in chosen if size not in ahead),
    ]
    for options in () if quick else others:
        found.append(conform(options, OTHERS, 0.3))
        found += [stepcost(size, options, "16,8,60", once) for size in chosen]
    most = [f"--max-seconds={max(0.2 * seconds, 1):.0f}"] if seconds else []
    tune = ["tune", *on, *repeats, f"--output={at('tune')}"]
    found.append(Stage("tune", tune, at("tune"), tune_text, extra=most))
    if not quick:
        batches = ["--batch", "1", "--batch", "4", "--batch", "8"]
        found.append(bench("bench-batches", batches))
        found += [stepcost(one, default, "16,8,32,60", batches, "-batches") for one in chosen]
    whole = "profile-quick" if quick else "profile"
    arguments = ["profile", *on, *(["--quick"] if quick else []), f"--output={at(whole)}"]
    found.append(Stage(whole, arguments, at(whole), profile_text, 1.0, resume="--resume"))
    if clone is not None:
        name = "race_official"
        arguments = [str(clone), f"--size={race_size}", *on, *repeats, f"--output={at(name)}"]
        runners = ("official", "gpt-fast", "ours")
        arguments += ["--warmups=3", *(f"--runner={runner}" for runner in runners)]
        found.append(Stage(name, arguments, at(name), race_text, 1.0, script=f"{name}.py"))
    return found
