"""What ``--help`` looks like: whole summaries, and long lists of options in groups."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from lantern_accel.cli.app import app
from lantern_accel.cli.help import GROUPS


def test_no_summary_is_cut():
    for words in ([], ["models"], ["train"]):
        text = CliRunner().invoke(app, [*words, "--help"]).output
        assert "..." not in text.split("Commands:")[1], words


def test_the_options_of_generate_stand_in_groups():
    text = CliRunner().invoke(app, ["generate", "--help"]).output
    for title in GROUPS:
        assert f"{title}:" in text, title
    options = text.split("Other options:")[1].splitlines()
    assert len([line for line in options if line.startswith("  -")]) == 1, "only --help is left"


@pytest.mark.parametrize("title", GROUPS)
def test_every_name_in_a_group_is_in_one_group(title):
    others = {name for other, names in GROUPS.items() if other != title for name in names}
    assert not others & set(GROUPS[title])


@pytest.mark.parametrize("words", ["generate", "serve", "bench", "port", "models check"])
def test_help_has_no_types_of_python(words):
    text = CliRunner().invoke(app, [*words.split(), "--help"]).output
    assert not re.search(r"<(str|int|list|path|float|=)", text)
