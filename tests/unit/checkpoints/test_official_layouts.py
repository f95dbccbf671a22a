"""Official files on disk: what they are, told by shapes, and what is refused, in one sentence."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.official import (
    class_folder,
    drafter_config,
    drafter_weights,
    gpt_weights,
    hugging_face,
    text_folder,
    vq_weights,
    write_drafter,
    write_shards,
    write_sizes,
    write_trained,
)
from torch import Tensor

import lantern_accel
from lantern_accel.checkpoints.check import check
from lantern_accel.checkpoints.locate import find_model, named_parts
from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.errors import CheckpointError, ModelError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.llamagen.official import target_config
from lantern_accel.families.llamagen.parts import vq_config


def refused(path: Path, parts: Parts | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(path, parts)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return text_folder(tmp_path / "pretrained_models")


def add_drafter(folder: Path, input_type: str = "t2i", **sizes: int) -> Path:
    return write_drafter(
        folder / "trained_drafters" / "llamagen_drafter",
        drafter_weights(**sizes),
        drafter_config(input_type, **sizes),
    )


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
    with pytest.raises(ModelError, match="given with --vq"):
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


# --- what is refused ----------------------------------------------------------------------------


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_that_wants_to_run_code(texts: Path, tmp_path: Path, plain: bool) -> None:
    marker, path = tmp_path / "ran", texts / "t2i_tiny_stage1_256.pt"
    if plain:
        path.write_bytes(pickle.dumps({"model": Hostile(marker)}))
    else:
        torch.save({"model": Hostile(marker)}, path)
    text = refused(texts)
    assert "wants to run code (posix.mkdir), which is refused" in text
    assert path.name in text and not marker.exists()


def test_a_drafter_of_another_model_is_refused_with_all_sizes(texts: Path) -> None:
    add_drafter(texts, dim=64, vocab=128)
    text = refused(texts)
    for part in ("width 64", "128 codes", "width 32", "64 codes", "--drafter none"):
        assert part in text
    assert find_model(texts, named_parts(drafter="none")).manifest.drafter is None


@pytest.mark.parametrize(("kind", "side"), [("t2i2", 32), ("c2i", 24)])
def test_a_drafter_of_another_stage_is_refused(texts: Path, kind: str, side: int) -> None:
    add_drafter(texts, kind)
    text = refused(texts)
    assert f"{side} x {side} tokens" in text and "16 x 16 tokens" in text


def test_the_fitting_one_of_two_drafters_is_taken(texts: Path) -> None:
    add_drafter(texts, "t2i")
    other = texts / "trained_drafters" / "llamagen2_drafter"
    write_drafter(other, drafter_weights(), drafter_config("t2i2"))
    assert find_model(texts).files["drafter"].name == "llamagen_drafter"


@pytest.mark.parametrize("missing", ["num_attention_heads", "input_type"])
def test_a_drafter_without_its_configuration(texts: Path, missing: str) -> None:
    folder = add_drafter(texts)
    config = drafter_config("t2i")
    del config[missing]
    (folder / "config.json").write_text(json.dumps(config))
    assert "no config.json with num_attention_heads and input_type" in refused(texts)


def test_a_drafter_whose_configuration_is_of_another(texts: Path) -> None:
    folder = add_drafter(texts)
    (folder / "config.json").write_text(json.dumps(drafter_config("t2i", dim=1280)))
    assert "hidden_size 32 by its shapes, but its config.json says 1280" in refused(texts)


def test_a_drafter_that_was_trained_here_is_taken_where_it_fits(tmp_path: Path) -> None:
    import lantern_accel
    from lantern_accel.checkpoints.bundle import bundled_models, read_manifest

    bundled = bundled_models()["lantern-emoji"]
    trained = tmp_path / "work" / "drafter"
    trained.mkdir(parents=True)
    (trained / "drafter.safetensors").write_bytes((bundled / "drafter.safetensors").read_bytes())
    config = read_manifest(bundled).drafter
    (trained / "drafter.json").write_text(config.model_dump_json())
    torch.save({"key": "", "codes": torch.zeros(2, 4)}, trained / "codes.pt")
    found = find_model("lantern-emoji", named_parts(drafter=trained))
    assert found.files["drafter"] == trained / "drafter.safetensors"
    with (
        lantern_accel.load("lantern-emoji", device="cpu", dtype="float32") as own,
        lantern_accel.load(
            "lantern-emoji", device="cpu", dtype="float32", drafter=trained
        ) as other,
    ):
        assert own.model.drafter.config == other.model.drafter.config
        for mine, theirs in zip(
            own.model.drafter.parameters(), other.model.drafter.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
    folder = text_folder(tmp_path / "pretrained_models")
    assert "is of another model: width 256" in refused(folder, named_parts(drafter=trained))
    lantern = add_drafter(tmp_path / "other")
    with pytest.raises(ModelError, match=r"width 32, 64 codes.*lantern-emoji needs width 256"):
        find_model("lantern-emoji", named_parts(drafter=lantern))
    (trained / "drafter.json").write_text("{}")
    assert "drafter.json: dim" in refused(folder, named_parts(drafter=trained))


def test_a_tokenizer_of_another_codebook(texts: Path) -> None:
    write_trained(texts / "vq_ds16_t2i.pt", vq_weights(48))
    text = refused(texts)
    assert "another codebook: it has 48 codes" in text and "draws from 64" in text


def test_a_file_that_is_not_the_part_it_was_named_as(texts: Path) -> None:
    gpt = texts / "t2i_tiny_stage1_256.pt"
    assert "not LlamaGen's image tokenizer (it is a GPT)" in refused(texts, named_parts(vq=gpt))
    assert "not a LANTERN drafter" in refused(texts, named_parts(drafter=gpt))
    assert "no T5 encoder" in refused(texts, named_parts(text_encoder=texts))


def test_several_models_in_one_folder(texts: Path) -> None:
    write_trained(texts / "t2i_tiny_stage2_512.pt", gpt_weights())
    text = refused(texts)
    assert "holds 2 models" in text and "name one: --model" in text


def test_a_size_that_is_not_published(tmp_path: Path) -> None:
    path = write_trained(tmp_path / "c2i_256.pt", gpt_weights(classes=5))
    text = refused(path)
    assert "2 layers of width 32" in text and "c2i_256.json" in text and "n_head" in text
    write_sizes(tmp_path / "c2i_256.json", n_head=5)
    assert "multiple of 4" in refused(path)


def test_a_resolution_that_nothing_tells(tmp_path: Path) -> None:
    path = write_trained(tmp_path / "model.pt", gpt_weights(classes=5))
    write_sizes(tmp_path / "model.json", n_head=4)
    assert "256, 384 or 512 pixels" in refused(path)
    write_sizes(tmp_path / "model.json", n_head=4, block_size=60)
    assert "60 is not a square" in refused(path)


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("output.weight", "lacks output.weight"),
        ("cls_embedding.uncond_embedding", "lacks cls_embedding"),
        ("layers.1.attention.wo.weight", "1 key is missing"),
        ("layers.0.feed_forward.w1.weight", "lacks layers.0.feed_forward.w1.weight"),
    ],
)
def test_a_part_of_the_checkpoint_is_absent(texts: Path, gone: str, told: str) -> None:
    weights = gpt_weights()
    del weights[gone]
    write_trained(texts / "t2i_tiny_stage1_256.pt", weights)
    report = check(texts)
    assert not report.usable
    assert told in report.parts[0].detail


def test_a_configuration_that_is_not_of_the_weights(texts: Path) -> None:
    config = texts / "t2i_tiny_stage1_256.json"
    write_sizes(config, n_head=4, dim=64)
    assert "dim 32 by its shapes, but its configuration says 64" in refused(texts)
    for wrong in ({"n_head": "many"}, {"n_head": 0}, {"n_head": 4, "block_size": [16]}):
        write_sizes(config, **wrong)
        assert "which is no number of things" in refused(texts)


def test_a_drafters_configuration_that_is_wrong(texts: Path) -> None:
    folder = add_drafter(texts)
    config = drafter_config("t2i")
    # The published code goes by the kind alone, whatever prefix its file says.
    write_sizes(folder / "config.json", **config, cls_token_num=120)
    assert find_model(texts).manifest.drafter.prefix_length == 119
    write_sizes(folder / "config.json", **{**config, "num_attention_heads": 5})
    assert "dim 32 must be n_head 5 times" in refused(texts)
    write_sizes(folder / "config.json", **{**config, "rms_norm_eps": "small"})
    assert "norm_eps: Input should be a valid number" in refused(texts)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.long(), "holds int64; quantised checkpoints cannot be read"),
        (lambda t: t.index_fill(0, torch.tensor(3), float("nan")), "the file is damaged"),
        (lambda t: t.index_fill(0, torch.tensor(3), float("-inf")), "the file is damaged"),
        (lambda t: t * 1e6, "which float16 cannot hold"),
    ],
    ids=["whole", "nan", "inf", "large"],
)
def test_weights_that_are_no_numbers_for_the_device(
    texts: Path, change: Callable[[Tensor], Tensor], told: str
) -> None:
    weights = gpt_weights()
    weights["layers.1.attention.wo.weight"] = change(weights["layers.1.attention.wo.weight"])
    write_trained(texts / "t2i_tiny_stage1_256.pt", weights)
    with pytest.raises(CheckpointError, match=told) as caught:
        lantern_accel.load(texts, device="cpu", dtype="float16")
    assert "layers.1.attention.wo.weight" in str(caught.value)
    if "int64" in told:
        assert told in check(texts).parts[0].detail
    if "float16" in told:
        lantern_accel.load(texts, device="cpu", dtype="bfloat16").close()


def test_an_index_that_names_no_files_of_its_folder(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", hugging_face(gpt_weights()), 2)
    index = folder / "model.safetensors.index.json"
    for name in ("../secrets.bin", "/etc/passwd", "..", ""):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        assert "which is no file of its folder" in refused(folder)
    for listed in ({"lm_head.weight": 3}, [], "x"):
        index.write_text(json.dumps({"weight_map": listed}))
        assert "cannot be read as an index" in refused(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "lists no shards" in refused(folder)


def test_nothing_known_lies_there(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pt")
    told = refused(tmp_path)
    assert "holds no model that this build knows, but resnet.pt (conv1.weight, ...);" in told
    (tmp_path / "void").mkdir()
    assert "but no weights at all" in refused(tmp_path / "void")
    assert "there is no" in refused(tmp_path / "absent.pt")
    assert "did you mean llamagen-b-256" in refused(Path("llamagen-b-255"))
    only = tmp_path / "only_vq"
    write_trained(only / "vq_ds16_c2i.pt", vq_weights(64))
    assert "vq_ds16_c2i.pt (vq)" in refused(only)


def test_class_folders_take_no_text_encoder(tmp_path: Path) -> None:
    found: Found = find_model(class_folder(tmp_path / "pretrained_models"))
    assert "text" not in found.missing and found.manifest.target.num_classes == 7
    assert found.manifest.target.grid == 24


def test_target_config_reads_what_safetensors_say_of_themselves(tmp_path: Path) -> None:
    from lantern_accel.checkpoints.layouts import examine
    from lantern_accel.families.llamagen.official import classify

    said = json.dumps({"n_head": 8, "block_size": 16, "norm_eps": 1e-6})
    path = tmp_path / "x.safetensors"
    save_file(gpt_weights(classes=3), path, metadata={"config": said})
    config = target_config(examine(path, classify))
    assert (config.n_head, config.grid, config.norm_eps) == (8, 4, 1e-6)


def test_a_folder_of_several_checkpoints_is_not_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"several checkpoints \(a.safetensors, b.safe"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint((tmp_path / "empty").mkdir() or tmp_path / "empty")
