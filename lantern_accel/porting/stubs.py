"""The stubs of the backend interface that a new backend gets: every member that it may override.

They are made of the interface as it is, commented out, with its signatures and what its docstrings say of
shapes, dtypes and conventions.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

from lantern_accel.device.backend import SEAM

#: Members that no backend writes.
NOT_WRITTEN = ("device", "listener", "own_steps", "region")
HEAD = "    # --- what you may override "
WIDTH = 90
INTRODUCTION = """\
What follows is the rest of the interface: remove the `# ` of what your device does better. Each body \
calls the reference, so that every part works while you write another. CHECKLIST.md says what helps \
most, and `lantern-accel conform abacus` checks it.

Shapes: R rows (images times branches of guidance, as [conditional; unconditional]), T positions of a \
pass, H heads, d width of a head, L slots of a cache that a pass looks at, B images, V codes. Tensors \
are on the device and of the model's dtype; logits and probabilities are float32; token ids, positions \
and slots have the dtype `index`. Shapes never depend on values, and the host reads none. Types are \
those of lantern_accel.device and its modules; Tensor and nn are torch's.
"""


def own(text: str) -> set[str]:
    """Return the members that the scaffold writes itself."""
    (kind,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {one.name for one in kind.body if isinstance(one, ast.FunctionDef)} | {"name", "version"}


def members() -> Iterator[tuple[str, list[str], str]]:
    """Go through what may be overridden: its name, the lines that define it, and its docstring."""
    seen = set(NOT_WRITTEN)
    for kind in SEAM:
        source = textwrap.dedent(inspect.getsource(kind))
        (found,) = ast.parse(source).body
        assert isinstance(found, ast.ClassDef)
        for node, after in zip(found.body, [*found.body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef):
                name, said, last = node.name, ast.get_docstring(node) or "", node.body[0].lineno - 1
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                assert isinstance(node.target, ast.Name)
                told = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = after.value.value
                    told = inspect.cleandoc(text) if isinstance(text, str) else ""
                name, said, last = node.target.id, told, node.end_lineno or 0
            else:
                continue
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                lines = source.splitlines()[node.lineno - 1 : last]
                yield name, textwrap.dedent("\n".join(lines)).splitlines(), said


def stub(name: str, lines: list[str], said: str) -> list[str]:
    """Return the lines of one stub, not yet commented out."""
    held = re.sub(r"``[^`]+``", lambda span: span[0].replace(" ", "\0"), said)  # not cut in two
    parts = [textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in held.split("\n\n")]
    text = "\n\n".join(parts).replace("\0", " ")
    if not lines[0].startswith("def "):
        return [*(f"# {line}".rstrip() for line in text.splitlines()), *lines]
    (node,) = ast.parse("\n".join([*lines, "    ..."])).body
    assert isinstance(node, ast.FunctionDef)
    given = [one.arg for one in node.args.args[1:]]
    given += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    body = f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""'
    body += f"\nreturn super().{name}({', '.join(given)})"
    return [*lines, *(f"    {line}".rstrip() for line in body.splitlines())]


def with_stubs(text: str) -> str:
    """Return the source of a backend with stubs of all members behind those that it has itself."""
    mine, lines = own(text), [HEAD.ljust(100, "-")]
    for part in INTRODUCTION.split("\n\n"):
        lines += ["    #", *(f"    # {line}" for line in textwrap.wrap(part, WIDTH))]
    for name, defined, said in members():
        if name not in mine:
            lines += ["", *(f"    # {line}".rstrip() for line in stub(name, defined, said))]
    return "\n".join([text.rstrip(), "", *lines, ""])
