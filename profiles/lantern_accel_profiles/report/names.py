"""Names of runs that a reader understands: the device, and what distinguishes two runs of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.store import COMMIT, READ

#: What ``lantern-accel profile`` names a run that nobody named: device, moment, chance.
GENERATED = re.compile(r".+-\d{8}-\d{4}-[0-9a-f]{8}")


def short_device(name: str) -> str:
    """Return a device's name without its maker's marks and without the runtime that reached it."""
    device = re.sub(r"\s+through \S+$", "", name, flags=re.I)
    bare = re.sub(r"\((?:R|TM|C)\)|\b(?:CPU|Processor)\b", " ", device, flags=re.I)
    return " ".join(bare.split()) or device


def device_words(run: Run) -> str:
    """Return a device's name and, where it is known, its design: ``AMD EPYC (Zen 3)``."""
    facts = run.environment.device
    name = short_device(facts.name)
    return f"{name} ({facts.generation})" if facts.generation else name


def hardware_words(run: Run) -> str:
    """Return what of a device was used: ``2 virtual cores, 24 GiB``; empty where nothing is known."""
    facts = run.environment.device
    kind = "virtual " if facts.virtual else ""
    parts = [] if facts.cores is None else [f"{facts.cores} {kind}cores"]
    if facts.memory_bytes:
        parts.append(f"{round(facts.memory_bytes / 2**30)} GiB")
    return ", ".join(parts)


def readable_names(runs: Sequence[Run]) -> list[Run]:
    """Return runs under names that a reader understands; a name that somebody chose stays.

    Runs of one device are distinguished by what differs between them: runtime, threads, dtype, weights,
    options, kernels, torch, commit; where nothing does, by a number. Where runs of one model differ in
    dtype or weights, every name says them, since they are other work.
    """
    labels = [_label(run, runs) for run in runs]
    taken = {label for run, label in zip(runs, labels, strict=True) if not is_generated(run)}
    found: list[Run] = []
    for run, label in zip(runs, labels, strict=True):
        name = label
        if is_generated(run):
            alike = (f"{label} ({number})" for number in itertools.count(2))
            name = next(one for one in itertools.chain([label], alike) if one not in taken)
            taken.add(name)
        found.append(run.model_copy(update={"name": name}))
    return found


def is_generated(run: Run) -> bool:
    """Return whether nobody named a run."""
    return GENERATED.fullmatch(run.name) is not None


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what differs between runs besides their devices: values in their order, by property."""
    found = {name: [read(run) for run in runs] for name, (read, _) in PROPERTIES.items()}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _label(run: Run, runs: Sequence[Run]) -> str:
    device, chosen = device_words(run), not is_generated(run)
    rest = [one for one in runs if device_words(one) == device]
    words = [run.name if chosen else device]
    for name, (read, written) in PROPERTIES.items():
        alike = [one for one in rest if read(one) == read(run)]
        same_model = [one for one in runs if one.settings.model == run.settings.model]
        other_work = name in OTHER_WORK and len({read(one) for one in same_model}) > 1
        if other_work or (len(alike) < len(rest) and not chosen):
            words.append(written.format(read(run)))
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


def _kernels(run: Run) -> str:
    """Return the last short value among a device's notes, which names its kernels."""
    values = [f"{note}: ".split(": ")[1].upper() for note in run.environment.device.notes]
    return next((one for one in reversed(values) if 0 < len(one) <= 16), "unnamed")


#: What may differ between runs of one device, and how a label says it.
PROPERTIES: dict[str, tuple[Callable[[Run], str], str]] = {
    "runtime": (lambda run: run.environment.device.backend, "through {}"),
    "threads": (lambda run: str(run.environment.threads or "unknown"), "threads {}"),
    "dtype": (lambda run: run.settings.dtype, "{}"),
    "weights": (_weights, "{} weights"),
    "options": (_options, "{}"),
    "kernels": (_kernels, "{} kernels"),
    "torch": (lambda run: run.environment.torch, "torch {}"),
    "driver": (lambda run: run.environment.device.driver or "unknown", "driver {}"),
    "commit": (_commit, "commit {}"),
}
#: Those that make runs of one model other work.
OTHER_WORK = ("dtype", "weights")


def setup_of(run: Run) -> tuple[object, ...]:
    """Return what runs share that repeat one measurement; a name that somebody chose is one of its own.

    That are the device, the model, the protocol and all software.
    """
    device = device_words(run) if is_generated(run) else run.name
    what = device, run.settings.model, run.settings.plan.quick
    return *what, *(read(run) for read, _ in PROPERTIES.values())
