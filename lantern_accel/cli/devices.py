"""``lantern-accel devices`` lists available devices; ``hardware`` lists the limits of known ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import print_json, say, stdout_to_stderr
from lantern_accel.cli.options import AsJson

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend
    from lantern_accel.device.datasheets import DeviceProfile
    from lantern_accel.device.plugins import DeviceStatus

STYLES = {"ready": "green", "not available": "dim", "broken": "red"}


def devices(
    device: str | None = typer.Argument(
        None, metavar="DEVICE", help="Open this device and print its properties."
    ),
    verbose: bool = typer.Option(
        False, "--verbose", help="Show which steps the device runs itself, and why not the others."
    ),
    as_json: AsJson = False,
) -> None:
    """List devices, with the reason if one is unavailable, and supported host libraries."""
    from lantern_accel.device.plugins import devices_report, open_backend
    from lantern_accel.families.releases import TESTED, find_release, problem

    if device is not None:
        with stdout_to_stderr(), open_backend(device) as backend:
            steps = _own_steps(backend) if verbose else {}
            facts = backend.facts().model_dump(mode="json")
        if as_json:
            return print_json({**facts, "own_steps": steps} if verbose else facts)
        for name, value in facts.items():
            said = "; ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            say("unknown" if value is None else said, label=name, style="bold")
        return _say_steps(steps)
    with stdout_to_stderr():  # the list alone goes to standard output
        report = devices_report()
    if as_json:
        return print_json([one.model_dump(mode="json") for one in report])
    for one in report:
        say(describe(one), label=one.name, style=STYLES[one.state])
        if verbose and one.state == "ready":
            with open_backend(one.name) as backend:
                _say_steps(_own_steps(backend))
    for library in filter(find_release, TESTED):
        say(
            problem(library) or f"{find_release(library)}, a tested release",
            label=library,
            style="dim",
        )


def _own_steps(backend: Backend) -> dict[str, str]:
    """Build a tiny model's steps of every kind; return why each was rejected, or an empty text."""
    from lantern_accel.device.context import inference
    from lantern_accel.testing import tiny

    for strategy in ("vanilla", "scd", "lantern++", "eagle2"):
        with inference(backend):
            tiny.tiny_engine(backend, strategy, dtype=backend.compute_dtypes()[0])
    return dict(backend.own_steps)


def _say_steps(steps: dict[str, str]) -> None:
    for name, why in steps.items():
        how = f"operator by operator: {why}" if why else "in the device's own calls"
        say(how, label=name, style="dim" if why else "green")


def describe(status: DeviceStatus) -> str:
    """Return one line: the devices, or why there are none and what to install."""
    if status.state == "ready":
        many = Counter(status.devices)
        names = (f"{n} x {name}" if n > 1 else name for name, n in many.items())
        return f"ready ({'; '.join(names)})"
    text = f"{status.state}: {status.reason}"
    return f"{text}; {status.install}" if status.install else text


def hardware(
    name: str | None = typer.Argument(
        None, metavar="NAME", help="Show all figures of this device."
    ),
    as_json: AsJson = False,
) -> None:
    """List the limits of known devices: peak rates, memory and power, each with its source."""
    from lantern_accel.device.datasheets import all_profiles, load_profile

    found = [load_profile(name)] if name is not None else all_profiles()
    if as_json:
        return print_json([one.model_dump(mode="json") for one in found])
    for one in found:
        say(_limits(one), label=one.name, style="bold")
        if name is not None:
            for field, figure in one.figures().items():
                say(f"{figure.value:g} ({figure.kind}: {figure.source})", label=field, style="dim")


def _limits(profile: DeviceProfile) -> str:
    """Return one line: what it is, its fastest dtype, memory, bandwidth and power."""
    figures = profile.peak_flops
    dtype = "bfloat16" if "bfloat16" in figures else next(iter(figures))
    limits = (
        (figures[dtype], 1e12, f"{{:g}} TFLOP/s {dtype}"),
        (profile.bandwidth_bytes_per_s, 1e9, "{:g} GB/s"),
        (profile.memory_bytes, 2**30, "{:.0f} GiB"),
        (profile.power_w, 1, "{:g} W"),
    )
    parts = [form.format(one.value / unit) for one, unit, form in limits if one is not None]
    kinds = sorted({one.kind for one in profile.figures().values()})
    whole = [f"{profile.vendor} {profile.model}", *parts, f"{' and '.join(kinds)} figures"]
    return ", ".join(whole)
