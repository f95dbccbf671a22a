"""Checkpoints that cannot be used say why; pickles run no code."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.golden import load_into
from torch import Tensor

from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.keys import LLAMA, load_float
from lantern_accel.families.llamagen.drafter import DrafterConfig, LlamaGenDrafter
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.official import DRAFTER_RULES


@pytest.fixture
def model() -> LlamaGenGPT:
    return LlamaGenGPT(
        LlamaGenConfig(
            dim=8, n_layer=1, n_head=2, ffn_dim=8, vocab_size=16, grid=2, prefix_length=3,
            caption_dim=4,
        )
    )  # fmt: skip


@pytest.fixture
def weights(model: LlamaGenGPT) -> dict[str, Tensor]:
    return {k: torch.rand_like(v) for k, v in model.state_dict().items()}


def test_safetensors_load(model: LlamaGenGPT, weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    load_float(model, tmp_path / "w.safetensors", LLAMA)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", None])
def test_pickled_state_dicts_load_from_under_their_usual_names(
    wrap: str | None, model: LlamaGenGPT, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    content = {wrap: weights, "steps": 3, "args": argparse.Namespace(lr=1)} if wrap else weights
    torch.save(content, tmp_path / "w.pt")
    load_float(model, tmp_path / "w.pt")
    assert torch.equal(model.output.weight, weights["output.weight"])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_a_truncated_file_is_refused(
    suffix: str, kept: float, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / f"w.{suffix}"
    if suffix == "pt":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=r"cannot be read as|is empty") as caught:
        open_checkpoint(path)
    assert path.name in str(caught.value) and "fetch it again" in str(caught.value)


@pytest.mark.parametrize("content", [b"<html>404</html>", b"hi", b"\x89PNG"])
def test_another_kind_of_file_is_refused_without_torchs_advice(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a PyTorch checkpoint") as caught:
        open_checkpoint(tmp_path / "w.pt")
    assert "weights_only" not in str(caught.value)


def test_something_else_than_a_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a state dict"):
        open_checkpoint(tmp_path / "w.pt")


def test_a_missing_key_is_named(model: LlamaGenGPT, weights: dict[str, Tensor]) -> None:
    del weights["layers.0.attention.wo.weight"]
    with pytest.raises(
        CheckpointError, match=r"w: 1 key is missing.*'layers\.0\.attention\.wo\.weight'"
    ):
        load_into(model, weights, "w")


def test_an_unknown_key_is_named(model: LlamaGenGPT, weights: dict[str, Tensor]) -> None:
    weights["layers.1.attention.wo.weight"] = torch.zeros(8, 8)
    with pytest.raises(
        CheckpointError, match=r"1 key is unknown.*'layers\.1\.attention\.wo\.weight'"
    ):
        load_into(model, weights, "w")


def test_a_wrong_shape_is_told_with_both_shapes(
    model: LlamaGenGPT, weights: dict[str, Tensor]
) -> None:
    weights["output.weight"] = torch.zeros(15, 8)
    with pytest.raises(CheckpointError) as caught:
        load_into(model, weights, "target.pt")
    for part in ("target.pt", "output.weight", "[15, 8]", "[16, 8]"):
        assert part in str(caught.value)


def test_a_checkpoint_of_another_architecture_is_refused(
    model: LlamaGenGPT, weights: dict[str, Tensor]
) -> None:
    drafter = LlamaGenDrafter(
        DrafterConfig(dim=8, n_head=2, ffn_dim=8, vocab_size=16, grid=2, prefix_length=2)
    )
    with pytest.raises(CheckpointError, match=r"missing.*unknown.*another architecture"):
        load_into(drafter, weights, "drafter", DRAFTER_RULES)
    resnet = {"conv1.weight": torch.zeros(2, 3, 7, 7), "fc.bias": torch.zeros(10)}
    with pytest.raises(CheckpointError, match=r"missing.*2 keys are unknown"):
        load_into(model, resnet, "target", LLAMA)


def test_tensors_that_released_files_carry_besides_are_ignored(
    model: LlamaGenGPT, weights: dict[str, Tensor]
) -> None:
    weights["freqs_cis"] = torch.zeros(3)
    weights["layers.0.attention.rotary_emb.inv_freq"] = torch.zeros(3)
    load_into(model, weights, "w")
    assert torch.equal(model.norm.weight, weights["norm.weight"])


def test_a_half_of_a_stacked_matrix_is_not_loaded(
    model: LlamaGenGPT, weights: dict[str, Tensor]
) -> None:
    w1, _ = weights.pop("layers.0.feed_forward.w13.weight").chunk(2)
    weights["layers.0.feed_forward.w1.weight"] = w1
    with pytest.raises(CheckpointError, match=r"w13.*w1"):
        load_into(model, weights, "w", LLAMA)
