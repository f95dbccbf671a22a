"""Options that several commands take: a backend's ``--option name=value``, and a request's settings."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import typer

#: For a command's signature; every command that opens a device takes it.
OPTION = typer.Option(
    [], metavar="NAME=VALUE", help="An option of the backend (compile=on); repeat for several."
)

#: For a command's signature; every command that loads a model may take it.
WEIGHTS = typer.Option(
    "full",
    help="The target's weights: full, or in fewer bits (int8, int6, int4), whose price is measured once.",
)


def finite(value: Any) -> Any:
    """Refuse nan and inf, which typer's own bounds may let through; the callback of floats."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, float) and not math.isfinite(one):
            raise typer.BadParameter(f"{one} is not a number that can be used.")
    return value


def read_options(given: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Read ``name=value`` pairs; raises BackendError for what is none."""
    from lantern_accel.bounds import whole
    from lantern_accel.errors import BackendError

    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BackendError(f"the option {text[:80]!r} is not of the form NAME=VALUE")
        number = whole(value)
        options[name] = value if number is None else number
    return options


def settings_parameters(*leave_out: str) -> list[inspect.Parameter]:
    """Return the fields of :class:`Settings` as typer options, for a command's signature."""
    from lantern_accel.generation.settings import Settings

    found = []
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or name in leave_out:
            continue
        given = [str(one) for one in extra["names"]]  # type: ignore[union-attr]
        long = [] if any(one.startswith("--") for one in given) else [f"--{name.replace('_', '-')}"]
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, *long, *given, help=field.description),
                annotation=_kind(field.annotation, str(extra["shown"])),
            )
        )
    return found


def _kind(annotation: Any, shown: str) -> Any:
    """Return the type of a field on the command line: the first plain one of its union."""
    plain = [one for one in typing.get_args(annotation) if one in (bool, int, float, str)]
    return str if shown == "str" or not plain else plain[0]


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**settings`` an option for every field of :class:`Settings`."""
    own = inspect.signature(function, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    every = [*kept, *settings_parameters()]
    function.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in every}
    return function
