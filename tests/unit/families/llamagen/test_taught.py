"""Words that the bundled model has never seen, the names that it has, and emoji as prompts."""

from __future__ import annotations

import warnings

import pytest

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.errors import LanternWarning
from lantern_accel.families.llamagen.taught import Taught
from lantern_accel.models.bundle import bundled_models


@pytest.fixture(scope="module")
def taught():
    return Taught(bundled_models()["lantern-emoji"])


def test_the_prompts_of_a_bundled_model_are_listed(capsys):
    assert main(["models", "prompts"]) == 0
    assert {"red heart", "pizza", "ghost"} <= set(capsys.readouterr().out.splitlines())
    assert main(["models", "prompts", "anole-7b"]) == 2
    assert "name a bundled model" in capsys.readouterr().err


def test_no_name_has_an_unseen_word(taught):
    assert not taught.unseen([*taught.names, "A red heart on the pizza."])


@pytest.mark.parametrize(
    ("word", "near", "far"),
    [
        ("coffee", "hot beverage", ""),
        ("sea", "coral", "seat"),
        ("hart", "heart", ""),
        ("painting", "splatter", "pointing"),
        ("zyzzyva", "", "a"),
    ],
)
def test_near_names_are_near_in_meaning_or_spelling(taught, word, near, far):
    ((found, names),) = taught.unseen([f"a {word}"]).items()
    assert found == word
    text = ", ".join(names)
    assert near in text
    assert not far or far not in text


@pytest.mark.parametrize(
    ("prompt", "spelled"),
    [
        ("❤️", "red heart"),
        ("❤", "red heart"),
        ("noto style 👻!", "noto style  ghost !"),
        ("ghost", "ghost"),
    ],
)
def test_an_emoji_is_its_name(taught, prompt, spelled):
    assert taught.name_emoji(prompt).strip() == spelled


def test_only_words_that_the_model_reads_are_looked_up(taught):
    many = [f"zyzzyva{number}" for number in range(600)]
    assert [*taught.unseen([" ".join(many)])] == many[:16]


def test_a_model_without_lists_warns_of_nothing(tmp_path):
    taught = Taught(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taught.warn(["zyzzyva"])
    assert taught.name_emoji("❤️") == "❤"


def test_an_emoji_gives_the_image_of_its_name_and_python_warns():
    with lantern_accel.load("lantern-emoji") as pipeline:
        named, sign = (pipeline.conditions([one]) for one in ("red heart", "❤️"))
        assert named.condition.equal(sign.condition)
        with pytest.warns(LanternWarning, match="'corgi'"):
            pipeline.conditions(["a corgi"])


def test_a_folder_notes_the_word_in_its_journal(tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("a corgi\nred heart\n", encoding="utf-8")
    words = ["generate", "--prompts", str(tmp_path / "rows.txt"), "-o", str(tmp_path / "images")]
    assert main([*words, "--strategy", "vanilla", "--seed", "1"]) == 0
    assert "'corgi'" in capsys.readouterr().err
    first, second = (tmp_path / "images" / "journal.jsonl").read_text().splitlines()
    assert "'corgi'" in first
    assert "note" not in second
