"""Hooks of the documentation site (``mkdocs.yml``): pages that are made from the code and the root.

The command reference is made from the commands and the Python reference from docstrings, so that they
cannot say what those do not: ``python tools/docs_site.py`` writes both, and tests compare.
``CHANGELOG.md`` and ``CONTRIBUTING.md`` become pages. Links that leave ``docs/`` work where the
repository is browsed; on the site, where those files are not, the link becomes the file's name.
"""

from __future__ import annotations

import importlib
import os.path
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in ``docs/``."""
    from mkdocs.structure.files import File

    made = {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository that the site does not have into their names."""
    source = page.file.src_uri
    folder = "" if source in ("changelog.md", "contributing.md") else f"docs/{source}/.."

    def named(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = os.path.normpath(os.path.join(folder, target))
        if path.startswith("docs/"):
            here = os.path.relpath(path.removeprefix("docs/"), os.path.dirname(source) or ".")
            return f"[{text}]({here}{anchor})"
        if (ROOT / path).exists():
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        return match.group(0)  # a broken link, which the strict build reports

    return LINK.sub(named, markdown)


def command_reference() -> str:
    """Return the help of every command as one page of Markdown."""
    import typer.main

    from lantern_accel.cli.app import app

    root: Any = typer.main.get_command(app)
    lines = ["# Commands", "", _sentence(root.help)]
    for name, command in sorted(root.commands.items()):
        lines += _command(f"lantern-accel {name}", command, 2)
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any, level: int) -> list[str]:
    lines = ["", f"{'#' * level} `{path}`", "", _sentence(command.help)]
    rows = [row for row in map(_row, command.params) if row]
    if rows:
        lines += ["", "| argument or option | default | meaning |", "|---|---|---|", *rows]
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if child.hidden:
            continue
        lines += _command(f"{path} {name}", child, level + 1)
    return lines


def _row(parameter: Any) -> str:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    option = parameter.param_type_name == "option"
    words = [*parameter.opts, *parameter.secondary_opts] if option else [parameter.name.upper()]
    default = "" if callable(parameter.default) else parameter.default
    values = default if isinstance(default, list | tuple) else [default]
    shown = ", ".join(f"`{value}`" for value in values if value not in (None, False, ""))
    help_text = _sentence(getattr(parameter, "help", None)).replace("|", "\\|")
    return f"| {', '.join(f'`{word}`' for word in words)} | {shown} | {help_text} |"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;")


def reference_pages() -> dict[str, str]:
    """Return every page below ``docs/reference`` that is made, by its file's name."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        pages = importlib.import_module("python_reference").pages
    finally:
        sys.path.pop(0)
    return {"commands.md": command_reference(), **pages()}


if __name__ == "__main__":
    for page_name, page_text in reference_pages().items():
        (ROOT / "docs" / "reference" / page_name).write_text(page_text, encoding="utf-8")
