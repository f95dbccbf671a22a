"""Official files on disk: what they are, told by their shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.official import add_drafter, gpt_weights, vq_weights, write_trained

from lantern_accel.errors import ModelError
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts


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
    one = torch.zeros((), dtype=torch.bfloat16)  # all that the file holds of a tensor
    write_trained(tmp_path / name, {key: one.expand(shape) for key, shape in shapes.items()})
    found = find_model(tmp_path / name)
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
    kept = ("freqs_cis", "layers.0.attention.rotary_emb.inv_freq")
    weights = gpt_weights() | {key: torch.zeros(376, 4, 2) for key in kept}
    write_trained(texts / "t2i_tiny_stage1_256.pt", weights)
    assert check(texts).usable


def test_tokenizer_sizes_come_from_shapes(texts: Path) -> None:
    write_trained(texts / "vq_ds16_t2i.pt", vq_weights(64, ch_mult=(1, 2, 2)))
    config = find_model(texts).manifest.vq
    assert (config.codebook_size, config.codebook_dim, config.ch_mult) == (64, 8, (1, 2, 2))
    assert config.downsample == 4 and config.num_res_blocks == 1
