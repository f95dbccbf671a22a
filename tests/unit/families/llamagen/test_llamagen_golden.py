"""LlamaGen's GPT against tensors recorded from the official code."""

from __future__ import annotations

import copy

import pytest
import torch
from support.golden import golden
from support.recorded import lantern_target, official_llamagen
from torch.testing import assert_close

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.nn.rotary import rotary_table_2d
from lantern_accel.nn.transformer import Pass, dense_visible

CLOSE = {"rtol": 0.0, "atol": 1e-4}


def c2i_features(model: LlamaGenGPT) -> torch.Tensor:
    io = golden("llamagen_c2i/io")
    classes = torch.cat((io["class_ids"], model.unconditional(2)))
    tokens = io["greedy_cfg4"].long().repeat(2, 1)
    return model.forward_dense(classes, tokens[:, :-1])


def test_class_features_and_logits_are_the_official_ones() -> None:
    model, io = official_llamagen("llamagen_c2i"), golden("llamagen_c2i/io")
    features = c2i_features(model)
    assert_close(features, io["hidden_normed"], **CLOSE)
    assert_close(model.head(features), io["full_logits"], **CLOSE)


def test_bfloat16_stays_near_the_official_bfloat16() -> None:
    model = copy.deepcopy(official_llamagen("llamagen_c2i"))
    tables = model.rope_cos, model.rope_sin
    model.to(torch.bfloat16)
    model.rope_cos, model.rope_sin = tables
    logits = model.head(c2i_features(model))
    recorded = golden("llamagen_c2i/io")["full_logits_bf16"].float()
    exact = golden("llamagen_c2i/io")["full_logits"]
    assert logits.dtype == torch.float32
    # Nearer to the official bf16 run than a few of its own rounding errors.
    own = (recorded - exact).abs().mean()
    assert (logits - recorded).abs().mean() < 2 * own
    assert (logits - exact).abs().mean() < 2 * own


def rotary_error(grid: int) -> float:
    """Bound how far two float32 tables of rotations may lie apart, whatever computed them.

    An angle is position / base**x: the power is off by up to 2 units in the last place (vector
    maths libraries promise 1 or 2), quotient and product by half a unit each, and an error of an
    angle is at most the same error of its cosine, which adds 2 units of its own. Two tables are
    each that far from the truth; half a unit in the last place is eps / 2 of the value.
    """
    eps = torch.finfo(torch.float32).eps
    angle = float(grid - 1)
    return 2 * (3 * eps * angle + 2 * eps)


@pytest.mark.parametrize(
    ("name", "prefix", "grid", "width"),
    [("t2i_256_hd64", 120, 16, 64), ("c2i_384_3B_hd100", 1, 24, 100)],
)
def test_rotary_tables_of_released_sizes(name: str, prefix: int, grid: int, width: int) -> None:
    recorded = golden("llamagen_c2i/rope")[name]
    table = torch.stack(rotary_table_2d(prefix, grid, width), -1)
    assert_close(table, recorded, rtol=0.0, atol=rotary_error(grid))
    assert not table[:prefix].any(), "prefix rows are zero, not the identity"


def test_lantern_target_prefill_and_tree_pass_match_the_recorded_ones() -> None:
    model, io = lantern_target(), golden("lantern/target_io")
    for cap in ("cap1", "cap0"):
        condition = torch.stack((io[f"{cap}.cond_left_padded"], model.unconditional(1)[0]))
        mask = io[f"{cap}.mask_left"].bool().repeat(2, 1)
        features = model.forward_dense(condition, torch.zeros(2, 0, dtype=torch.int64), mask)
        assert_close(model.head(features[:, -1]), io[f"{cap}.prefill_logits_last"], **CLOSE)
    # Teacher-forced decoding of the first caption.
    tokens = io["cap0.decode_tokens"].repeat(2, 1)
    logits = model.head(model.forward_dense(condition, tokens, mask)[:, 120:])
    assert_close(logits[:, :12].transpose(0, 1), io["cap0.decode_logits"], **CLOSE)
    # A tree pass: nodes see the prompt, the committed tokens and their own ancestors.
    nodes = io["cap0.tree_tokens"]
    place = io["cap0.tree_position_ids"]
    committed = int(place.min()) - 120
    codes = torch.cat((io["cap0.decode_tokens"][:committed], nodes)).repeat(2, 1)
    length = 120 + committed + len(nodes)
    seen = dense_visible(mask, length)
    seen[:, :, -len(nodes) :, -len(nodes) :] = io["cap0.tree_mask"].bool()
    cells = torch.cat((torch.arange(120 + committed), place))
    at = Pass(
        model.rope_cos[cells].view(1, length, 1, -1),
        model.rope_sin[cells].view(1, length, 1, -1),
        TensorOps().mask(seen, torch.float32),
    )
    x = torch.cat((model.embed_prefix(condition), model.embed_tokens(codes)), dim=1)
    features = model(x, at)[:, -len(nodes) :]
    assert_close(features, io["cap0.tree_hidden_postnorm"], **CLOSE)
    assert_close(model.head(features), io["cap0.tree_logits"], **CLOSE)
