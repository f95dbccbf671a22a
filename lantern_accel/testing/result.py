"""The results of checks, and the error that a failed one raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.device.operations import TensorOps
from lantern_accel.testing.tolerances import dtypes_of, short

#: What a result would be after mistakes that are often made, or a function that computes it.
Causes = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class Measured:
    """A check that passed: what it looked at, and its largest error where it compared numbers."""

    detail: str = ""
    error: float | None = None
    tolerance: float | None = None


class Failed(Exception):
    """A check that failed, with the reason a backend author needs."""

    def __init__(self, message: str, **figures: float) -> None:
        super().__init__(message)
        self.figures = figures


class NotApplicable(Exception):
    """A check that says nothing about this backend, with the reason."""


class NeedsCard(NotApplicable):
    """A check that a simulated device cannot answer."""

    def __init__(self, what: str) -> None:
        super().__init__(f"needs a card: {what}")


#: What is being checked at this moment, in words; another thread reads it.
_NOW = [""]


def doing(what: str) -> None:
    """Say what a check does now: shown where it takes long, is stopped, or raises."""
    _NOW[0] = what


def doing_now() -> str:
    """Return what was said last."""
    return _NOW[0]


def on_card(backend: Backend, what: str) -> None:
    """Raise :class:`NeedsCard` on a simulated device, which cannot show ``what``."""
    if backend.simulated:
        raise NeedsCard(what)


def is_overridden(one: object, name: str, home: type = TensorOps) -> bool:
    """Return whether a backend has an operation of its own, or an object a member of ``home``."""
    return name in vars(one) or getattr(type(one), name) is not getattr(home, name)


def left_to_reference(backend: Backend, *names: str) -> str:
    """Say which of some operations the backend leaves to the reference; "": none of them.

    Ends a check's sentence: the reference's operators ran on this device all the same, and were compared.
    """
    left = [name for name in names if not is_overridden(backend, name)]
    if not left:
        return ""
    return "; the reference serves " + ("it" if len(names) == 1 else ", ".join(left))


class Compared:
    """The comparisons of one check in every dtype of a device; the one nearest to its limit counts.

    ``served``: the operations that are compared.
    """

    def __init__(self, backend: Backend, *served: str) -> None:
        self.backend, self.served = backend, served
        self.dtypes = dtypes_of(backend)
        self.share, self.count = 0.0, 0

    def hold(
        self, got: Tensor, want: Tensor, tolerance: Tensor, what: str, dtype: torch.dtype | None,
        causes: Causes = None,
    ) -> None:  # fmt: skip
        """Compare one result, as :func:`compare` does."""
        found = compare(got, want, tolerance, what, dtype=dtype, causes=causes)
        self.count += 1
        self.share = max(self.share, found.error or 0.0)

    def to_measured(self, what: str) -> Measured:
        """Return the check's result: the largest error as a share of what was allowed there."""
        detail = f"{self.count} {what} in {', '.join(map(short, self.dtypes))} against float64"
        left = left_to_reference(self.backend, *self.served)
        return Measured(detail + left, self.share, 1.0)


def compare(
    got: Tensor,
    want: Tensor,
    tolerance: float | Tensor,
    what: str,
    *,
    dtype: torch.dtype | None = None,
    causes: Causes = None,
) -> Measured:
    """Pass where a tensor is the reference's within ``tolerance``; else say what differs, and where.

    ``want``: float64 on the host. ``tolerance``: one number, or one for each value; then the error that
    is reported is the largest share of it. ``dtype``: what a backend must return. One of ``causes``
    that fits is named.
    """
    if tuple(got.shape) != tuple(want.shape):
        raise Failed(f"{what}: the shape is {list(got.shape)}, expected {list(want.shape)}")
    if dtype is not None and got.dtype != dtype:
        raise Failed(f"{what}: the dtype is {short(got.dtype)}, expected {short(dtype)}")
    found = got.detach().cpu().double()
    off = (found - want).abs()
    limit = 1.0 if isinstance(tolerance, Tensor) else tolerance
    share = off / tolerance if isinstance(tolerance, Tensor) else off
    error = float(share.max()) if off.numel() else 0.0
    if error <= limit:
        return Measured(what, error, limit)
    worst = int(share.nan_to_num(nan=float("inf")).argmax())
    at = [int(index) for index in torch.unravel_index(torch.tensor(worst), off.shape)]
    place = ", ".join(map(str, at))
    told = f"{what}: at [{place}] it is {found[tuple(at)]:.4g}, expected {want[tuple(at)]:.4g}"
    wrong = int((off > tolerance).sum() + off.isnan().sum())
    told += f" ({wrong} of {off.numel()} values are off)"
    known = causes() if callable(causes) else causes or {}
    if cause := _cause(found, want, tolerance, known):
        told += f"; likely {cause}"
    raise Failed(told, error=error, tolerance=limit)


def _cause(
    found: Tensor, want: Tensor, tolerance: float | Tensor, causes: Mapping[str, Tensor]
) -> str | None:
    """Return the mistake that would give what was found; None: none that is known."""
    if not bool(found.isfinite().all()):
        return "a row with nothing to see, or an overflow: some values are not finite"
    fits: dict[str, float] = {}
    for name, would in causes.items():
        if would.shape != found.shape:
            continue
        near = torch.as_tensor(tolerance, dtype=torch.float64)
        if isinstance(tolerance, Tensor):  # made for values as large as those expected
            near = near * (would / want).abs().nan_to_num(nan=1.0, posinf=1e30).clamp(min=1.0)
        off = (found - would).abs()
        if bool((off <= near).all()):
            fits[name] = float((off / near.clamp(min=1e-300)).sum())
    if fits:
        return min(fits, key=lambda name: fits[name])
    scale = float((found * want).sum() / (want * want).sum())
    if abs(scale) > 1e-3 and bool(((found - scale * want).abs() <= tolerance).all()):
        if abs(scale + 1) < 1e-3:
            return "the sign: every value is the reference's with the other sign"
        return f"a factor: every value is {scale:.4g} times the reference's"
    return None


def within(error: float, tolerance: float, what: str) -> Measured:
    """Pass where ``error <= tolerance``; a NaN fails."""
    if not error <= tolerance:
        raise Failed(f"{what} is off", error=error, tolerance=tolerance)
    return Measured(what, error, tolerance)
