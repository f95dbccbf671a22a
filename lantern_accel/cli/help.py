"""Lists options in ``--help`` under headings, as plain text on a terminal, in a pipe and on the site."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import typer
from typer.core import TyperCommand

from lantern_accel.errors import EXIT_CODES

#: Headings in the order in which they are printed, and the parameters below each.
GROUPS: dict[str, tuple[str, ...]] = {
    "What to generate, and where it goes": (
        "output", "overwrite", "stats_path", "as_json", "prompts", "prompts_file", "prompt", "num_images",
        "size", "seed", "grid", "verbose", "no_metadata", "resume", "quiet", "share", "like",
    ),
    "Model": ("model", "use", "weights"),
    "Device": ("device", "dtype", "threads", "option", "batch", "batch_size"),
    "Drafting": ("strategy", "relaxed", "preset", "drafts", "window", "bits", "one", "tv_budget"),
    "Sampling": ("temperature", "top_k", "top_p", "cfg_scale", "guidance_scale", "negative_prompt"),
}  # fmt: skip
#: Which of the commands that measure is for what; docs/compare-hardware.md says more.
WHICH = (
    "To measure: `bench` compares strategies in minutes and prints a table. `profile` writes a run with "
    "quality loss and raw samples, for `compare`. `stepcost` times steps of real model sizes on random "
    "weights. `tune` finds the fastest settings of this device, and `generate` then uses them."
)
#: A Python type behind the name of an option or an argument, as typer writes it.
TYPE = re.compile(r" <(?:list\[)?(\w+)[^>]*>")
#: A command with fewer options than this lists them in one piece.
MANY = 18


def exit_codes() -> str:
    """Return every exit code and what it says, for ``--help``."""
    said = "; ".join(f"{code}: {text.partition(':')[0]}" for code, text in EXIT_CODES.items())
    return f"Exit codes (docs/troubleshooting.md): {said}."


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists many options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        every = self.get_params(ctx)
        many = sum(one.param_type_name == "option" for one in every) >= MANY
        heading = {name: title for title, names in GROUPS.items() for name in names if many}
        rest = "Other options" if many else "Options"
        rows: dict[str, list[Any]] = {t: [] for t in ("Arguments", *GROUPS, rest)}
        for one in every:
            option = one.param_type_name == "option"
            title = heading.get(one.name or "", rest) if option else "Arguments"
            if (row := one.get_help_record(ctx)) is not None:
                text = re.sub(r"([\d.e-]+)<=x<=([\d.e]+)", r"\1 to \2", row[1])
                rows[title].append((TYPE.sub(_value if option else "", row[0]), text))
        for title, found in rows.items():
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


def _value(kind: re.Match[str]) -> str:
    """Return what a person calls the value of an option, in place of its Python type."""
    return {"str": " TEXT", "path": " PATH"}.get(kind[1], " NUMBER")


def tidy(app: typer.Typer) -> None:
    """Give every command its whole summary in lists, options in groups, and numbers that are finite."""
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.short_help = command.short_help or text.partition("\n\n")[0].replace("\n", " ")
        command.cls = GroupedCommand
        for one in inspect.signature(command.callback or tidy, eval_str=True).parameters.values():
            if one.annotation in (float, float | None) and one.default.callback is None:
                one.default.callback = _finite
    for group in app.registered_groups:
        if group.typer_instance is not None:
            about = group.typer_instance.info.help or group.help
            if isinstance(about, str):
                group.short_help = about.partition("\n\n")[0].replace("\n", " ")
            tidy(group.typer_instance)


def _finite(value: float | None) -> float | None:
    """Refuse nan and inf, which typer's own bounds may let through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number that can be used.")
    return value
