"""Anole and Lumina found in folders laid out as their READMEs say, and folders that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.chameleon import (
    hf_config,
    random_hf_weights,
    vocabulary,
    write_anole,
    write_hf,
    write_lumina,
    write_text_tokenizer,
)

from lantern_accel.errors import CheckpointError, ModelError
from lantern_accel.families.base import Found
from lantern_accel.families.chameleon.model import ChameleonManifest
from lantern_accel.models.locate import find_model


def found(path: Path) -> tuple[Found, ChameleonManifest]:
    what = find_model(path)
    assert isinstance(what.manifest, ChameleonManifest)
    return what, what.manifest


def test_anole_in_the_original_layout(tmp_path: Path) -> None:
    what, manifest = found(write_anole(tmp_path / "Anole-7b-v0.1", layout="original"))
    assert manifest.variant == "anole"
    assert (manifest.target.n_layer, manifest.target.n_head, manifest.target.ffn_dim) == (2, 4, 48)
    assert (manifest.target.height, manifest.target.width) == (32, 32)
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


def test_lanterns_folders_have_the_parts_beside_the_model(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole" / "Anole-7b-v0.1-hf", layout="hf", side=6)
    home = folder.parent
    (home / "chameleon").mkdir()
    shutil.move(folder / "tokenizer", home / "chameleon" / "tokenizer")
    (home / "trained_drafters").mkdir()
    shutil.move(folder / "drafter", home / "trained_drafters" / "anole_drafter")
    what, manifest = found(folder)
    assert (manifest.variant, manifest.target.height, manifest.target.width) == ("anole", 6, 6)
    assert manifest.drafter is not None and manifest.drafter.bias
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
    folder = lumina_alone(tmp_path / name, mask_image_logits=False, swin_norm=True)
    what, manifest = found(folder)
    assert manifest.target.decoder.norms == "after"
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
