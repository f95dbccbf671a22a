"""Official files that do not fit, or are not what they should be: each is refused in one sentence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.official import (
    Hostile,
    add_drafter,
    class_folder,
    drafter_config,
    drafter_weights,
    gpt_weights,
    hugging_face,
    refused,
    shard_folder,
    text_folder,
    vq_weights,
    write_drafter,
    write_shards,
    write_sizes,
    write_trained,
)
from torch import Tensor

import lantern_accel
from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.errors import CheckpointError, LanternError, ModelError
from lantern_accel.families.base import Found
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts

#: What is done to a folder that is as it should be.
Change = Callable[[Path], object]
GPT, SIZES = "t2i_tiny_stage1_256.pt", "t2i_tiny_stage1_256.json"
INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00003.safetensors"


def classes(name: str) -> Callable[[Path], Path]:
    """Return what writes a model of classes of an unpublished size, alone and without a configuration."""
    return lambda folder: write_trained(folder / name, gpt_weights(classes=5))


def sharded(index: bool) -> Callable[[Path], Path]:
    """Return what writes a folder of three shards, its image tokenizer next to it."""

    def write(folder: Path) -> Path:
        write_trained(folder / "vq_ds16_t2i.pt", vq_weights(64))
        return shard_folder(folder / "LlamaGen", index=index)

    return write


BASES = {
    "text": text_folder, "c2i": classes("c2i_256.pt"), "model": classes("model.pt"),
    "index": sharded(True), "shards": sharded(False),
}  # fmt: skip


def said(name: str, **sizes: Any) -> Change:
    """Let a configuration say these sizes."""
    return lambda path: write_sizes((path if path.is_dir() else path.parent) / name, **sizes)


def weights(edit: Callable[[dict[str, Tensor]], object], name: str = GPT) -> Change:
    """Let the model, or another file, hold other weights."""

    def change(folder: Path) -> None:
        edit(state := gpt_weights())
        write_trained(folder / name, state)

    return change


def drafted(changes: dict[str, Any], kind: str = "t2i", **sizes: int) -> Change:
    """Add LANTERN's drafter with other values in its configuration; None: left out."""

    def change(folder: Path) -> None:
        config = drafter_config(kind, **sizes) | changes
        config = {name: value for name, value in config.items() if value is not None}
        add_drafter(folder, kind, **sizes).joinpath("config.json").write_text(json.dumps(config))

    return change


def listed(content: object) -> Change:
    """Let the index of shards hold this."""
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": content}))


def cut(share: float) -> Change:
    """Let a shard end after a share or a number of its bytes."""

    def change(folder: Path) -> None:
        whole = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(whole[: int(share if share > 1 else len(whole) * share)])

    return change


def as_bin(folder: Path) -> None:
    """Write the shards in the other format, and next to them a whole model."""
    for path in folder.glob("*.safetensors"):
        name = path.name.replace("model", "pytorch_model").replace("safetensors", "bin")
        torch.save(load_file(path), folder / name)
        path.unlink()
    torch.save(hugging_face(gpt_weights(seed=5)), folder / "pytorch_model.bin")


def config_above(folder: Path) -> None:
    """Add a drafter whose configuration lies in the folder above it."""
    home = add_drafter(folder, "t2i")
    (home / "config.json").rename(home.parent / "config.json")


def stray(folder: Path) -> None:
    save_file(hugging_face(gpt_weights(seed=5)), folder / "model.safetensors")


NO_FILE = ("which is not a file in its folder",)
NO_CONFIG = ("no config.json with num_attention_heads and input_type",)
WRONG_SIZE = ("which is not an integer above 0",)
#: The folder, what is wrong with it, and what the sentence says of it.
FOLDERS: list[tuple[str, str, Change, tuple[str, ...]]] = [
    ("text", "a drafter of other sizes", drafted({}, dim=64, vocab=128),
     ("dim is 64", "model's 32", "vocab_size is 128", "--use drafter=none")),
    ("text", "a drafter of stage 2", drafted({}, "t2i2"), ("its grid is 32 and the model's 16",)),
    ("text", "a drafter of classes", drafted({}, "c2i"), ("its grid is 24 and the model's 16",)),
    ("text", "a drafter without heads", drafted({"num_attention_heads": None}), NO_CONFIG),
    ("text", "a drafter's configuration above it", config_above, NO_CONFIG),
    ("text", "a drafter without a type", drafted({"input_type": None}), NO_CONFIG),
    ("text", "a drafter's width", drafted({"hidden_size": 1280}),
     ("hidden_size 32 by its shapes, but its configuration says 1280",)),
    ("text", "a drafter's heads", drafted({"num_attention_heads": 5}),
     ("dim 32 must be n_head 5 times",)),
    ("text", "a drafter's eps", drafted({"rms_norm_eps": "small"}), ("rms_norm_eps 'small'",)),
    ("text", "another codebook", lambda at: write_trained(at / "vq_ds16_t2i.pt", vq_weights(48)),
     ("another codebook: it has 48 codes", "has 64;")),
    ("text", "two models", weights(dict.copy, "t2i_tiny_stage2_512.pt"), ("holds 2 models", "--model")),
    ("text", "width", said(SIZES, n_head=4, dim=64),
     ("dim 32 by its shapes, but its configuration says 64",)),
    ("text", "heads in words", said(SIZES, n_head="many"), WRONG_SIZE),
    ("text", "no heads", said(SIZES, n_head=0), WRONG_SIZE),
    ("text", "a list", said(SIZES, n_head=4, block_size=[16]), WRONG_SIZE),
    ("text", "a pointer", lambda at: (at / GPT).write_text("version https://git-lfs.github.com"),
     ("git lfs pull",)),
    ("text", "no head", weights(lambda w: w.pop("output.weight")), ("lacks output.weight",)),
    ("text", "no condition", weights(lambda w: w.pop("cls_embedding.uncond_embedding")),
     ("lacks cls_embedding",)),
    ("text", "no output", weights(lambda w: w.pop("layers.1.attention.wo.weight")),
     ("1 key is missing", "'layers.1.attention.wo.weight'")),
    ("text", "no w1", weights(lambda w: w.pop("layers.0.feed_forward.w1.weight")),
     ("lacks layers.0.feed_forward.w1.weight",)),
    ("text", "half a matrix", weights(lambda w: w.pop("layers.0.feed_forward.w3.weight")),
     ("w13.weight", "w1.weight")),
    ("text", "a bias", weights(lambda w: w.update({"layers.0.attention.bias": torch.zeros(32)})),
     ("1 key is unknown", "'layers.0.attention.bias'")),
    ("text", "another name", weights(lambda w: w.update({"norm.w": w.pop("norm.weight")})),
     ("1 key is missing", "and 1 key is unknown", "of another architecture")),
    ("text", "a shape", weights(lambda w: w.update({"output.weight": torch.zeros(15, 32)})),
     (GPT, "output.weight", "[15, 32]", "[64, 32]")),
    ("text", "whole numbers", weights(lambda w: w.update({"norm.weight": w["norm.weight"].long()})),
     ("norm.weight holds int64",)),
    ("c2i", "an unpublished size", lambda at: None, ("2 layers of width 32", "c2i_256.json", "n_head")),
    ("c2i", "heads", said("c2i_256.json", n_head=5), ("multiple of 4",)),
    ("model", "no resolution", said("model.json", n_head=4), ("256, 384 or 512 pixels",)),
    ("model", "no square", said("model.json", n_head=4, block_size=60), ("60 is not a square",)),
    *((base, "no shard", lambda at: (at / SHARD).unlink(), (f"lacks {SHARD} of the 3 files",))
      for base in ("index", "shards")),
    ("index", "another's shard", lambda at: save_file({"something": torch.zeros(3)}, at / SHARD),
     (SHARD, "the folder's index says")),
    *(("index", f"a shard cut at {at}", cut(at), (SHARD, "truncated")) for at in (0, 30, 0.5, 0.999)),
    *(("index", f"{one!r} for a file", listed({"lm_head.weight": one}), NO_FILE)
      for one in ("../secrets.bin", "/etc/passwd", "..", "")),
    *(("index", f"{one} for a list", listed(one), ("cannot be read as an index of shards",))
      for one in ({"lm_head.weight": 3}, [], "x", 3)),
    ("index", "no shards", listed({}), ("lists no shards",)),
    ("index", "a stray file", stray, ("-00001-of-00003", "; model.safetensors)", "name one file")),
    ("shards", "a stray file", stray, ("(model.safetensors;", "-00001-of-00003", "name one file")),
    ("shards", "a stray file of the other format", as_bin,
     ("(pytorch_model.bin;", "-00001-of-00003", "name one file")),
    ("shards", "two sets", lambda at: write_shards(at, hugging_face(gpt_weights()), 2, index=False),
     ("model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors")),
    ("shards", "another model", weights(dict.copy, "t2i_XL.pt"), ("holds 2 models", "t2i_XL.pt")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "what", "change", "says"),
    FOLDERS,
    ids=[f"{base}-{what}" for base, what, *_ in FOLDERS],
)
def test_loading_and_checking_refuse_it_in_the_same_sentence(
    base: str, what: str, change: Change, says: tuple[str, ...], tmp_path: Path
) -> None:
    change(path := BASES[base](tmp_path / "models") or tmp_path)
    with pytest.raises(CheckpointError) as caught:
        lantern_accel.load(path, device="cpu")
    text = str(caught.value)
    assert [one.detail for one in check(path).parts if one.state == "unusable"] == [text]
    assert all(part in text for part in says) and "\n" not in text


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_that_wants_to_run_code(texts: Path, tmp_path: Path, plain: bool) -> None:
    marker, path = tmp_path / "ran", texts / GPT
    if plain:
        path.write_bytes(pickle.dumps({"model": Hostile(marker)}))
    else:
        torch.save({"model": Hostile(marker)}, path)
    text = refused(texts)
    assert ("is not a PyTorch checkpoint" if plain else "run code (posix.mkdir)") in text
    assert path.name in text and not marker.exists()


def test_of_several_drafters_the_fitting_one_is_taken(texts: Path) -> None:
    # The published code goes by the kind alone, whatever prefix its file says.
    drafted({"cls_token_num": 120})(texts)
    other = texts / "trained_drafters" / "llamagen2_drafter"
    write_drafter(other, drafter_weights(), drafter_config("t2i2"))
    found = find_model(texts)
    assert found.files["drafter"].name == "llamagen_drafter"
    assert found.manifest.drafter.prefix_length == 119
    assert find_model(texts, named_parts(drafter="none")).manifest.drafter is None


def test_a_drafter_that_was_trained_here_is_taken_where_it_fits(tmp_path: Path) -> None:
    from lantern_accel.models.bundle import bundled_models, read_manifest

    bundled = bundled_models()["lantern-emoji"]
    trained = tmp_path / "work" / "drafter"
    trained.mkdir(parents=True)
    (trained / "drafter.safetensors").write_bytes((bundled / "drafter.safetensors").read_bytes())
    config = read_manifest(bundled).drafter
    (trained / "drafter.json").write_text(config.model_dump_json())
    torch.save({"key": "", "codes": torch.zeros(2, 4)}, trained / "codes.pt")
    found = find_model("lantern-emoji", named_parts(drafter=trained))
    assert found.files["drafter"] == trained / "drafter.safetensors"
    read = []
    for named in (None, trained):
        with lantern_accel.load("lantern-emoji", device="cpu", drafter=named) as pipe:
            assert pipe.model.drafter.config == config
            read.append(list(pipe.model.drafter.parameters()))
    assert all(torch.equal(*both) for both in zip(*read, strict=True))
    folder = text_folder(tmp_path / "pretrained_models")
    assert "is of another model: its dim is 256" in refused(folder, named_parts(drafter=trained))
    lantern = add_drafter(tmp_path / "other")
    with pytest.raises(
        ModelError, match=r"its dim is 32 and the model's 256, its vocab_size is 64"
    ):
        find_model("lantern-emoji", named_parts(drafter=lantern))
    (trained / "drafter.json").write_text("{}")
    assert "drafter.json: grid" in refused(folder, named_parts(drafter=trained))


def test_a_file_that_is_not_the_part_it_was_named_as(texts: Path) -> None:
    gpt = texts / GPT
    assert "not LlamaGen's image tokenizer (it is a GPT)" in refused(texts, named_parts(vq=gpt))
    assert "not a LANTERN drafter" in refused(texts, named_parts(drafter=gpt))
    assert "no T5 encoder" in refused(texts, named_parts(text_encoder=texts))


@pytest.mark.parametrize(
    ("scale", "place", "says"),
    [
        (1.0, float("nan"), "the file is damaged"),
        (1.0, float("-inf"), "the file is damaged"),
        (1e6, 1.0, "which float16 cannot hold"),
    ],
)
def test_weights_that_are_no_numbers_for_the_device(
    texts: Path, scale: float, place: float, says: str
) -> None:
    key = "layers.1.attention.wo.weight"
    weights(lambda w: w[key].mul_(scale).index_fill_(0, torch.tensor(3), place))(texts)
    with pytest.raises(CheckpointError, match=says) as caught:
        lantern_accel.load(texts, device="cpu", dtype="float16")
    assert key in str(caught.value)
    if "float16" in says:
        lantern_accel.load(texts, device="cpu", dtype="bfloat16").close()


def test_nothing_known_lies_there(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pt")
    assert "holds resnet.pt (conv1.weight, ...), which is not a model" in refused(tmp_path)
    (tmp_path / "void").mkdir()
    assert "holds no weights; name a folder" in refused(tmp_path / "void")
    assert "there is no" in refused(tmp_path / "absent.pt")
    assert "did you mean llamagen-b-256" in refused(Path("llamagen-b-255"))
    only = tmp_path / "only_vq"
    write_trained(only / "vq_ds16_c2i.pt", vq_weights(64))
    assert "vq_ds16_c2i.pt (vq)" in refused(only)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path / "void")


def test_class_folders_take_no_text_encoder(tmp_path: Path) -> None:
    found: Found = find_model(class_folder(tmp_path / "pretrained_models"))
    assert "text" not in found.missing and found.manifest.target.num_classes == 7
    assert found.manifest.target.grid == 24


CONTENTS: list[tuple[str, bytes | object, str]] = [
    ("a page", b"<html>404</html>", "is not a PyTorch checkpoint"),
    ("a word", b"hi", "is not a PyTorch checkpoint"),
    ("an image", b"\x89PNG", "is not a PyTorch checkpoint"),
    ("a list", [1, 2], "holds a list, not a state dict"),
    ("other names", {3: torch.ones(2)}, "of the type int, not text"),
]


@pytest.mark.parametrize(("what", "content", "says"), CONTENTS)
def test_another_kind_of_file_is_refused_without_torchs_advice(
    what: str, content: bytes | object, says: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "w.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "w.pt")
    with pytest.raises(LanternError, match=says) as caught:
        open_checkpoint(tmp_path / "w.pt")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("share", [0, 5, 0.5, 0.99])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_truncated_file_is_refused(suffix: str, share: float, tmp_path: Path) -> None:
    path, state = tmp_path / f"w.{suffix}", gpt_weights()
    if suffix == "pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share if share > 1 else len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"cannot be read as|is empty") as caught:
        open_checkpoint(path)
    assert path.name in str(caught.value) and "fetch it again" in str(caught.value)


def test_a_folder_of_several_checkpoints_is_not_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"2 sets of weights \(a.safetensors; b.safe"):
        open_checkpoint(tmp_path)
