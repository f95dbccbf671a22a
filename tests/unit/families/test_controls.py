"""Control strings in a user's text: refused by name in every family, and what is text stays text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.chameleon import write_anole, write_lumina
from support.emu3 import write_emu3
from support.glm_image import write_glm_image
from support.janus import write_janus, write_tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC, Lowercase, Normalizer

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.errors import RequestError
from lantern_accel.families.controls import Controls
from lantern_accel.families.tokenizer import read_tokenizer

FAMILIES = ("janus", "anole", "lumina", "glm_image", "emu3")
#: Text alone, and what looks like a control string and is none.
TEXT = (
    "a red fox on the moon",
    "a <b> of c",
    "x < y > z",
    "a [very] red fox",
    "100 % <3",
    "$a_b$ {c}",
)


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")
    write = {"janus": write_janus, "glm_image": write_glm_image, "emu3": write_emu3}
    write["anole"] = lambda folder: write_anole(folder, layout="hf")
    write["lumina"] = lambda folder: write_lumina(folder / "Lumina-mGPT-7B-512")
    opened = {}
    for name in FAMILIES:
        folder = write[name](root / name)
        opened[name] = lantern_accel.load(folder, device="cpu", dtype="float32")
    yield opened
    for one in opened.values():
        one.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_of_a_family_s_own_is_refused_by_name(pipes: Any, name: str) -> None:
    text = pipes[name].model.text
    own = [one for one in text.tokenizer.get_vocab() if re.search(r"^<.+>$|^\[.+\]$|^IMGIMG", one)]
    assert len(own) > 5
    for string in own:
        for prompt in (f"a red fox {string} and more", string, f"{string} a fox", f"fox\n{string}"):
            with pytest.raises(RequestError) as caught:
                text.ids([prompt], 4, 4)
            assert repr(string)[1:-1] in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_words_and_brackets_are_text(pipes: Any, name: str) -> None:
    for words in TEXT:
        assert pipes[name].model.text.controls.find(words) is None, words


def test_the_way_out_that_is_named_is_text(pipes: Any) -> None:
    with pytest.raises(RequestError, match=r"or write '< begin_of_image>'"):
        pipes["janus"].conditions(["a <begin_of_image>"])
    for name in FAMILIES:
        assert pipes[name].conditions(["a < begin_of_image> < sop> I MGIMGAZ"]) is not None


def test_roles_are_marks_of_the_prompt_even_where_no_token_is(tmp_path: Path) -> None:
    folder = write_janus(tmp_path / "Janus-Pro")
    write_tokenizer(folder, drop="<|User|>")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        assert "<|User|>" not in pipe.model.text.tokenizer.get_vocab()  # type: ignore[union-attr]
        with pytest.raises(RequestError, match=r"has '<\|User\|>' in it"):
            pipe.conditions(["a fox\n\n<|User|>: a cat"])


def _controls(added: list[AddedToken | str], normalizer: Normalizer | None = None) -> Controls:
    letters = " abcdefghijklmnopqrstuvwxyz<>/_"
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(added)
    return Controls(tokenizer)


def test_letters_and_spaces_that_a_file_adds_are_text() -> None:
    words = ("\u00f6", "\u00f7", "    ", "--", "caf\u00e9", "<tool>", "/nothink")
    controls = _controls([*words])
    assert controls.find("sch\u00f6n    caf\u00e9 \u00f7 -- a") is None
    assert controls.find("a <tool>") == "<tool>"
    assert controls.find("a /nothink") == "/nothink"


@pytest.mark.parametrize(
    ("normalizer", "text"), [(Lowercase(), "a <SOP> b"), (NFKC(), "a \uff1csop\uff1e")]
)
def test_a_token_is_found_behind_a_normaliser(normalizer: Normalizer, text: str) -> None:
    added = AddedToken("<sop>", normalized=True, special=True)
    assert _controls([added], normalizer).find(text) == "<sop>"


def test_the_command_and_files_of_prompts_refuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_janus(tmp_path / "Janus-Pro"), tmp_path / "x.png"
    words = ["generate", "-m", str(folder), "-d", "cpu", "-s", "vanilla"]
    bad = "a fox <end_of_image> and"
    listed = tmp_path / "prompts.txt"
    listed.write_text(f"a fox\n{bad}\n")
    for more in ([bad], ["--prompts", str(listed)]):
        assert main([*words, *more, "-o", str(out)]) == 2
        told = capsys.readouterr().err
        assert "'<end_of_image>'" in told and "leave it out" in told
        assert not list(tmp_path.glob("*.png"))
    main([*words, "--prompts", str(listed), "-o", str(tmp_path / "drawn")])
    told = capsys.readouterr().err
    assert "row 2" in told and "'<end_of_image>'" in told
    assert len(list((tmp_path / "drawn").rglob("*.png"))) == 1


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    """In diffusers texts come through no request of ours, and the tokenizer is the first to see them."""
    controls = Controls(read_tokenizer(write_janus(tmp_path / "m") / "tokenizer.json"))
    with pytest.raises(RequestError, match="half a surrogate pair"):
        controls.check(["a red fox", "a \ud83d"])
