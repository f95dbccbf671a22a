"""Speculative Jacobi decoding (SJD) in plain Python and float64, every random choice followed both ways.

The law of an image's tokens is found by enumeration: a step's outcomes with their probabilities, each
followed by the next step's, drafts and what they were drawn from carried over. No tensors.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Row = tuple[float, ...]
Target = Callable[[tuple[int, ...]], Row]


@dataclass(frozen=True)
class Draft:
    """A drafted token and the distribution that it was drawn from."""

    token: int
    q: Row


@dataclass(frozen=True)
class Moment:
    """Known tokens, and the drafts behind them."""

    known: tuple[int, ...]
    drafts: tuple[Draft, ...]


def normalise(weights: Sequence[float], fallback: Row) -> Row:
    total = sum(weights)
    return tuple(w / total for w in weights) if total > 0 else fallback


def residual(p: Row, q: Row) -> Row:
    return normalise([max(a - b, 0.0) for a, b in zip(p, q, strict=True)], p)


def one(draft: Draft, p: Row, anew: bool = False) -> Iterator[tuple[float, int, bool]]:
    """Yield the outcomes of a test: probability, token, and whether the draft was kept."""
    if anew:
        yield from ((mass, code, False) for code, mass in enumerate(p) if mass > 0)
        return
    x, q = draft.token, draft.q
    keep = min(1.0, p[x] / q[x])
    if keep > 0:
        yield keep, x, True
    if keep < 1:
        for code, mass in enumerate(residual(p, q)):
            if mass > 0:
                yield (1 - keep) * mass, code, False


def outcomes(
    moment: Moment, target: Target, fresh: Callable[[Moment, int], Row]
) -> Iterator[tuple[float, Moment]]:
    """Yield what a step makes of a moment, with probabilities; the window's length stays."""
    past = [*moment.known, *(d.token for d in moment.drafts)]
    start = len(moment.known)
    rows = [target(tuple(past[: start + i])) for i in range(len(moment.drafts) + 1)]

    def go(i: int, tokens: tuple[int, ...], first: int | None) -> Iterator[tuple[float, Moment]]:
        if i < len(moment.drafts):
            for chance, code, kept in one(moment.drafts[i], rows[i], anew=first is not None):
                here = first if first is not None or kept else i
                for rest, found in go(i + 1, (*tokens, code), here):
                    yield chance * rest, found
            return
        for code, mass in enumerate(rows[i]):
            if mass > 0:
                yield mass, moved((*tokens, code), i if first is None else first)

    def moved(tokens: tuple[int, ...], first: int) -> Moment:
        known = (*moment.known, *tokens[: first + 1])
        drafts = tuple(
            Draft(code, row) for code, row in list(zip(tokens, rows, strict=True))[first + 1 :]
        )
        return Moment(known, drafts)

    for chance, found in go(0, (), None):
        for extra, filled in refill(found, len(moment.drafts), fresh):
            yield chance * extra, filled


def refill(
    moment: Moment, count: int, fresh: Callable[[Moment, int], Row]
) -> Iterator[tuple[float, Moment]]:
    """Yield every way to draw the fresh drafts that a window of ``count`` drafts lacks."""
    missing = count - len(moment.drafts)
    rows = [fresh(moment, k) for k in range(missing)]
    for codes in itertools.product(range(len(rows[0]) if rows else 0), repeat=missing):
        chance = 1.0
        for row, code in zip(rows, codes, strict=True):
            chance *= row[code]
        if chance > 0:
            new = tuple(Draft(c, row) for c, row in zip(codes, rows, strict=True))
            yield chance, Moment(moment.known, moment.drafts + new)


def law(
    target: Target,
    tokens: int,
    window: int,
    fresh: Callable[[Moment, int], Row],
) -> tuple[dict[tuple[int, ...], float], int]:
    """Return the joint law of an image's tokens, and the most steps that a path took."""
    open_: dict[Moment, float] = defaultdict(float)
    for code, mass in enumerate(target(())):
        for extra, moment in refill(Moment((code,), ()), window - 1, fresh):
            open_[moment] += mass * extra
    done: dict[tuple[int, ...], float] = defaultdict(float)
    steps = 0
    while open_:
        steps += 1
        following: dict[Moment, float] = defaultdict(float)
        for moment, chance in open_.items():
            for extra, found in outcomes(moment, target, fresh):
                if len(found.known) >= tokens:
                    done[found.known[:tokens]] += chance * extra
                else:
                    following[found] += chance * extra
        open_ = following
    return dict(done), steps
