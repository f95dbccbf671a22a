"""No private word stands where users read, and the script that looks for them finds what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Folders and pages that have the field's terms alone; the other pages join them when they have.
CLEAN = (
    "lantern_accel",
    "profiles/lantern_accel_profiles",
    "backends",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)


def words(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "words.py", *paths]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_users_read_has_the_terms_of_the_field() -> None:
    done = words(*(ROOT / one for one in CLEAN))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "One\n\nit brings a\npicture", 3),
        ("page.md", "```\nprice\n```\nthe price", 4),
        ("code.py", 'def f():\n    """Return it,\n    with weights in fewer\n    bits."""\n', 3),
        ("code.py", "x = 1  # made anew\n", 1),
        ("code.py", 'x = 2\ny = f"{x} is no number"\n', 2),
        ("page.html", "<b>Two</b>\n<p>pictures</p>", 2),
    ],
)
def test_a_private_word_is_named_with_its_line(tmp_path: Path, name, text, line) -> None:
    (tmp_path / name).write_text(text)
    done = words(tmp_path)
    assert done.returncode == 1
    assert f"{name}:{line}: " in done.stderr


def test_code_and_the_words_of_the_field_may_stay(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        'price = {"price": "there is no `price`"}  # random draws, refused requests\n'
    )
    done = words(tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "")
