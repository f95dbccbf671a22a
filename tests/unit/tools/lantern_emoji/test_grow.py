"""A grown target computes what the small one did, and every new weight can learn."""

from __future__ import annotations

import pytest
import torch

from lantern_accel.errors import DataError
from lantern_emoji.target import TargetConfig, TextTarget, fresh_target

SMALL = {"dim": 32, "n_layer": 2, "n_head": 2, "ffn_dim": 40, "text_dim": 16, "text_layers": 1,
         "text_heads": 2, "prefix_length": 5, "compile": False}  # fmt: skip
LARGE = {**SMALL, "dim": 64, "n_head": 4, "ffn_dim": 96}


def made(values: dict[str, object], start: TextTarget | None = None) -> TextTarget:
    model = fresh_target(TargetConfig.model_validate(values), 50, 24, 4, start)
    return model


def shaken() -> TextTarget:
    model = made(SMALL)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    ids = torch.randint(2, 50, (3, 5))
    ids[0, :2] = 0
    return ids, ids != 0, torch.tensor([False, False, True]), torch.randint(24, (3, 16))


@pytest.mark.parametrize("larger", [LARGE, {**LARGE, "n_layer": 3}, {**SMALL, "n_layer": 4}, SMALL])
def test_the_grown_model_computes_the_same(larger: dict[str, object]) -> None:
    small = shaken()
    large = made(larger, small)
    one, other = small(*inputs()), large(*inputs())
    assert torch.allclose(one, other, atol=2e-5)


@pytest.mark.long
def test_every_new_weight_gets_a_gradient_within_two_steps() -> None:
    large = made({**LARGE, "n_layer": 3}, shaken())
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        large(*inputs()).backward()
        optimizer.step()
    for name, weight in large.named_parameters():
        if "words" in name or "tok_embeddings" in name or "positions" in name:
            continue  # only the rows that the batch names
        assert weight.grad is not None
        assert (weight.grad == 0).float().mean() < 0.05, name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 16, "n_head": 1}, "only grow"),
        ({"dim": 64, "n_head": 2}, "head_dim 16, the configuration asks for 32"),
        ({"text_dim": 32}, "text encoder cannot grow"),
    ],
)
def test_what_cannot_grow_is_said(change: dict[str, object], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        made({**SMALL, **change}, shaken())
