"""The look of ``--help``: whole summaries, and options in groups.

Plain text on purpose: the same on a terminal, in a pipe and in the documentation.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
from typer.core import TyperCommand

from lantern_accel.cli.spelling import answering

#: Headings in the order in which they are printed, and the parameters below each.
GROUPS: dict[str, tuple[str, ...]] = {
    "What to draw, and where it goes": (
        "output", "overwrite", "stats_path", "as_json", "prompts", "prompts_file", "prompt", "num_images",
        "size", "seed", "seeds", "compare", "grid", "scale", "resume", "quiet", "on", "workers",
    ),
    "Model": ("model", "vq", "drafter", "text_encoder", "text_device", "embeddings", "weights"),
    "Device": ("device", "dtype", "exact_dtype", "threads", "option", "batch", "batch_size"),
    "Drafting": (
        "preset", "strategy", "tree", "window", "bits", "one", "coupling",
    ),
    "Relaxation": (
        "relaxed", "tv_budget", "accept", "k", "delta", "lam", "residual", "neighbour_space",
    ),
    "Sampling": (
        "temperature", "top_k", "top_p", "cfg_scale", "cfg_interval", "cfg_scale_image",
        "guidance_scale", "negative_prompt",
    ),
}  # fmt: skip
#: Which of the commands that measure is for what; docs/measuring.md says more.
WHICH = (
    "To measure: `bench` compares strategies here in minutes and prints a table. `profile` writes a run "
    "with prices and raw samples, for `compare` and for others. `stepcost` times steps of real model "
    "sizes on random weights. `tune` finds what is fastest here and keeps it for `generate`."
)


def exit_codes() -> str:
    """Return every exit code and what it says, for ``--help``."""
    from lantern_accel.errors import EXIT_CODES

    said = "; ".join(f"{code}: {text.partition(':')[0]}" for code, text in EXIT_CODES.items())
    return f"Exit codes (docs/reference/exit-codes.md): {said}."


#: A command with fewer options than this lists them in one piece.
MANY = 18


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists many options under the headings of :data:`GROUPS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with answering(self, args):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        every = self.get_params(ctx)
        options = [one for one in every if one.param_type_name == "option"]
        if len(options) < MANY:
            super().format_options(ctx, formatter)
            return
        arguments = [one for one in every if one.param_type_name != "option"]
        rows = [row for one in arguments if (row := one.get_help_record(ctx)) is not None]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        heading = {name: title for title, names in GROUPS.items() for name in names}
        for title in (*GROUPS, "Other options"):
            rows = [
                row
                for one in options
                if heading.get(one.name or "", "Other options") == title
                and (row := one.get_help_record(ctx)) is not None
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def tidy(app: typer.Typer) -> None:
    """Give every command of ``app`` its whole summary in lists, and its options in groups."""
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.short_help = command.short_help or text.partition("\n\n")[0].replace("\n", " ")
        command.cls = GroupedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            about = group.typer_instance.info.help or group.help
            if isinstance(about, str):
                group.short_help = about.partition("\n\n")[0].replace("\n", " ")
            tidy(group.typer_instance)
