"""Anole and Lumina found in folders laid out as their READMEs say, and folders that are refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.chameleon import (
    hf_config,
    random_drafter_weights,
    random_hf_weights,
    tiny_vq,
    vocabulary,
    write_anole,
    write_drafter,
    write_hf,
    write_lumina,
    write_text_tokenizer,
    write_vqgan,
)

from lantern_accel.errors import CheckpointError, ModelError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.chameleon.family import ChameleonFamily
from lantern_accel.families.chameleon.manifest import ChameleonManifest
from lantern_accel.families.registry import ask
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model

detect = functools.partial(ask, ChameleonFamily())


def found(path: Path, **parts: object) -> tuple[Found, ChameleonManifest]:
    what = detect(path, Parts(**parts))  # type: ignore[arg-type]
    assert what is not None
    assert isinstance(what.manifest, ChameleonManifest)
    return what, what.manifest


def test_anole_in_the_original_layout(tmp_path: Path) -> None:
    what, manifest = found(write_anole(tmp_path / "Anole-7b-v0.1", layout="original"))
    assert manifest.variant == "anole"
    assert (manifest.target.n_layer, manifest.target.n_head, manifest.target.ffn_dim) == (2, 4, 48)
    assert (manifest.target.height, manifest.target.width, manifest.target.num_tokens) == (
        32,
        32,
        1024,
    )
    assert manifest.target.image_codes == manifest.vq.codebook_size == 16
    assert manifest.vq.downsample == 2
    assert not manifest.vq.l2_norm
    assert manifest.defaults.sampling.cfg_scale == 3.0
    assert manifest.defaults.sampling.top_k == 0  # 2000 of 16 codes are all of them
    assert set(what.files) == {"target", "vq", "drafter", "text_tokenizer"}
    assert not what.missing


def test_a_release_is_called_by_its_folder_wherever_in_it_a_path_points(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "Anole-7b-v0.1", layout="original")
    for path in (folder, folder / "models" / "7b", folder / "models" / "7b" / "consolidated.pth"):
        what, manifest = found(path)
        assert manifest.name == "Anole-7b-v0.1"
        assert {"vq", "text_tokenizer", "drafter"} <= set(what.files)


def test_anole_in_hugging_faces_layout(tmp_path: Path) -> None:
    _, manifest = found(write_anole(tmp_path / "Anole-7b-v0.1-hf", layout="hf", side=6))
    assert manifest.variant == "anole"
    assert (manifest.target.height, manifest.target.width) == (6, 6)
    assert manifest.drafter is not None
    assert manifest.drafter.bias


def test_lanterns_folders_have_the_parts_beside_the_model(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole" / "Anole-7b-v0.1-hf", layout="hf")
    home = folder.parent
    (home / "chameleon").mkdir()
    shutil.move(folder / "tokenizer", home / "chameleon" / "tokenizer")
    (home / "trained_drafters").mkdir()
    shutil.move(folder / "drafter", home / "trained_drafters" / "anole_drafter")
    what, _ = found(folder)
    assert what.files["vq"] == home / "chameleon" / "tokenizer" / "vqgan.ckpt"
    assert what.files["drafter"] == home / "trained_drafters" / "anole_drafter"
    assert not what.missing


def test_lumina_with_its_picture_tokenizer_in_the_same_shards(tmp_path: Path) -> None:
    what, manifest = found(write_lumina(tmp_path / "Lumina-mGPT-7B-512"))
    assert manifest.variant == "lumina"
    assert manifest.side == 32
    assert manifest.target.num_tokens == 32 * 33
    assert manifest.target.newline_id == manifest.ids.newline
    assert what.files["vq"] == what.files["target"]
    assert manifest.defaults.sampling.cfg_scale == 4.0
    assert "lantern-accel train drafter" in what.missing["drafter"]


def lumina_alone(folder: Path, **more: object) -> Path:
    """Write weights and text tokenizer of a Lumina, and what its configuration says besides sizes."""
    weights = random_hf_weights(1)
    write_hf(folder, weights, hf_config(weights, 4, max_position_embeddings=10240, **more))
    write_text_tokenizer(folder / "tokenizer.json", vocabulary(16, "a", lumina=True))
    return folder


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("Lumina-mGPT-7B-768", 48),
        ("models--Alpha-VLLM--Lumina-mGPT-7B-1024/snapshots/" + "0" * 40, 64),
    ],
)
def test_luminas_picture_size_is_that_of_the_repository(
    tmp_path: Path, name: str, side: int
) -> None:
    what, manifest = found(lumina_alone(tmp_path / name, mask_image_logits=False))
    assert (manifest.variant, manifest.side) == ("lumina", side)
    assert manifest.target.max_positions == 10240
    assert "--use vq=" in what.missing["vq"]


def test_a_lumina_of_unknown_size_has_to_be_named(tmp_path: Path) -> None:
    folder = lumina_alone(tmp_path / "x", mask_image_logits=False)
    with pytest.raises(CheckpointError, match="--model lumina-mgpt-7b-512="):
        find_model(folder)
    for name, side in (("lumina-mgpt-7b-768", 48), ("Alpha-VLLM/Lumina-mGPT-7B-1024", 64)):
        assert find_model(f"{name}={folder}").manifest.side == side
    with pytest.raises(ModelError, match=r"there is no .*gone"):
        find_model(f"lumina-mgpt-7b-768={tmp_path / 'gone'}")
    with pytest.raises(ModelError, match="name a folder"):
        find_model(f"janus-pro-1b={folder}")


def test_a_chameleon_without_a_configuration_has_to_be_named(tmp_path: Path) -> None:
    folder = lumina_alone(tmp_path / "x")
    assert find_model(folder).manifest.variant == "anole"
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="whether it is Anole or Lumina"):
        find_model(folder)
    assert find_model(f"anole-7b-hf={folder}").manifest.target.newline_id is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        detect(folder, Parts())


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    tokens = 64
    write_drafter(tmp_path / "wide", random_drafter_weights(1, dim=64, tokens=tokens))
    with pytest.raises(
        CheckpointError, match=r"another model: its dim is 64 and the model's 32, its tok"
    ):
        detect(folder, Parts(drafter=tmp_path / "wide"))
    llama = random_drafter_weights(1)
    for key in [k for k in llama if "_norm." in k]:
        del llama[key]
    write_drafter(tmp_path / "llamagen", llama)
    with pytest.raises(CheckpointError, match="not a drafter for Anole"):
        detect(folder, Parts(drafter=tmp_path / "llamagen"))


def test_a_picture_tokenizer_of_another_codebook_is_refused(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    write_vqgan(tmp_path / "other.ckpt", tiny_vq(1, 24))
    with pytest.raises(CheckpointError, match=r"24 codes, the vocabulary of .* 16; name the right"):
        detect(folder, Parts(vq=tmp_path / "other.ckpt"))
    torch.save({"decoder.weight": torch.zeros(1)}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="not Chameleon's VQGAN"):
        detect(folder, Parts(vq=tmp_path / "foreign.ckpt"))


def rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    write_hf(folder, weights, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    "gone",
    ["layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "embed_tokens", "layers.0.", "lm_head"],
)
def test_a_tensor_that_is_absent_is_told_and_checked(tmp_path: Path, gone: str) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    tokens = len(vocabulary(16, "a red fox on the moon", lumina=False))
    weights = random_hf_weights(11, tokens=tokens)
    rewrite(folder, {key: value for key, value in weights.items() if gone not in key})
    report = check(folder)
    assert not report.usable
    assert "absent" in report.parts[0].detail


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((3, 8), "cannot serve 4 heads of width 8"),
        ((1, 1, 8), "cannot serve 4 heads of width 8"),
        ((1, 4), "cannot serve 4 heads of width 8"),
        ((8,), "rotations turn different pairs"),
    ],
)
def test_norms_that_no_layout_has_are_found_by_a_check(
    tmp_path: Path, rows: tuple[int, ...], told: str
) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    tokens = len(vocabulary(16, "a red fox on the moon", lumina=False))
    weights = random_hf_weights(11, tokens=tokens)
    weights["model.layers.1.self_attn.k_norm.bias"] = torch.zeros(rows)
    rewrite(folder, weights)
    report = check(folder)
    assert not report.usable
    assert told in report.parts[0].detail


def test_a_drafter_that_lacks_something_or_has_more(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    whole = random_drafter_weights(13, tokens=64)
    less = {key: value for key, value in whole.items() if "down_proj" not in key}
    more = whole | {k.replace("layers.0", "layers.1"): v for k, v in whole.items()}
    for weights, told in ((less, "lacks layers.0.feed_forward.w2"), (more, "only drafters of one")):
        tokens = len(vocabulary(16, "a red fox on the moon", lumina=False))
        weights["embed_tokens.weight"] = torch.zeros(tokens, 32)
        write_drafter(folder / "drafter", weights)
        with pytest.raises(CheckpointError, match=told):
            detect(folder, Parts())


def test_configurations_that_are_wrong(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    for name, value, told in (
        ("hidden_size", 64, "hidden_size 32 by its shapes, but its configuration says 64"),
        ("rms_norm_eps", "small", "rms_norm_eps .small."),
    ):
        other = shutil.copytree(folder, tmp_path / name)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(CheckpointError, match=told):
            detect(other, Parts())
    (folder / "drafter" / "config.json").write_text('{"rope_theta": "wide"}')
    with pytest.raises(CheckpointError, match=r"drafter.config.json says rope_theta .wide."):
        detect(folder, Parts())


def test_llamagens_picture_tokenizer_is_refused(tmp_path: Path) -> None:
    from support.official import vq_weights, write_trained

    folder = write_anole(tmp_path / "anole", layout="hf")
    path = write_trained(tmp_path / "vq_ds16_c2i.pt", vq_weights(16))
    with pytest.raises(CheckpointError, match="not Chameleon's VQGAN"):
        detect(folder, Parts(vq=path))


def test_without_a_text_tokenizer_nothing_can_be_drawn(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    (folder / "tokenizer" / "text_tokenizer.json").unlink()
    report = check(folder)
    assert not report.usable
    assert [one.state for one in report.parts if one.part == "text"] == ["missing"]
