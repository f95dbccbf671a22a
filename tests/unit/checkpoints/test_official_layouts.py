"""Official files on disk: what they are, told by their shapes; shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.official import (
    add_drafter,
    gpt_weights,
    hugging_face,
    refused,
    vq_weights,
    write_shards,
    write_sizes,
    write_trained,
)

from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.errors import ModelError
from lantern_accel.families.llamagen.official import vq_config
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts

# --- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "pixels", "published"),
    [
        ("c2i_B_256.pt", (12, 768, 2048), 256, "llamagen-b-256"),
        ("c2i_B_384.pt", (12, 768, 2048), 384, "llamagen-b-384"),
        ("anything.pt", (24, 3200, 8704), 384, "llamagen-3b-384"),
    ],
)
def test_published_sizes_are_known_by_their_shapes(
    tmp_path: Path, name: str, size: tuple[int, int, int], pixels: int, published: str
) -> None:
    """Shapes without data: headers are all that is read."""
    layers, dim, ffn = size
    shapes = {
        "tok_embeddings.weight": (16384, dim),
        "output.weight": (16384, dim),
        "norm.weight": (dim,),
        "cls_embedding.embedding_table.weight": (1001, dim),
    }
    for i in range(layers):
        shapes[f"layers.{i}.attention.wqkv.weight"] = (3 * dim, dim)
        shapes[f"layers.{i}.feed_forward.w1.weight"] = (ffn, dim)
    path = tmp_path / name
    # A sparse file of the right length: no byte of it is weights.
    header, place = {}, 0
    for key, shape in shapes.items():
        size_ = 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size_]}
        place += size_
    text = json.dumps(header).encode()
    path = path.with_suffix(".safetensors")
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + place)
    found = find_model(path)
    assert found.manifest.name == published
    assert found.manifest.target.grid * 16 == pixels
    assert found.manifest.defaults.sampling.cfg_scale == 4.0
    assert "vq_ds16_c2i.pt" in found.missing["vq"]


def test_a_folder_with_everything(texts: Path) -> None:
    add_drafter(texts)
    found = find_model(texts)
    assert set(found.files) == {"target", "vq", "drafter"}
    assert found.manifest.drafter.mask_padding is False
    assert found.manifest.drafter.bias is True
    assert found.manifest.defaults.sampling.cfg_scale == 7.5
    assert "flan-t5-xl" in found.missing["text"]
    # The published top-k is more than this codebook has.
    assert found.manifest.defaults.sampling.top_k == 0


def test_parts_that_lie_elsewhere(texts: Path, tmp_path: Path) -> None:
    drafter = add_drafter(tmp_path / "other")
    vq = (texts / "vq_ds16_t2i.pt").rename(tmp_path / "tokenizer.pt")
    assert "vq" not in find_model(texts).files
    found = find_model(texts, named_parts(vq=vq, drafter=drafter))
    assert found.files["drafter"] == drafter and found.files["vq"] == vq
    assert "drafter" not in find_model(texts, named_parts(drafter="none")).files
    with pytest.raises(ModelError, match="given with --use vq"):
        named_parts(vq=tmp_path / "nowhere.pt")


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_a_state_dict_under_any_of_its_usual_names(tmp_path: Path, wrap: str | None) -> None:
    path = write_trained(tmp_path / "c2i_256.pt", gpt_weights(classes=5), wrap)
    write_sizes(tmp_path / "c2i_256.json", n_head=4)
    assert find_model(path).manifest.target.num_classes == 5


def test_the_training_arguments_in_the_file_say_the_sizes(tmp_path: Path) -> None:
    import argparse

    weights = gpt_weights(dim=48, classes=5)
    arguments = argparse.Namespace(gpt_model="GPT-B", image_size=384, downsample_size=16)
    torch.save({"model": weights, "optimizer": {}, "args": arguments}, tmp_path / "x.pt")
    found = find_model(tmp_path / "x.pt")
    assert (found.manifest.target.n_head, found.manifest.target.grid) == (12, 24)


def test_harmless_extra_keys_are_ignored_and_no_others(texts: Path) -> None:
    from lantern_accel.checkpoints.loading import HARMLESS

    for key in ("freqs_cis", "quantize.codebook_used", "loss.discriminator.main.0.weight"):
        assert HARMLESS.search(key)
    assert not HARMLESS.search("layers.0.attention.bias")
    gpt = texts / "t2i_tiny_stage1_256.pt"
    weights = gpt_weights()
    write_trained(gpt, {**weights, "freqs_cis": torch.zeros(376, 4, 2)})
    assert check(texts).usable
    write_trained(gpt, {**weights, "layers.0.attention.bias": torch.zeros(32)})
    report = check(texts)
    assert not report.usable
    assert "'layers.0.attention.bias'" in report.parts[0].detail


def test_tokenizer_sizes_come_from_shapes(tmp_path: Path) -> None:
    path = write_trained(tmp_path / "vq.pt", vq_weights(96, ch_mult=(1, 2, 2)))
    config = vq_config(open_checkpoint(path))
    assert (config.codebook_size, config.codebook_dim, config.ch_mult) == (96, 8, (1, 2, 2))
    assert config.downsample == 4 and config.num_res_blocks == 1


# --- shards -------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = write_shards(tmp_path / "LlamaGen-T2I", hugging_face(gpt_weights()), 3)
    write_sizes(folder / "config.json", num_attention_heads=4, input_type="t2i")
    write_trained(tmp_path / "vq_ds16_t2i.pt", vq_weights(64))
    return folder


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(shards: Path, index: bool) -> None:
    if not index:
        (shards / "model.safetensors.index.json").unlink()
    assert find_model(shards).manifest.target.n_layer == 2
    (shards / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors of the 3 files" in refused(shards)
    assert "model-00002-of-00003.safetensors" in check(shards).parts[0].detail


def test_a_shard_of_another_checkpoint_is_found_by_the_index(shards: Path) -> None:
    name = "model-00002-of-00003.safetensors"
    save_file({"something": torch.zeros(3)}, shards / name)
    text = refused(shards)
    assert name in text and "the folder's index says" in text


@pytest.mark.parametrize("kept", [0, 30, 0.5, 0.999])
def test_a_truncated_shard_is_named(shards: Path, kept: float) -> None:
    path = shards / "model-00003-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(len(whole) * kept)])
    text = refused(shards)
    assert path.name in text and "truncated" in text


def test_a_broken_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "cannot be read as an index of shards" in refused(shards)


def test_a_git_lfs_pointer_is_not_weights(texts: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 99\n"
    (texts / "t2i_tiny_stage1_256.pt").write_text(pointer)
    assert "git lfs pull" in refused(texts)


def test_a_small_checkpoint_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle is loaded whole each time, so that blocks of a few KB would take seconds."""
    checkpoint = open_checkpoint(write_trained(tmp_path / "c2i_tiny.pt", gpt_weights(classes=7)))
    monkeypatch.setattr(torch, "load", lambda *given, **named: pytest.fail("it is loaded again"))
    for _ in range(2):
        for key in checkpoint:
            assert checkpoint.read(key).numel()
