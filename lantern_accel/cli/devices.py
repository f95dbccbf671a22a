"""``lantern-accel devices``: what can be decoded on here, and why not on the rest."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from lantern_accel.cli.console import say

if TYPE_CHECKING:
    from lantern_accel.device.plugins import DeviceStatus

STYLES = {"ready": "green", "not available": "dim", "broken": "red"}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("devices")(devices)


def devices(
    device: str | None = typer.Argument(
        None, metavar="DEVICE", help="Open this device and print what is known about it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the devices, and say why one is not available."""
    import json

    from lantern_accel.device.plugins import devices_report, open_backend

    if device is not None:
        with open_backend(device) as backend:
            facts = backend.facts().model_dump(mode="json")
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
            return
        for name, value in facts.items():
            say(_shown(value), label=name, style="bold")
        return
    report = devices_report()
    if as_json:
        typer.echo(json.dumps([one.model_dump(mode="json") for one in report], indent=2))
        return
    for one in report:
        say(describe(one), label=one.name, style=STYLES[one.state])


def describe(status: DeviceStatus) -> str:
    """Say in one line what is there, or why it is not and what to install."""
    if status.state == "ready":
        many = Counter(status.devices)
        names = (f"{n} x {name}" if n > 1 else name for name, n in many.items())
        return f"ready ({'; '.join(names)})"
    text = f"{status.state}: {status.reason}"
    return f"{text}; {status.install}" if status.install else text


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return str(value)
