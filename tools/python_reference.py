"""The Python reference as Markdown, made from the source files' signatures and docstrings.

``tools/docs_site.py`` adds the pages to the site. Nothing is imported, so no device's software is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from interface_table import lines as interface_lines
from interface_table import plain

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, a module's file, and the names it shows (none: all public ones)."""

    heading: str
    file: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A page of the reference: title, the words before its sections, and the sections."""

    title: str
    opening: str
    sections: tuple[Section, ...]


PAGES = {
    "api": Page(
        "Python API",
        "`import lantern_accel` loads neither torch nor a vendor's SDK; both are loaded when they are "
        'first needed.\n`lantern_accel.generate("red heart", seed=7).images[0]` is a picture; '
        "`lantern_accel.load` keeps a model for more.",
        (
            Section("Functions", "lantern_accel/api.py", ("generate", "load")),
            Section("A loaded model", "lantern_accel/generation/pipeline.py", ("Pipeline",)),
            Section("What a request takes", "lantern_accel/generation/settings.py", ("Settings",)),
        ),
    ),
    "values": Page(
        "Strategies and results",
        "A strategy, the sampling settings and a result are values: they can be compared, printed, and "
        "written as JSON.\n[Strategies](../strategies.md) explains what they mean, and [exit "
        "codes](../troubleshooting.md#exit-codes) what errors become on the command line.",
        (
            Section("Strategies", "lantern_accel/strategy/values.py"),
            Section("Sampling", "lantern_accel/strategy/sampling.py"),
            Section("Sources of drafts", "lantern_accel/strategy/sources.py"),
            Section("What a source does in a step", "lantern_accel/decoding/drafts.py"),
            Section("Results", "lantern_accel/generation/result.py"),
            Section("Errors", "lantern_accel/errors.py"),
        ),
    ),
    "device": Page(
        "Writing a backend",
        "Everything on this page is exported by `lantern_accel.device`. [Port an "
        "accelerator](../porting.md) is the tutorial.",
        (
            Section("The specification", "lantern_accel/device/spec.py"),
            Section("The device", "lantern_accel/device/backend.py"),
            Section("Preferences", "lantern_accel/device/preferences.py"),
            Section("How a step runs", "lantern_accel/device/capture.py"),
            Section("What a step changes", "lantern_accel/device/changes.py"),
            Section("The operations", "lantern_accel/device/operations.py"),
            Section("Guidance, filters and draws", "lantern_accel/device/sampling.py"),
            Section("Packed weights", "lantern_accel/device/packed.py"),
            Section("The cache", "lantern_accel/device/kv_cache.py"),
            Section("The plan of a step", "lantern_accel/device/plan.py"),
        ),
    ),
    "testing": Page(
        "Checking a backend",
        "`lantern-accel conform NAME` runs the kit; from Python it is `lantern_accel.testing.conform`.\n"
        "[Port an accelerator](../porting.md) explains the groups of checks.",
        (
            Section("Running checks", "lantern_accel/testing/kit.py"),
            Section("What a check says", "lantern_accel/testing/result.py"),
        ),
    ),
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file below ``reference``."""
    return {f"{name}.md": _page(page) for name, page in PAGES.items()}


def _page(page: Page) -> str:
    lines = [f"# {page.title}", "", page.opening]
    if page is PAGES["device"]:
        lines += interface_lines()
    for section in page.sections:
        tree = ast.parse((ROOT / section.file).read_text(encoding="utf-8"))
        lines += ["", f"## {section.heading}", "", f"`{section.file}`"]
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and _shown(node, section.names):
                lines += _class(node) if isinstance(node, ast.ClassDef) else _function(node, "###")
    return "\n".join(lines) + "\n"


def _shown(node: ast.ClassDef | ast.FunctionDef, names: tuple[str, ...]) -> bool:
    if names:
        return node.name in names
    return not node.name.startswith("_") and ast.get_docstring(node) is not None


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield from ("", f"### `{node.name}{f'({bases})' if bases else ''}`", "")
    yield from _text(node)
    fields = [
        one
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and not one.target.id.startswith("_")
    ]
    if fields:
        yield from ("", "```python")
        yield from (_field(one) for one in fields)
        yield "```"
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and _shown(one, ()):
            yield from _function(one, "####")


def _field(node: ast.AnnAssign) -> str:
    value = "" if node.value is None else f" = {ast.unparse(node.value)}"
    line = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{value}"
    return line if len(line) <= 110 else f"{line[:107]}..."


def _function(node: ast.FunctionDef, level: str) -> Iterator[str]:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    yield from ("", f"{level} `{node.name}`", "", "```python")
    line = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 110:
        yield line
    else:
        yield f"{node.name}("
        yield from (f"    {one}," for one in _arguments(node.args))
        yield f"){returns}"
    yield from ("```", "")
    yield from _text(node)


def _arguments(args: ast.arguments) -> Iterator[str]:
    """Every argument as text, with the marks between the kinds of them."""
    bare = [None] * (len(args.posonlyargs) + len(args.args) - len(args.defaults))
    for one, default in zip([*args.posonlyargs, *args.args], [*bare, *args.defaults], strict=True):
        yield _argument(one, default)
    if args.vararg or args.kwonlyargs:
        yield f"*{ast.unparse(args.vararg) if args.vararg else ''}"
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(one, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) if default is None else f"{ast.unparse(one)} = {ast.unparse(default)}"


def _text(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """A docstring's lines: double backticks and roles become code, literal blocks are fenced."""
    text = plain(ast.get_docstring(node) or "")
    lines, fenced = list[str](), False
    for line in text.splitlines():
        if lines and not fenced and line.startswith("    ") and _opens(lines):
            lines, fenced = [*_closed(lines), "```"], True
        elif fenced and line.strip() and not line.startswith("    "):
            while lines and not lines[-1]:
                lines.pop()
            lines, fenced = [*lines, "```", ""], False
        lines.append(line.removeprefix("    ") if fenced else line.replace("<", "&lt;"))
    return [*lines, "```"] if fenced else lines


def _opens(lines: list[str]) -> bool:
    before = next((line for line in reversed(lines) if line.strip()), "")
    return before.endswith("::") and not lines[-1].strip()


def _closed(lines: list[str]) -> list[str]:
    """``like so::`` ends in one colon where the block is fenced."""
    at = max(index for index, line in enumerate(lines) if line.strip())
    return [*lines[:at], lines[at][:-1], *lines[at + 1 :]]
