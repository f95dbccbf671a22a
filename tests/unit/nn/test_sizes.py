"""Sizes that no network has are refused, field by field, before anything is built of them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lantern_accel.families.chameleon.model import ChameleonConfig
from lantern_accel.families.llamagen.model import DrafterConfig, LlamaGenConfig
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.prompted_drafter import PromptedDrafterConfig
from lantern_accel.nn.sizes import Sizes
from lantern_accel.nn.vq import VQConfig

WHOLE = [
    LlamaGenConfig(dim=32, n_layer=2, n_head=2),
    DrafterConfig(dim=32, n_head=2, ffn_dim=48, vocab_size=64, grid=4, prefix_length=3),
    TextEncoderConfig(vocab_size=9),
    VQConfig(),
    ChameleonConfig(),
]
CASES = [
    (one, name)
    for one in WHOLE
    for name, value in one.model_dump().items()
    if isinstance(value, int | tuple) and not isinstance(value, bool)
]


@pytest.mark.parametrize(
    "wrong",
    [10**30, 2**62, 10**4500, -1],
    ids=["large", "of 63 bits", "of 4,500 digits", "negative"],
)
@pytest.mark.parametrize(
    ("sizes", "name"), CASES, ids=[f"{type(a).__name__}.{b}" for a, b in CASES]
)
def test_a_number_that_no_network_has_is_refused(sizes: Sizes, name: str, wrong: int) -> None:
    values = sizes.model_dump()
    values[name] = (wrong,) if isinstance(values[name], tuple) else wrong
    with pytest.raises(ValidationError) as caught:
        type(sizes).model_validate(values)
    assert name in str(caught.value.errors()[0]["loc"])


def test_a_list_without_end_and_a_number_that_is_none_are_refused() -> None:
    with pytest.raises(ValidationError, match="100 entries are more than 64"):
        VQConfig(ch_mult=(1,) * 100)
    with pytest.raises(ValidationError, match="inf is not a finite number"):
        LlamaGenConfig(dim=32, n_layer=2, n_head=2, rope_base=float("inf"))


def test_a_drafters_mark_may_be_below_zero() -> None:
    sizes = {"dim": 8, "n_head": 2, "kv_heads": 2, "head_dim": 4, "ffn_dim": 8, "token_count": 9}
    assert PromptedDrafterConfig(**sizes, vocab_size=4, mark=(-2.0, 0.5)).mark == (-2.0, 0.5)
    with pytest.raises(ValidationError, match="nan is not a finite number"):
        PromptedDrafterConfig(**sizes, vocab_size=4, mark=(float("nan"),))
