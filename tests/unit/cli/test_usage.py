"""Words that a command does not take: one sentence in the project's form, and no framework's words."""

from __future__ import annotations

import pytest

from lantern_accel.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate x --temperature hot", ("--temperature takes a number", "'hot'")),
        ("tune --max-seconds x", ("--max-seconds takes a number", "'x'")),
        ("serve --port 99999", ("--port must be 65535 or less", "'99999'")),
        ("serve --queue 0", ("--queue must be 1 or more",)),
        ("generate x --temprature 2", ("no such option: --temprature", "--temperature")),
        ("modles", ("'modles'", "'models'?")),
        ("train", ("missing command", "train --help")),
        ("port", ("missing argument 'NAME'", "port --help")),
        ("train drafter", ("missing option '--model'", "train drafter --help")),
        ("compare", ("missing argument 'FILE", "compare --help")),
        ("serve --port", ("'--port'", "--help")),
    ],
    ids=lambda one: one.replace(" ", "_") if isinstance(one, str) else "",
)
def test_misused_words_get_one_sentence(words, said, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in said)
    assert "Input should" not in line


@pytest.mark.parametrize("words", [["--version"], ["generate", "--help"], ["models", "--help"]])
def test_help_and_version_end_well(words, capsys):
    assert main(words) == 0
    assert "lantern-accel" in capsys.readouterr().out
