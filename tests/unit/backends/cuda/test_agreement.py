"""The checks of first use pass, and each finds what is wrong with its kernel; by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from support.interpreter import interpreted
from torch import Tensor

from lantern_accel.device.plan import WindowPlan
from lantern_accel.nn.rounding import pack_levels
from lantern_accel.strategy.rules import Exact, LanternPP
from lantern_accel.testing.result import Failed
from lantern_accel_cuda import agreement

LONG = pytest.mark.long
SITE = agreement.Site(torch.device("cpu"), 82, (torch.float32, torch.float16))
#: Codes of a row that one program takes: the interpreter is slow. The check of first use has more.
CODES = 48
CHECKS: dict[str, Callable[[agreement.Site], Any]] = {
    **agreement.KERNELS,
    "race": partial(agreement.race, sizes=(300,)),
    "accept": partial(agreement.walks, size=150, images=2),
    "rounded": partial(agreement.quantized_matmuls, rows=(2, 17)),
    "advance": partial(agreement.advance, passes=2, codes=CODES),
    "guess": partial(agreement.guesses, passes=2, codes=CODES),
}
QUICK = ("rms_norm", "filter", "enter", "advance")


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare one of each kind of filter, attention and rule, and small matrices."""
    monkeypatch.setattr(agreement, "FILTERS", agreement.FILTERS[:1])
    monkeypatch.setattr(agreement, "QUERIES", agreement.QUERIES[1:4:2])
    monkeypatch.setattr(agreement, "RULES", (LanternPP(k=10, lam=3.0),))
    monkeypatch.setattr(agreement, "MATRICES", ((20, 72), (24, 576)))


@interpreted
@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=LONG) for one in CHECKS]
)
def test_a_check_passes(name: str) -> None:
    found = CHECKS[name](SITE)
    assert found.error is not None and found.error <= found.tolerance


Fault = Callable[[Any], Any]


def scaled(honest: Any) -> Any:
    return lambda *given: honest(*given) * 1.01


def other_codes(honest: Any) -> Any:
    """Draw each code but the last one further, the same from call to call."""
    return lambda weights, *given: (honest(weights, *given) + 1).clamp(max=weights.shape[-1] - 1)


def no_number(honest: Any) -> Any:
    return lambda *given: honest(*given) * float("nan")


def rotation(honest: Any) -> Any:
    """Rotate the noise's words by 17 bits where 16 are right."""
    return lambda x0, x1, by: honest(x0, x1, 17 if getattr(by, "value", by) == 16 else by)


def normalises(wrong: bool) -> Fault:
    """Leave out the division of a residual, or of what siblings are drawn from."""

    def fault(honest: Any) -> Any:
        def forgets(p: Any, q: Any, total: Any, size: int, drawn: bool, block: int) -> None:
            honest(p, q, total * 0 + 1.0 if drawn == wrong else total, size, drawn, block)

        return forgets

    return fault


def room(honest: Any) -> Any:
    return lambda *given: honest(*given[:7], given[7] + 1, *given[8:])


def prefix(honest: Any) -> Any:
    return lambda tokens, length, mask, *given: honest(tokens, length, ~mask, *given)


def narrower(honest: Any) -> Any:
    def call(self: Any, weights: Tensor) -> None:
        source = self.source
        if isinstance(source, WindowPlan):
            source = replace(source, width=source.width - 1)
        honest(replace(self, source=source), weights)

    return call


def a_row_further(honest: Any) -> Any:
    return lambda self, weights: honest(self, weights.roll(1, -1))


def fewer_positions(honest: Any) -> Any:
    return lambda self, weights: honest(replace(self, count=max(self.count - 1, 1)), weights)


def sooner(honest: Any) -> Any:
    return lambda self, weights: honest(replace(self, last=self.last - 1), weights)


def other_left(honest: Any) -> Any:
    """Take another token for the one on the left of a guess."""
    return lambda self, noted, guided: honest(
        self, (noted[0], noted[1].roll(1, 1), noted[2]), guided
    )


FAULTS: list[tuple[str, str, Fault]] = [
    ("rms_norm", "fused.rms_norm", scaled),
    ("rms_norm", "fused.rms_norm", no_number),
    ("filter", "sampling.filter", scaled),
    ("enter", "enter.enter", room),
    ("enter", "enter.enter", prefix),
    ("advance", "advance.Advance.__call__", narrower),
]
LONGER: list[tuple[str, str, Fault]] = [
    ("swiglu", "fused.swiglu", scaled),
    ("rotate_write", "fused.rotate_write", scaled),
    ("attend", "tree_attention.attend", scaled),
    ("guide", "sampling.guide", scaled),
    ("draw", "sampling.sample_codes", other_codes),
    ("race", "race._PARITY", lambda honest: type(honest)(0x1BD11BDB)),
    ("race", "race._mix", rotation),
    ("race", "race.exponential_of", lambda honest: lambda words: honest(words) * 1.01 + 0.01),
    ("accept", "accept._normalise", normalises(True)),
    ("accept", "accept._normalise", normalises(False)),
    ("rounded", "rounded._planes", lambda honest: pack_levels),
    ("tiles", "tiles.launch", lambda honest: lambda x, *given: honest(x.roll(1, 1), *given)),
    ("advance", "advance.Advance.__call__", a_row_further),
    ("advance", "advance.Advance.__call__", fewer_positions),
    ("advance", "advance.Advance.__call__", sooner),
    ("guess", "guess.Guesses.__call__", other_left),
]


@interpreted
@pytest.mark.parametrize(
    ("name", "where", "fault"),
    [*FAULTS, *(pytest.param(*one, marks=LONG) for one in LONGER)],
)
def test_a_fault_is_found(
    name: str, where: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"lantern_accel_cuda.kernels.{where}"
    monkeypatch.setattr(path, fault(resolve_name(path)))
    if name == "accept":
        monkeypatch.setattr(agreement, "RULES", (Exact(),))
    with pytest.raises(Failed):
        CHECKS[name](SITE)
