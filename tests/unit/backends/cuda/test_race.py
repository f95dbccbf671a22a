"""The race's kernels: the reference's codes to the last one, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import doubled_backend
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


@interpreted
@pytest.mark.long
@pytest.mark.parametrize("fault", ["rotation", "parity", "logarithm"])
def test_a_wrong_generator_is_found_by_the_check_of_first_use(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel.testing.result import Failed
    from lantern_accel_cuda import agreement
    from lantern_accel_cuda.kernels import race

    backend, _ = doubled_backend(monkeypatch)
    agreement.race(backend.site, (300,))
    if fault == "logarithm":
        honest = race.exponential_of
        monkeypatch.setattr(race, "exponential_of", lambda words: honest(words) * 1.01 + 0.01)
    elif fault == "parity":
        monkeypatch.setattr(race, "_PARITY", type(race._PARITY)(0x1BD11BDB))
    else:
        honest_mix = race._mix

        def other(x0: Any, x1: Any, by: Any) -> Any:
            return honest_mix(x0, x1, 17 if getattr(by, "value", by) == 16 else by)

        monkeypatch.setattr(race, "_mix", other)
    with pytest.raises(Failed, match="codes of the race"):
        agreement.race(backend.site, (300,))


@interpreted
@pytest.mark.long
def test_the_backend_races_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lantern_accel_cuda import agreement
    from lantern_accel_cuda import backend as module
    from lantern_accel_cuda.kernels import race

    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "EVERY_STEP", ("race",))
    checks = {"race": lambda: agreement.race(backend.site, (300,))}
    monkeypatch.setattr(agreement, "checks_of", lambda site: checks)
    backend, _ = doubled_backend(monkeypatch, trusted=False, preset="fast")
    used: list[int] = []
    honest = race.race
    monkeypatch.setattr(race, "race", lambda *given: used.append(1) or honest(*given))
    rows = weights(300)
    one = backend.race(rows, KEYS, POSITIONS)
    some = backend.race(rows, KEYS, POSITIONS, 4)
    assert torch.equal(one, REFERENCE.race(rows, KEYS, POSITIONS))
    assert torch.equal(some[..., 0], one)
    assert len(used) >= 4  # twice by the check, then twice here
