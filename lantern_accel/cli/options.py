"""Options that several commands take: a backend's ``--option name=value``, and a request's settings."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import typer

from lantern_accel.bounds import MOST_THREADS

#: For a command's signature; every command that opens a device takes it.
OPTION = typer.Option(
    [], metavar="NAME=VALUE", help="An option of the backend (compile=on); repeat for several."
)

#: For a command's signature: what it runs on.
DEVICE = typer.Option(
    "auto", "--device", "-d", help="A backend's name, NAME:INDEX, or auto (the best)."
)
MODEL = typer.Option(
    "lantern-emoji",
    "--model",
    "-m",
    help="A name that `lantern-accel models` lists, or a folder or file of weights.",
)
DTYPE = typer.Option("auto", help="auto, float32, bfloat16 or float16.")
THREADS = typer.Option(
    None, min=1, max=MOST_THREADS, help="Processor threads, where the backend has them."
)

#: For a command's signature; every command that loads a model may take it.
WEIGHTS = typer.Option(
    "full",
    help="The target's weights: full, or in fewer bits (int8, int6, int4), whose price is measured once.",
)


def whole_numbers(option: str, given: Sequence[str], least: int, most: int) -> list[int]:
    """Read a repeatable option of whole numbers, several with commas between, each kept once.

    Raises RequestError for anything that is none from ``least`` to ``most``.
    """
    from lantern_accel.bounds import whole
    from lantern_accel.errors import RequestError

    found = []
    for word in _words(given):
        number = whole(word, least, most)
        if number is None:
            raise RequestError(
                f"{option} takes numbers from {least} to {most}, such as 1,4, not {word[:40]!r}"
            )
        found.append(number)
    return list(dict.fromkeys(found))


def numbers(option: str, given: Sequence[str], least: float, most: float) -> list[float]:
    """Read a repeatable option of numbers, several with commas between; raises RequestError."""
    from lantern_accel.errors import RequestError

    found = []
    for word in _words(given):
        try:
            number = float(word) if len(word) <= 64 and word.isascii() else math.nan
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise RequestError(
                f"{option} takes numbers from {least:g} to {most:g}, such as 0,1, not {word[:40]!r}"
            )
        found.append(number)
    return list(dict.fromkeys(found))


def strategy_words(given: Sequence[str], presets: bool = False) -> list[str]:
    """Read ``--strategy``, repeated or with commas between, and refuse unknown names before any work.

    A word with settings (``lantern++:k=10,lambda=2``) or a ``.json`` file stays whole and is not looked
    up; nor are presets where they may stand. Raises StrategyError and RequestError.
    """
    from lantern_accel.errors import RequestError, StrategyError, did_you_mean
    from lantern_accel.strategy.presets import PRESETS
    from lantern_accel.strategy.sources import named_sources
    from lantern_accel.strategy.values import AUTO, SELF, STRATEGIES

    found = []
    known = {AUTO, SELF, *STRATEGIES, *named_sources()}
    known |= {one.name for one in PRESETS} if presets else set()
    for text in given:
        if ":" in text or text.endswith(".json"):
            found.append(text.strip())
            continue
        for word in _words([text]):
            if word not in known:
                raise StrategyError(f"unknown strategy {word[:80]!r}{did_you_mean(word, known)}")
            found.append(word)
    if not found:
        raise RequestError(
            "--strategy names none; give names with commas between, such as vanilla,eagle"
        )
    return list(dict.fromkeys(found))


def _words(given: Sequence[str]) -> list[str]:
    return [word.strip() for text in given for word in text.split(",") if word.strip()]


def finite(value: Any) -> Any:
    """Refuse nan and inf, which typer's own bounds may let through; the callback of floats."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, float) and not math.isfinite(one):
            raise typer.BadParameter(f"{one} is not a number that can be used.")
    return value


def read_options(given: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Read ``name=value`` pairs; raises RequestError for what is none."""
    from lantern_accel.bounds import whole
    from lantern_accel.errors import RequestError

    options: dict[str, Any] = {} if threads is None else {"threads": threads}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise RequestError(f"the option {text[:80]!r} is not of the form NAME=VALUE")
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
