"""Chameleon's layouts: every shape of norm, both pairings, fused matrices, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.chameleon import (
    drafter_recipes,
    fill_from,
    hf_config,
    original,
    random_hf_weights,
    target_recipes,
    unpermuted,
    write_hf,
    write_original,
)
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.errors import CheckpointError
from lantern_accel.families.chameleon.layouts import SIGNATURES, check_norm
from lantern_accel.families.chameleon.model import (
    ChameleonConfig,
    ChameleonDrafter,
    ChameleonDrafterConfig,
    ChameleonGPT,
)
from lantern_accel.families.keys import layout_of

CONFIG = ChameleonConfig(
    dim=32, n_layer=2, n_head=4, ffn_dim=48, token_count=64, image_codes=16, height=2, width=2,
)  # fmt: skip


def loaded(path: Path, config: ChameleonConfig = CONFIG) -> ChameleonGPT:
    model = ChameleonGPT(config)
    fill_from(path, model, target_recipes)
    return model.eval().requires_grad_(False)


def logits(model: ChameleonGPT) -> Tensor:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(3))
    return model.head(model.forward_dense(ids, ids[:, :0]))


def agree(
    folder: Path, weights: Mapping[str, Tensor], other: Mapping[str, Tensor], kv_heads: int = 4
) -> None:
    """Compare a file with one of a norm, keys and values a head, as the golden recording has them."""
    for name, content in (("one", weights), ("other", other)):
        write_hf(folder / name, content, hf_config(content, 4))
    ours = loaded(folder / "one", CONFIG.model_copy(update={"n_kv_head": kv_heads}))
    assert_close(logits(ours), logits(loaded(folder / "other")), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_of_a_norm_serves_its_heads(parts: int, tmp_path: Path) -> None:
    weights = random_hf_weights(1, parts=parts)
    repeated = {k: v.repeat_interleave(4 // parts, 0) for k, v in weights.items() if "_norm." in k}
    agree(tmp_path, weights, weights | repeated)


def test_grouped_keys_and_values(tmp_path: Path) -> None:
    weights = random_hf_weights(2, kv_heads=2, parts=2)
    repeated = {
        key: value.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1)
        for key, value in weights.items()
        if "k_proj" in key or "v_proj" in key
    }
    agree(tmp_path, weights, weights | repeated, kv_heads=2)


def write_fork(folder: Path, weights: Mapping[str, Tensor]) -> None:
    write_hf(folder, unpermuted(weights), hf_config(weights, 4))


def write_fused(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """The original layout after Meta's loading hook: q, k, v in one matrix, w1 and w3 in another."""
    out = original(weights)
    for i in range(2):
        at = f"layers.{i}."
        q, k, v = (out.pop(f"{at}attention.w{n}.weight") for n in "qkv")
        out[at + "attention.wqkv.weight"] = torch.cat((q, k, v))
        w1, w3 = (out.pop(f"{at}feed_forward.{n}.weight") for n in ("w1", "w3"))
        out[at + "feed_forward.w13.weight"] = torch.cat((w1, w3))
    folder.mkdir()
    torch.save(out, folder / "consolidated.pth")


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda f, w: write_original(f, w, 4), "models/7b/consolidated.pth"),
        (write_fork, "."),
        (write_fused, "consolidated.pth"),
    ],
    ids=["original", "GAIR's fork", "fused"],
)
def test_the_layouts_hold_one_function(
    write: Callable[[Path, Mapping[str, Tensor]], None], where: str, tmp_path: Path
) -> None:
    weights = random_hf_weights(3)
    write_hf(tmp_path / "hf", weights, hf_config(weights, 4))
    write(tmp_path / "other", weights)
    expected = logits(loaded(tmp_path / "hf"))
    assert_close(logits(loaded(tmp_path / "other" / where)), expected, rtol=0.0, atol=1e-5)


def test_the_pairing_is_read_off_the_norm_and_not_off_the_keys(tmp_path: Path) -> None:
    # The fork's norms in the shape of the permuted layout: then it is taken for that, and differs.
    weights = random_hf_weights(3)
    fork = unpermuted(weights)
    disguised = {k: v[None] if "_norm." in k and v.dim() == 1 else v for k, v in fork.items()}
    for name, content in (("fork", fork), ("disguised", disguised)):
        write_hf(tmp_path / name, content, hf_config(weights, 4))
    a, b = (logits(loaded(tmp_path / name)) for name in ("fork", "disguised"))
    assert (a - b).abs().max() > 1e-2


def test_only_the_rows_of_codes_are_kept_of_the_head(tmp_path: Path) -> None:
    weights = random_hf_weights(5)
    write_hf(tmp_path, weights, hf_config(weights, 4))
    for newline in (None, 40):
        codes = loaded(tmp_path, CONFIG.model_copy(update={"newline_id": newline}))
        assert codes.output.weight.shape[0] == codes.config.vocab_size == 16 + (newline is not None)
        ids = codes.config.token_ids()
        features = torch.randn(2, 3, 32)
        assert_close(codes.head(features), F.linear(features, weights["lm_head.weight"][ids]))
        every = torch.arange(codes.config.vocab_size)[None]
        assert torch.equal(codes.embed_tokens(every), codes.embed_prefix(torch.tensor([ids])))


def test_a_drafter_that_was_trained_here_is_read_as_it_is(tmp_path: Path) -> None:
    ours = ChameleonDrafter(ChameleonDrafterConfig.fitting(CONFIG))
    for weight in ours.parameters():
        torch.nn.init.normal_(weight)
    save_file(ours.state_dict(), tmp_path / "drafter.safetensors")
    again = ChameleonDrafter(ours.config)
    fill_from(tmp_path, again, drafter_recipes)
    for name, weight in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_norm_that_serves_no_share_of_the_heads_is_refused() -> None:
    for shape in ((3, 4), (4, 6), (1, 1, 4), (0, 4)):
        with pytest.raises(CheckpointError, match=r"which cannot serve 4 heads of width 4"):
            check_norm("q", shape, 4, 4)


def test_other_architectures_are_not_taken_for_chameleon() -> None:
    llama = {k: v for k, v in random_hf_weights(6).items() if "_norm.weight" not in k}
    held = HeldFile(Path("llama"), llama)
    checkpoint = Checkpoint(held.path, [held])
    assert layout_of(checkpoint, SIGNATURES) is None
    with pytest.raises(CheckpointError, match="another architecture"):
        target_recipes(checkpoint, CONFIG)
