"""The scaffold's stubs: every member of the interface, and each of them works."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lantern_accel.device.backend import SEAM, Backend
from lantern_accel.porting.stubs import NOT_WRITTEN, with_stubs
from lantern_accel.testing.kit import run_checks, select

ROOT = Path(__file__).parents[3]
TEMPLATE = ROOT / "lantern_accel/porting/template/lantern_accel_abacus/backend.py"
NAMES = """
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from torch import Tensor, nn
from lantern_accel.device import Preferences, TensorOps
"""


def uncommented() -> str:
    """Return the template with every stub in force."""
    head, _, stubs = with_stubs(TEMPLATE.read_text()).partition("    # --- what you may override")
    # What is left a comment is a sentence: code follows the introduction's last line.
    lines = stubs.partition("Tensor and nn are torch's.\n")[2].splitlines()
    body = [re.sub(r"^    # ?", "    ", line) for line in lines]
    return head.replace("import torch\n", f"import torch\n{NAMES}", 1) + "\n".join(body) + "\n"


def seam() -> dict[str, str]:
    """Return the signature or the default of every member that may be overridden."""
    found: dict[str, str] = {}
    for kind in SEAM:
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        found |= signatures(node)
    required = {"facts", "synchronize", *NOT_WRITTEN}
    return {k: v for k, v in found.items() if not k.startswith("_") and k not in required}


def signatures(kind: ast.ClassDef) -> dict[str, str]:
    found = {}
    for one in kind.body:
        if isinstance(one, ast.FunctionDef):
            returns = ast.unparse(one.returns) if one.returns else ""
            found[one.name] = f"({ast.unparse(one.args)}) -> {returns}"
        elif isinstance(one, ast.AnnAssign) and one.value is not None:
            found[ast.unparse(one.target)] = ast.unparse(one)
    return found


def test_every_member_is_there_with_its_signature() -> None:
    (kind,) = [one for one in ast.parse(uncommented()).body if isinstance(one, ast.ClassDef)]
    written, wanted = signatures(kind), seam()
    assert {k: v for k, v in written.items() if k in wanted} == wanted
    assert set(written) - set(wanted) == {"__init__", "facts", "synchronize"}
    for one in kind.body:
        if isinstance(one, ast.FunctionDef) and one.name in wanted:
            assert ast.get_docstring(one), f"{one.name} says nothing"


def test_all_of_them_together_are_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lantern_accel_abacus.backend")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(uncommented(), "stubs", "exec"), vars(module))
    with module.DeviceBackend(0) as backend:
        report = run_checks(backend, select(["kv", "attention", "draw"]))
    assert report.passed, report.table()
    assert backend.preferences == Backend.preferences
