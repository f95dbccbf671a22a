"""Words that the bundled model has never seen, and the names that it has."""

from __future__ import annotations

import pytest

from lantern_accel.cli import main
from lantern_accel.cli.generate import _warn_of_unseen
from lantern_accel.models.taught import taught, unseen


def test_the_prompts_of_a_bundled_model_are_listed(capsys):
    assert main(["models", "prompts"]) == 0
    assert {"red heart", "pizza", "ghost"} <= set(capsys.readouterr().out.splitlines())
    assert main(["models", "prompts", "anole-7b"]) == 2
    assert "name a bundled model" in capsys.readouterr().err


def test_every_name_is_seen():
    names = taught("lantern-emoji")
    assert not unseen([*names, "A red heart on the pizza."], names)


@pytest.mark.parametrize(
    ("prompt", "word", "near"), [("red hart", "hart", "heart"), ("a corgi", "corgi", "")]
)
def test_a_word_of_its_own_is_warned_about_with_near_names(prompt, word, near, capsys):
    _warn_of_unseen("lantern-emoji", [prompt])
    (line,) = capsys.readouterr().err.splitlines()
    assert repr(word) in line and near in line and "models prompts" in line
    _warn_of_unseen("llamagen-t2i-stage1", [prompt])
    assert not capsys.readouterr().err
