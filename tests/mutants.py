"""Plant small faults in the source, one at a time, and see whether the tests notice.

    python tests/mutants.py --sample 40 --seed 17 [--json survivors.json] [FILE ...]

A fault turns a comparison round, exchanges two operators, moves a number by one, or negates a
condition. Each is planted in a copy of the repository, and the tests that belong to the file run
against the copy until the first one fails. What survives is printed with its line. Without FILE faults
are drawn from decoding, the statistics of measure, and quality.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lantern_accel"
PROFILES = ROOT / "profiles" / "lantern_accel_profiles"
DECODING = ["tests/unit/decoding", "tests/unit/test_mutants.py", "tests/unit/families/llamagen"]
RULES = ["tests/unit/test_mutants.py", "tests/unit/profiles/quality/test_exact_loss.py",
         "tests/unit/decoding/test_acceptance_oracle.py", "tests/unit/decoding/test_acceptance_golden.py",
         "tests/unit/decoding/test_exactness.py"]  # fmt: skip
#: Tests that a file's faults must break, the quickest first; the first name that fits is taken.
TESTS = {
    "decoding/accept.py": RULES,
    "decoding/draft_test.py": RULES,
    "quality/exact_loss.py": ["tests/unit/profiles/quality/test_exact_loss.py"],
    "decoding/logits.py": ["tests/unit/decoding/test_logits.py", *DECODING],
    "decoding/maximal_coupling.py": ["tests/unit/decoding/test_jacobi.py",
                             "tests/unit/decoding/test_jacobi_exactness.py"],
    "decoding/": DECODING,
    "quality/": ["tests/unit/profiles/quality", "tests/unit/profiles/evaluation"],
    "measure/": ["tests/unit/profiles/measure", "tests/unit/profiles/report",
                 "tests/unit/test_mutants.py"],
}  # fmt: skip
STATISTICS = ("quality_loss.py",)
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}  # fmt: skip
OPERATE: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what may stand in a node's place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        other = COMPARE[type(node.ops[0])]()
        yield ast.Compare(node.left, [other, *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATE:
        yield ast.BinOp(node.left, OPERATE[type(node.op)](), node.right)
    value: Any = getattr(node, "value", None)
    if isinstance(node, ast.Constant) and type(value) in (int, float):
        yield ast.Constant(value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        yield node.operand
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def faults(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, description and changed source of every fault of a file; annotations are left alone."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    inside = {
        id(part)
        for node in ast.walk(tree)
        for held in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if held is not None
        for part in ast.walk(held)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or id(node) in inside:
            continue
        for new in changes(node):
            assert node.end_lineno is not None and node.end_col_offset is not None
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            old, text = raw[first:last].decode(), f"({ast.unparse(new)})"
            changed = (raw[:first] + text.encode() + raw[last:]).decode()
            try:
                ast.parse(changed)
            except SyntaxError:  # within an f-string of older Pythons
                continue
            yield node.lineno, f"{' '.join(old.split())} -> {' '.join(text.split())}", changed


def tests_of(path: Path) -> list[str]:
    """Return the tests that belong to a file."""
    package = PACKAGE if path.is_relative_to(PACKAGE) else PROFILES
    name = path.relative_to(package).as_posix()
    for prefix, tests in TESTS.items():
        if name.startswith(prefix):
            return tests
    raise SystemExit(f"no tests are named for {name}; add them to TESTS")


def dies(copy: Path, tests: list[str], seconds: float) -> str:
    """Run the tests in a copy; return what noticed the fault, or an empty text."""
    given = {
        **os.environ,
        "PYTHONPATH": f"{copy}:{copy / 'backends'}:{copy / 'profiles'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode == 0:
        return ""
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0] if said else "cannot be imported"


def main() -> None:
    """Plant a sample of faults and list what survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    files = [path.resolve() for path in given.files] or [
        *sorted((PACKAGE / "decoding").glob("*.py")),
        *(PROFILES / "measure" / name for name in STATISTICS),
        *sorted((PROFILES / "quality").glob("*.py")),
    ]
    every = [(path, *fault) for path in files for fault in faults(path)]
    chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    print(f"{len(every)} faults in {len(files)} files; {len(chosen)} drawn with seed {given.seed}")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", "__pycache__", "*.png", "build", "dist")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for number, (path, line, what, changed) in enumerate(chosen, 1):
            place = copy / path.relative_to(ROOT)
            sound = place.read_text(encoding="utf-8")
            place.write_text(changed, encoding="utf-8")
            noticed = dies(copy, tests_of(path), given.seconds)
            place.write_text(sound, encoding="utf-8")
            where = f"{path.relative_to(ROOT)}:{line}: {what}"
            print(f"{number}/{len(chosen)} {where}: {noticed or 'SURVIVES'}", flush=True)
            if not noticed:
                survivors.append(where)
    print(f"{len(survivors)} of {len(chosen)} survive")
    if given.json is not None:
        text = json.dumps({"faults": len(every), "drawn": len(chosen), "seed": given.seed,
                           "survivors": survivors}, indent=1)  # fmt: skip
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
