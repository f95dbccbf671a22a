"""The Python reference as Markdown, made from the source files' signatures and docstrings.

``tools/docs_site.py`` adds the pages to the site. Nothing is imported, so no device's software is needed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from interface_table import lines as interface_lines
from interface_table import plain

ROOT = Path(__file__).resolve().parents[1]
#: Characters of a line of code.
WIDTH = 110
#: Every page: its title, its opening, and its sections, each with a file below ``lantern_accel``.
PAGES: dict[str, tuple[str, str, dict[str, str]]] = {
    "api": (
        "Python API",
        "`import lantern_accel` loads neither torch nor a vendor's SDK; both are loaded when they are "
        'first needed.\n`lantern_accel.generate("red heart", seed=7).images[0]` is an image; '
        "`lantern_accel.load` keeps a model for more.",
        {
            "Functions": "api.py",
            "A loaded model": "generation/pipeline.py",
            "What a request takes": "generation/settings.py",
        },
    ),
    "values": (
        "Strategies and results",
        "A strategy, the sampling settings and a result are values: they can be compared, printed, and "
        "written as JSON.\n[Strategies](../strategies.md) explains what they mean, and [exit "
        "codes](../troubleshooting.md#exit-codes) what errors become on the command line.",
        {
            "Strategies": "strategy/values.py", "Sampling": "strategy/sampling.py",
            "Draft sources": "strategy/sources.py", "A draft source in a step": "decoding/drafts.py",
            "Results": "generation/result.py", "Errors": "errors.py",
        },
    ),
    "device": (
        "The backend interface",
        "Everything on this page is exported by `lantern_accel.device`. [Port an "
        "accelerator](../porting.md) is the tutorial.",
        {
            "The specification": "device/spec.py", "The device": "device/backend.py",
            "Preferences": "device/preferences.py", "How a step runs": "device/capture.py",
            "The operations": "device/operations.py",
            "Guidance, filters and sampling": "device/sampling.py",
            "Packed weights": "device/packed.py", "The cache": "device/kv_cache.py",
            "The plan of a step": "device/plan.py",
        },
    ),
    "testing": (
        "Checking a backend",
        "`lantern-accel conform NAME` runs the kit; from Python it is `lantern_accel.testing.conform`.\n"
        "[Port an accelerator](../porting.md) explains the groups of checks.",
        {"Running checks": "testing/kit.py", "What a check says": "testing/result.py"},
    ),
}  # fmt: skip
#: Of these files a page shows only these names; of others all that are public.
NAMES = {
    "api.py": ("generate", "load"),
    "generation/pipeline.py": ("Pipeline",),
    "generation/settings.py": ("Settings",),
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file below ``reference``."""
    return {f"{name}.md": "\n".join(_page(name)) + "\n" for name in PAGES}


def _page(name: str) -> Iterator[str]:
    title, opening, sections = PAGES[name]
    yield from (f"# {title}", "", opening)
    if name == "device":
        yield from interface_lines()
    for heading, file in sections.items():
        tree = ast.parse((ROOT / "lantern_accel" / file).read_text(encoding="utf-8"))
        yield from ("", f"## {heading}", "", f"`lantern_accel/{file}`")
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and _shown(node, NAMES.get(file)):
                yield from (
                    _class(node) if isinstance(node, ast.ClassDef) else _function(node, "###")
                )


def _shown(node: ast.ClassDef | ast.FunctionDef, names: tuple[str, ...] | None = None) -> bool:
    public = not node.name.startswith("_") and ast.get_docstring(node) is not None
    return public if names is None else node.name in names


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield from ("", f"### `{node.name}{f'({bases})' if bases else ''}`", "", _text(node))
    marked = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    fields = [ast.unparse(one) for one in marked if not ast.unparse(one).startswith("_")]
    if fields:
        yield from ("", "```python", *(textwrap.shorten(one, WIDTH) for one in fields), "```")
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and _shown(one):
            yield from _function(one, "####")


def _function(node: ast.FunctionDef, level: str) -> Iterator[str]:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    given = re.split(r", (?=\*|/|\w+: )", ast.unparse(node.args))
    given = [re.sub(r"^(\*{0,2}\w+: [^=]+)=", r"\1 = ", one) for one in given]
    lines = [f"{node.name}({', '.join(given)}){returns}"]
    if len(lines[0]) > WIDTH:
        lines = [f"{node.name}(", *(f"    {one}," for one in given), f"){returns}"]
    yield from ("", f"{level} `{node.name}`", "", "```python", *lines, "```", "", _text(node))


def _text(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring as Markdown, in which a literal block is fenced."""
    pieces = re.split(r"::\n\n((?:(?:    .*)?\n)*    .*)", plain(ast.get_docstring(node) or ""))
    text = pieces[0].replace("<", "&lt;")
    for block, after in zip(pieces[1::2], pieces[2::2], strict=True):
        text += f":\n\n```\n{textwrap.dedent(block)}\n```{after.replace('<', '&lt;')}"
    return text
