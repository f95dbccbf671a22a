"""Hooks of the documentation site (``mkdocs.yml``): pages that are made when the site is built.

The reference of commands is made from the commands, that of Python from docstrings: neither is committed.
``README.md`` becomes the home page; ``CHANGELOG.md`` and ``CONTRIBUTING.md`` become pages. A link to a
source file leads to its page of the reference, and the link to any other file becomes its name.
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
#: A reference in a docstring, as mkdocstrings leaves it.
ROLE = re.compile(r":(?:class|meth|func|data|mod|attr):<code>~?[.\w]*?(\w+)</code>")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)")
#: Files of the root that are pages of the site, and their names there.
FROM_ROOT = {"README.md": "index.md"}
FROM_ROOT |= {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
sys.path.append(str(Path(__file__).parent))
REFERENCE = importlib.import_module("python_reference")
#: Pages by what links name: these files, and sources that the reference explains.
PAGES = FROM_ROOT | {"lantern_accel/cli": "reference/commands.md"}
for name, (_, _, sections) in REFERENCE.PAGES.items():
    PAGES |= {f"lantern_accel/{file}": f"reference/{name}.md" for file in sections.values()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in ``docs/``."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in FROM_ROOT.items()}
    made |= {f"reference/{name}": text for name, text in reference_pages().items()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links and pictures lead to pages of the site, and name files that the site does not have."""
    return site_text(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show references in docstrings as code."""
    return ROLE.sub(r"<code>\1</code>", html)


def site_text(markdown: str, source: str) -> str:
    """Return the text of the page ``source`` with its links as the site has them."""
    folder = "" if source in FROM_ROOT.values() else f"docs/{source}/.."

    def link(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.group(1, 2, 3, 4)
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES or path.startswith("docs/"):
            path = PAGES.get(path, path.removeprefix("docs/"))
            here = os.path.relpath(path, os.path.dirname(source) or ".")
            return f"{picture}[{text}]({here}{anchor or ''})"
        if (ROOT / path).exists():
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        return match.group(0)  # a broken link, which the strict build reports

    return LINK.sub(link, markdown)


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
    """Return every page below ``reference/`` by its file's name."""
    return {"commands.md": command_reference(), **REFERENCE.pages()}
