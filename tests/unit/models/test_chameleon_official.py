"""Anole and Lumina found in folders laid out as their READMEs say, and folders that are refused."""

from __future__ import annotations

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

from lantern_accel.errors import CheckpointError
from lantern_accel.models.chameleon_manifest import ChameleonManifest
from lantern_accel.models.chameleon_official import detect
from lantern_accel.models.families import Found, Parts


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
    assert any("original keys, adjacent rotary pairs" in note for note in what.notes)
    assert set(what.files) == {"target", "vq", "drafter", "text_tokenizer"}
    assert not what.missing


def test_anole_in_hugging_faces_layout(tmp_path: Path) -> None:
    what, manifest = found(write_anole(tmp_path / "Anole-7b-v0.1-hf", layout="hf", side=6))
    assert manifest.variant == "anole"
    assert (manifest.target.height, manifest.target.width) == (6, 6)
    assert any("half-split rotary pairs" in note for note in what.notes)
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


@pytest.mark.parametrize(
    ("name", "positions", "side"),
    [("Lumina-mGPT-7B-768", 4096, 48), ("Lumina-mGPT-7B-1024", 10240, 64), ("x", 10240, 64)],
)
def test_luminas_picture_size_is_in_its_name(
    tmp_path: Path, name: str, positions: int, side: int
) -> None:
    weights = random_hf_weights(1)
    said = hf_config(weights, 4, mask_image_logits=False, max_position_embeddings=positions)
    write_hf(tmp_path / name, weights, said)
    write_text_tokenizer(tmp_path / name / "tokenizer.json", vocabulary(16, "a", lumina=True))
    what, manifest = found(tmp_path / name)
    assert (manifest.variant, manifest.side) == ("lumina", side)
    assert manifest.target.max_positions == positions
    assert "--vq" in what.missing["vq"]


def test_another_familys_folder_is_left_to_it(tmp_path: Path) -> None:
    assert detect(tmp_path, Parts()) is None
    llama = {k: v for k, v in random_hf_weights(1).items() if "_norm." not in k}
    write_hf(tmp_path / "llama", llama, {"model_type": "llama"})
    assert detect(tmp_path / "llama", Parts()) is None
    (tmp_path / "broken.pt").write_bytes(b"nonsense")
    assert detect(tmp_path / "broken.pt", Parts()) is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        detect(folder, Parts())


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    tokens = 64
    write_drafter(tmp_path / "wide", random_drafter_weights(1, dim=64, tokens=tokens))
    with pytest.raises(CheckpointError, match=r"width 64 and 64 tokens.*trained for another model"):
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
    with pytest.raises(CheckpointError, match="24 codes, the target 16"):
        detect(folder, Parts(vq=tmp_path / "other.ckpt"))
    torch.save({"decoder.weight": torch.zeros(1)}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="not Chameleon's VQGAN"):
        detect(folder, Parts(vq=tmp_path / "foreign.ckpt"))


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = write_anole(tmp_path / "anole", layout="hf")
    (folder / "tokenizer" / "text_tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        detect(folder, Parts())
