"""Names of runs that a reader understands: the device, and what distinguishes two runs of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime

from lantern_accel.measure.record import Run

#: What ``lantern-accel profile`` names a run that nobody named: device, moment, chance.
GENERATED = re.compile(r".+-(?P<moment>\d{8}-\d{4})-[0-9a-f]{8}")
#: A commit that is known, and as many of its characters as people read.
COMMIT, READ = re.compile(r"[0-9a-f]{7,64}"), 7


def short_device(name: str) -> str:
    """Return a device's name without the marks that its maker adds."""
    bare = re.sub(r"\((?:R|TM|C)\)|\b(?:CPU|Processor)\b", " ", name, flags=re.I)
    return " ".join(bare.split()) or name


def readable_names(runs: Sequence[Run]) -> list[Run]:
    """Return runs under names that a reader understands; a name that somebody chose stays.

    Runs of one device are distinguished by what differs between them: threads, dtype, weights, options,
    torch, commit; where nothing does, by the moment.
    """
    taken = {run.name for run in runs if not GENERATED.fullmatch(run.name)}
    labels = [_label(run, runs) for run in runs]
    found: list[Run] = []
    for run, label in zip(runs, labels, strict=True):
        if generated := GENERATED.fullmatch(run.name):
            if labels.count(label) > 1:
                moment = datetime.strptime(generated["moment"], "%Y%m%d-%H%M")
                label = f"{label}, {moment:%Y-%m-%d %H:%M}"
            name = run.name if label in taken else label
            taken.add(name)
            run = run.model_copy(update={"name": name})
        found.append(run)
    return found


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what differs between runs besides their devices: values in their order, by property."""
    found = {name: [read(run) for run in runs] for name, (read, _) in _PROPERTIES.items()}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _label(run: Run, runs: Sequence[Run]) -> str:
    device = short_device(run.environment.device.name)
    rest = [one for one in runs if short_device(one.environment.device.name) == device]
    words = [device]
    for read, written in _PROPERTIES.values():
        alike = [one for one in rest if read(one) == read(run)]
        if len(alike) < len(rest):
            words.append(re.sub("^1 threads$", "1 thread", written.format(read(run))))
            rest = alike
    return ", ".join(words)


def _commit(run: Run) -> str:
    commit = run.environment.commit
    changed = " with changes" if run.environment.dirty is True else ""
    return (commit[:READ] if COMMIT.fullmatch(commit) else "unknown") + changed


def _options(run: Run) -> str:
    given = {k: v for k, v in run.settings.options.items() if k != "threads"}
    return ", ".join(f"{k}={v}" for k, v in sorted(given.items())) or "no options"


def _weights(run: Run) -> str:
    return run.settings.rounding.weights if run.settings.rounding else run.settings.weights


#: What may differ between runs of one device, and how a label says it.
_PROPERTIES: dict[str, tuple[Callable[[Run], str], str]] = {
    "threads": (lambda run: str(run.environment.threads or "unknown"), "{} threads"),
    "dtype": (lambda run: run.settings.dtype, "{}"),
    "weights": (_weights, "{} weights"),
    "options": (_options, "{}"),
    "torch": (lambda run: run.environment.torch, "torch {}"),
    "commit": (_commit, "commit {}"),
}
