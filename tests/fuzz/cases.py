"""What a case is drawn from: commands, files damaged in one place, values of any type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.damage import BYTES, TENSORS, VALUES, json_edits
from fuzz.words import HOSTILE, Command, command_lines

GENERATE = ["generate", "red heart", "-d", "cpu", "-o", "{w}/out.png", "-q"]
STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern++", "scd")
PARTS = ("target", "vq", "drafter", "text")


def cases(whole: Path, known: list[Command]) -> st.SearchStrategy[dict[str, Any]]:
    """Return every kind of case over a folder of whole files."""
    return st.one_of(
        *[_commands(known)] * 5,
        _models(whole),
        _weights(),
        _runs(whole),
        _other_files(whole),
        _calls(),
        st.builds(lambda edit: {"target": "entry", "edit": edit}, BYTES),
    )


def _commands(known: list[Command]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda words: {"target": "command", "words": words}, command_lines(known))


@st.composite
def _models(draw: Any, whole: Path) -> dict[str, Any]:
    """``model.json`` or the tokenizer of a model damaged, and a command that reads it."""
    name = draw(
        st.sampled_from(["tiny/model.json", "classes/model.json", "tiny/text_tokenizer.json"])
    )
    base = whole / name
    edit = draw(st.one_of(
        st.builds(lambda e: ["json", e], json_edits(base)), st.builds(lambda e: ["bytes", e], BYTES)
    ))  # fmt: skip
    words = draw(st.sampled_from([
        [*GENERATE, "-s", "vanilla"], [*GENERATE, "-s", "lantern++:k=3"],
        ["models", "check"], ["models", "check"], ["models", "plan"],
        ["train", "drafter", "--work", "{w}/work", "--steps", "1"],
    ]))  # fmt: skip
    model = "{w}/model"
    if words[:2] == ["models", "plan"]:
        words = [*words, model]
    elif words[:2] == ["models", "check"]:
        words = ["models", "check", model]
    else:
        words = [*words, "--model", model]
        if name.startswith("classes"):
            words[1] = "3" if words[0] == "generate" else words[1]
    return {
        "target": "command",
        "words": words,
        "files": {f"model/{base.name}": [name, "model", edit]},
    }


@st.composite
def _weights(draw: Any) -> dict[str, Any]:
    """One tensor of one part damaged, or its bytes."""
    part = draw(st.sampled_from(PARTS))
    edit = draw(st.one_of(
        st.builds(lambda n, k: ["tensors", [n, k]], st.integers(0, 60), st.sampled_from(TENSORS)),
        st.builds(lambda e: ["bytes", e], BYTES),
    ))  # fmt: skip
    strategy = draw(st.sampled_from(STRATEGIES))
    named = "lantern++:k=3" if strategy == "lantern++" else strategy
    words = [*GENERATE, "-s", named, "--model", "{w}/model"]
    words += ["--dtype", draw(st.sampled_from(["float32", "bfloat16", "float16"]))]
    words += ["--temperature", draw(st.sampled_from(["0", "1"]))]
    name = f"{part}.safetensors"
    return {
        "target": "command",
        "words": words,
        "files": {f"model/{name}": [f"tiny/{name}", "model", edit]},
    }


@st.composite
def _runs(draw: Any, whole: Path) -> dict[str, Any]:
    """A run damaged, and what reads runs."""
    edit = draw(st.one_of(
        st.builds(lambda e: ["json", e], json_edits(whole / "run.json")),
        st.builds(lambda e: ["bytes", e], BYTES),
    ))  # fmt: skip
    words = draw(st.sampled_from([
        ["compare", "{w}/run.json", "-o", "{w}/out.json"],
        ["compare", "{w}/run.json", "-o", "{w}/out.md"],
        ["compare", "{w}/run.json", "other={b}/run.json", "-o", "{w}/out.html"],
        ["compare", "{w}/run.json", "other={b}/run.json", "--rent", "other=2.1EUR",
         "--latency", "0.05", "--tv-budget", "0.2", "-o", "{w}/out.md"],
        ["profiles", "add", "{w}/run.json", "--out", "{w}/filed"],
        ["profile", "-m", "{b}/tiny", "-d", "cpu", "--quick", "--resume", "-o", "{w}/run.json"],
        ["evaluate", "-m", "{b}/tiny", "--device", "cpu", "-o", "{w}/run.json"],
    ]))  # fmt: skip
    return {"target": "command", "words": words, "files": {"run.json": ["run.json", *edit]}}


@st.composite
def _other_files(draw: Any, whole: Path) -> dict[str, Any]:
    """Configurations, notes, features, prompts, images, a device's figures, a checkpoint."""
    base, words = draw(st.sampled_from([
        ("config.json", ["train", "tokenizer", "--work", "{w}/work", "--config", "{w}/config.json"]),
        ("config.json", ["train", "target", "--work", "{w}/work", "--config", "{w}/config.json"]),
        ("config.json", ["train", "drafter", "--work", "{w}/work", "--config", "{w}/config.json",
                         "--model", "{b}/tiny", "--images", "{b}/images"]),
        ("config.json", ["stepcost", "--size", "{w}/config.json"]),
        ("notes.json", [*GENERATE, "-n", "2", "--seed", "3", "--resume", "-m", "{b}/tiny"]),
        ("embeddings.safetensors", [*GENERATE, "-s", "vanilla", "-m", "{b}/tiny", "--use",
                                    "embeddings={w}/embeddings.safetensors"]),
        ("prompts.txt", [*GENERATE, "-s", "vanilla", "-m", "{b}/tiny", "--prompts", "{w}/prompts.txt"]),
        ("images/captions.jsonl", ["train", "drafter", "--work", "{w}/work", "--model", "{b}/tiny",
                                   "--images", "{w}/images"]),
        ("profile.toml", None),
        ("tiny/vq.safetensors", "checkpoint"),
    ]))  # fmt: skip
    name = {"notes.json": ".out.png.lantern.json"}.get(base, base)
    edit = ["bytes", draw(BYTES)]
    if base.endswith(".json") and draw(st.booleans()):
        edit = ["json", draw(json_edits(whole / base))]
    if words == "checkpoint":
        return {"target": "checkpoint", "files": {"checkpoint.pt": [base, *edit]}}
    target = {"target": "profile"} if words is None else {"target": "command", "words": words}
    return {**target, "files": {name: [base, *edit]}}


ANY = (*VALUES, *HOSTILE[:40], "object!", "nan!", "inf!", "bytes!", "set!", "tensor!", "array!", "type!",
       "path!", "complex!", "huge!", "tuple!", "lambda!", "generator!")  # fmt: skip


@st.composite
def _calls(draw: Any) -> dict[str, Any]:
    """Keywords of ``generate`` with values of any type."""
    from lantern_accel.generation.settings import Settings

    names = st.sampled_from([*Settings.model_fields, "prompt", "only", "nonsense"])
    given = draw(st.dictionaries(names, st.sampled_from(ANY), min_size=1, max_size=3))
    given.setdefault("strategy", draw(st.sampled_from(["vanilla", "scd", "eagle"])))
    return {"target": "call", "given": given}
