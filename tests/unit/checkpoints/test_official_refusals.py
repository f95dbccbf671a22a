"""Official files that do not fit, or are not what they should be: each is refused in one sentence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.official import (
    Hostile,
    add_drafter,
    class_folder,
    drafter_config,
    drafter_weights,
    gpt_weights,
    hugging_face,
    refused,
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
from lantern_accel.errors import CheckpointError, ModelError
from lantern_accel.families.base import Found
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts


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
    for part in ("dim is 64", "model's 32", "vocab_size is 128", "--use drafter=none"):
        assert part in text
    assert find_model(texts, named_parts(drafter="none")).manifest.drafter is None


@pytest.mark.parametrize(("kind", "side"), [("t2i2", 32), ("c2i", 24)])
def test_a_drafter_of_another_stage_is_refused(texts: Path, kind: str, side: int) -> None:
    add_drafter(texts, kind)
    text = refused(texts)
    assert f"its grid is {side} and the model's 16" in text


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
    assert "hidden_size 32 by its shapes, but its configuration says 1280" in refused(texts)


def test_a_drafter_that_was_trained_here_is_taken_where_it_fits(tmp_path: Path) -> None:
    import lantern_accel
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
    assert "is of another model: its dim is 256" in refused(folder, named_parts(drafter=trained))
    lantern = add_drafter(tmp_path / "other")
    with pytest.raises(
        ModelError, match=r"its dim is 32 and the model's 256, its vocab_size is 64"
    ):
        find_model("lantern-emoji", named_parts(drafter=lantern))
    (trained / "drafter.json").write_text("{}")
    assert "drafter.json: grid" in refused(folder, named_parts(drafter=trained))


def test_a_tokenizer_of_another_codebook(texts: Path) -> None:
    write_trained(texts / "vq_ds16_t2i.pt", vq_weights(48))
    text = refused(texts)
    assert "another codebook: it has 48 codes" in text and "samples from 64" in text


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
        assert "which is not an integer above 0" in refused(texts)


def test_a_drafters_configuration_that_is_wrong(texts: Path) -> None:
    folder = add_drafter(texts)
    config = drafter_config("t2i")
    # The published code goes by the kind alone, whatever prefix its file says.
    write_sizes(folder / "config.json", **config, cls_token_num=120)
    assert find_model(texts).manifest.drafter.prefix_length == 119
    write_sizes(folder / "config.json", **{**config, "num_attention_heads": 5})
    assert "dim 32 must be n_head 5 times" in refused(texts)
    write_sizes(folder / "config.json", **{**config, "rms_norm_eps": "small"})
    assert "rms_norm_eps 'small'" in refused(texts)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.long(), "holds int64"),
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
        assert "which is not a file in its folder" in refused(folder)
    for listed in ({"lm_head.weight": 3}, [], "x"):
        index.write_text(json.dumps({"weight_map": listed}))
        assert "cannot be read as an index" in refused(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "lists no shards" in refused(folder)


def test_nothing_known_lies_there(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pt")
    told = refused(tmp_path)
    assert (
        "holds resnet.pt (conv1.weight, ...), which is not a model that this version knows;" in told
    )
    (tmp_path / "void").mkdir()
    assert "holds no weights; name a folder" in refused(tmp_path / "void")
    assert "there is no" in refused(tmp_path / "absent.pt")
    assert "did you mean llamagen-b-256" in refused(Path("llamagen-b-255"))
    only = tmp_path / "only_vq"
    write_trained(only / "vq_ds16_c2i.pt", vq_weights(64))
    assert "vq_ds16_c2i.pt (vq)" in refused(only)


def test_class_folders_take_no_text_encoder(tmp_path: Path) -> None:
    found: Found = find_model(class_folder(tmp_path / "pretrained_models"))
    assert "text" not in found.missing and found.manifest.target.num_classes == 7
    assert found.manifest.target.grid == 24


def test_a_folder_of_several_checkpoints_is_not_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"several checkpoints \(a.safetensors, b.safe"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint((tmp_path / "empty").mkdir() or tmp_path / "empty")
