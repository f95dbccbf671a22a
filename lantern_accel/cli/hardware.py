"""``lantern-accel hardware``: the devices whose limits are known, with the source of each figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import say

if TYPE_CHECKING:
    from lantern_accel.device.datasheets import DeviceProfile


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("hardware")(hardware)


def hardware(
    name: str | None = typer.Argument(
        None, metavar="NAME", help="Show every figure of this device, with its source."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List what is known of devices: peaks, memory, power, each figure with its source."""
    import json

    from lantern_accel.device.datasheets import all_profiles, load_profile

    found = [load_profile(name)] if name is not None else all_profiles()
    if as_json:
        typer.echo(json.dumps([one.model_dump(mode="json") for one in found], indent=2))
        return
    for one in found:
        say(describe(one), label=one.name, style="bold")
        if name is not None:
            for field, figure in one.figures().items():
                say(f"{figure.value:g} ({figure.kind}: {figure.source})", label=field, style="dim")


def describe(profile: DeviceProfile) -> str:
    """Return one line: what it is, its fastest dtype, memory, bandwidth and power."""
    figures = profile.peak_flops
    dtype = "bfloat16" if "bfloat16" in figures else next(iter(figures))
    parts = [
        f"{profile.vendor} {profile.model}",
        f"{figures[dtype].value / 1e12:g} TFLOP/s {dtype}",
    ]
    if profile.bandwidth_bytes_per_s is not None:
        parts.append(f"{profile.bandwidth_bytes_per_s.value / 1e9:g} GB/s")
    if profile.memory_bytes is not None:
        parts.append(f"{profile.memory_bytes.value / 2**30:.0f} GiB")
    if profile.power_w is not None:
        parts.append(f"{profile.power_w.value:g} W")
    kinds = {one.kind for one in profile.figures().values()}
    parts.append(" and ".join(sorted(kinds)) + " figures")
    return ", ".join(parts)
