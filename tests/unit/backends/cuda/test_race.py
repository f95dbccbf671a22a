"""The race's kernels: the reference's codes to the last one, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.interpreter import interpreted

from lantern_accel.device.noise import exponential, noise_keys
from lantern_accel.nn.transformer import REFERENCE

LONG = pytest.mark.long
KEYS = noise_keys([5, -(2**40) - 7], [0, 2**32 - 1])
POSITIONS = torch.tensor([[0, 1, 65535], [7, 8, 576]])


def weights(size: int) -> torch.Tensor:
    """Return rows with gaps, ties, no weight at all, and one code alone."""
    found = torch.rand(2, 3, size, generator=torch.Generator().manual_seed(size))
    found[found < 0.4] = 0.0
    found[0, 1] = 0.0
    found[1, 0] = 0.0
    found[1, 0, size // 2] = 1e-30
    return found


@interpreted
@pytest.mark.parametrize("size", [1, 33, *(pytest.param(n, marks=LONG) for n in (2, 200, 2500))])
def test_codes_are_the_reference_s(size: int) -> None:
    from lantern_accel_cuda.kernels import race

    rows = weights(size)
    scores = rows / exponential(KEYS, POSITIONS, size)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 10):
        got = race.race(rows, KEYS, POSITIONS, count, torch.int64)
        if count > size:
            assert got is None
            continue
        assert got is not None
        assert torch.equal(got[..., 0], REFERENCE.race(rows, KEYS, POSITIONS))
        assert torch.equal(got, order[..., :count])


@interpreted
@pytest.mark.long
def test_equal_scores_go_to_the_lower_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cuda.kernels import race

    # Infinitely more than any noise: every such code has the same score, in any piece of the row.
    rows = torch.zeros(2, 3, 2500)
    rows[..., [3, 1700, 2400]] = float("inf")
    got = race.race(rows, KEYS, POSITIONS, 3, torch.int32)
    assert got is not None
    assert got.dtype == torch.int32
    assert got.tolist() == [[[3, 1700, 2400]] * 3] * 2


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_no_number_gives_a_code_all_the_same() -> None:
    from lantern_accel_cuda.kernels import race

    rows = weights(200)
    rows[1, 2, 150] = float("nan")
    got = race.race(rows, KEYS, POSITIONS, 1, torch.int64)
    assert got is not None
    assert int(got[1, 2, 0]) == 150
