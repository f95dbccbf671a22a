"""Words of commands, drawn from the commands' own signatures, so that a new option is fuzzed too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main
from hypothesis import strategies as st

from lantern_accel.cli.app import app

#: Text that has broken programs before; ``{w}`` is the case's own folder, ``{b}`` that of whole files.
HOSTILE = (
    "", " ", "-", "--", "²", "²x²", "٣", "0", "-1", "1", "2", "00", "1e308", "-1e308", "1e39", "nan",
    "inf", "-inf", "0x10", "1_000", "9" * 20, "9" * 5000, "1,", ",", ",,", "1,2,3", "=", "a=", "=b",
    "none", "auto", "null", "None", "\n", "a\nb", "\t", "é", "\udc80", "\u202e", "😀", "n" * 300,
    "{w}", "{w}/none", "{w}/pipe", "{w}/loop", "{w}/closed", "{w}/empty", "{w}/text", "{w}/file/below",
    "/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/environ", "..", "~",
    "{w}/" + "d/" * 400 + "x", "https://example.org/x", "%s%n", "$(id)", "<b>", "*", "[",
    "{w}/[", "a" * 9000,
    "chain:0", "chain:²", "chain:", "dynamic:1,2", "dynamic:9,9,99999", "window:", "window:1", "0,1,00",
    "0,00,000,1", "5", "lantern++:k=0", "lantern++:k=10,lambda=nan", "exact", "lantern:delta=²", "8x8",
    "8x", "x", "0x0", "99999999x1", "red heart", "vanilla", "eagle", "lantern++", "scd", "vanilla,eagle",
)  # fmt: skip
#: Words that an option rightly takes, by its name; others get hostile ones only.
RIGHT = {
    "model": ("{b}/tiny", "{b}/classes", "{b}/undrafted", "{b}/tiny/target.safetensors"),
    "device": ("cpu", "cpu:0", "null", "cpu:1", "gpu"),
    "dtype": ("float32", "bfloat16", "float16"),
    "strategy": ("vanilla", "eagle", "lantern++", "scd"),
    "output": ("{w}/out.png", "{w}/out.json", "{w}/out.html", "{w}/out.md", "{w}/out.webp"),
    "stats_path": ("{w}/figures.json",),
    "files": ("{b}/run.json",),
    "seed": ("3",),
    "num_images": ("1", "2"),
    "temperature": ("0", "1", "0.5"),
    "option": ("native=off", "compile=off", "threads=1"),
    "config": ("{b}/config.json",),
    "work": ("{w}/work",),
    "path": ("{b}/tiny", "{b}/tiny/vq.safetensors"),
    "prompts": ("red heart", "3"),
    "prompts_file": ("{b}/prompts.txt", "{b}/prompts.jsonl"),
    "images": ("{b}/images",),
    "use": ("embeddings={b}/embeddings.safetensors",),
    "drafts": ("chain:2", "0,1,00", "small_8", "none", "window:4"),
    "name": ("a-name",),
    "rent": ("run=2EUR", "run=0.5", "abacus-1=1USD"),
    "latency": ("0.5", "2"),
    "size": ("8x8",),
    "batch": ("1", "2", "1,2"),
    "batch_size": ("1", "2"),
    "weights": ("full", "int8", "int6", "int4"),
    "suite": ("coco", "imagenet", "prompts"),
    "protocol": ("lantern", "sjd", "adm"),
    "captions": ("{b}/images/captions.jsonl",),
    "part": ("likelihood", "ambiguity", "frontier"),
    "preset": ("paper-lantern", "llamagen-cli"),
    "share": ("1/1", "1/2", "2/2", "3/2"),
    "nodes": ("8", "2,4"),
    "run": ("{b}/run.json",),
    "folder": ("{w}/filed",),
    "api_keys": ("{b}/keys.txt",),
    "port": ("0", "8000"),
    "slots": ("1", "2"),
    "limit": ("5",),
    "only": ("static", "kv.round_trip"),
    "tv_budget": ("0.02",),
    "threads": ("1",),
    "memory": ("24GB", "80GiB"),
    "max_seconds": ("60",),
    "repeats": ("1",),
    "cfg_scale": ("1", "1.5"),
    "window": ("4", "16"),
    "metric_weights": ("inception={b}/tiny/vq.safetensors",),
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command by the words that name it, and its parameters."""

    words: tuple[str, ...]
    parameters: list[Any]


def commands() -> list[Command]:
    """Return every command of ``lantern-accel``, and each group that is a command too."""
    found = []
    groups: list[tuple[Any, tuple[str, ...]]] = [(typer.main.get_command(app), ())]
    while groups:
        group, words = groups.pop(0)
        for name, command in group.commands.items():
            if command.params and name != "models":  # lists memory, which takes its time
                found.append(Command((*words, name), command.params))
            if hasattr(command, "commands"):
                groups.append((command, (*words, name)))
    return found


def word_of(parameter: Any) -> str:
    """Return an option's long name, which stands before its value; nothing of an argument."""
    return next((word for word in parameter.opts if word.startswith("--")), "")


def value_of(name: str) -> st.SearchStrategy[str]:
    """Return words for one parameter: often right, often hostile, now and then any text."""
    hostile = st.one_of(
        st.sampled_from(HOSTILE),
        st.text(max_size=12).filter(lambda text: "\0" not in text),
        st.integers().map(str),
        st.floats().map(str),
    )
    right = RIGHT.get(name)
    return st.one_of(st.sampled_from(right), hostile) if right else hostile


@st.composite
def command_lines(draw: Any, known: list[Command]) -> list[str]:
    """Draw the words of one command; what costs time unless it is named is always small."""
    command = draw(st.sampled_from(known))
    words = list(command.words)
    chosen = draw(st.lists(st.sampled_from(command.parameters), max_size=5))
    given = {one.name for one in chosen}
    usual = {"model": "{b}/tiny", "device": "cpu", "strategy": "vanilla", "output": "{w}/out.png"}
    for one in command.parameters:
        if one.name in given:
            continue
        word = word_of(one)
        if not word:
            words.append(draw(st.sampled_from(RIGHT.get(one.name, ("{w}/none",)))))
        elif one.name in usual and draw(st.integers(0, 7)):
            text = usual[one.name]
            if one.name == "output" and command.words[0] in ("bench", "profile", "stepcost"):
                text = "{w}/out.json"
            words += [word, text]
    for one in chosen:
        words += filter(None, [word_of(one)])
        if one.param_type_name == "argument" or not one.is_flag:
            words.append(draw(value_of(one.name)))
    if draw(st.integers(0, 19)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(HOSTILE)))
    return words


def placed(word: str, whole: Path, own: Path) -> str:
    """Put a case's folders in place of ``{b}`` and ``{w}``."""
    return word.replace("{b}", str(whole)).replace("{w}", str(own))
