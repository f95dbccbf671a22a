"""Speculative Jacobi decoding in plain Python and float64, every random choice followed both ways.

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
    """Known tokens, and the drafts behind them.

    ``past``: what the last pass but one and those before it gave, ``((place, token before), row)``.
    """

    known: tuple[int, ...]
    drafts: tuple[Draft, ...]
    past: tuple[tuple[tuple[int, int], Row], ...] = ()


def normalised(weights: Sequence[float], fallback: Row) -> Row:
    total = sum(weights)
    return tuple(w / total for w in weights) if total > 0 else fallback


def residual(p: Row, q: Row) -> Row:
    return normalised([max(a - b, 0.0) for a, b in zip(p, q, strict=True)], p)


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


def drawn(weights: Row) -> list[tuple[float, float, int]]:
    """Return where a uniform number draws each code by inverse CDF: from, to, code."""
    edges, total = [], 0.0
    for code, mass in enumerate(weights):
        if mass > 0:
            edges.append((total, total + mass, code))
            total += mass
    return edges


def twice(draft: Draft, p: Row, guess: Row) -> Iterator[tuple[float, int, int]]:
    """Yield what one pair of uniforms makes of a draft under p and under a guess, with probabilities."""
    x, q = draft.token, draft.q
    first, second = (min(1.0, row[x] / q[x]) for row in (p, guess))
    if min(first, second) > 0:
        yield min(first, second), x, x
    low, high = sorted((first, second))
    under = [drawn(residual(row, q)) for row in (p, guess)]
    if first > second:
        yield from ((w * (high - low), x, b) for _, w, b in both([(0.0, 1.0, x)], under[1]))
    elif second > first:
        yield from ((w * (high - low), a, x) for a, w, _ in both(under[0], [(0.0, 1.0, x)]))
    if high < 1:
        yield from ((w * (1 - high), a, b) for a, w, b in both(*under))


def both(
    one: list[tuple[float, float, int]], other: list[tuple[float, float, int]]
) -> Iterator[tuple[int, float, int]]:
    """Yield pairs of codes that one uniform number draws, with the width between."""
    for a, b, left in one:
        for c, d, right in other:
            width = min(b, d) - max(a, c)
            if width > 0:
                yield left, width, right


def recalling(
    moment: Moment, target: Target, passes: int, rows: Sequence[Row]
) -> Iterator[tuple[float, Moment]]:
    """Yield a step's outcomes where drafts behind a replacement are drawn from earlier passes' rows.

    The row is looked up by what the ordinary test made of the token before, as the engine does.
    """
    start, count = len(moment.known), len(moment.drafts)
    seen = (moment.known[-1], *(d.token for d in moment.drafts))
    known_rows = dict(moment.past)

    def go(
        i: int,
        base: tuple[int, ...],
        final: tuple[int, ...],
        qs: tuple[Row, ...],
        first: int | None,
    ) -> Iterator[tuple[float, Moment]]:
        if i > count:
            yield 1.0, moved(final, qs, count if first is None else first)
            return
        guess = None
        if first is not None and base[-1] != seen[i]:
            guess = known_rows.get((start + i, base[-1]))
        row = rows[i]
        for chance, a, b in tested(i, row, guess):
            here = first
            if here is None and i < count and a != moment.drafts[i].token:
                here = i
            after = (*base, a), (*final, b), (*qs, row if guess is None else guess), here
            for rest, found in go(i + 1, *after):
                yield chance * rest, found

    def tested(i: int, row: Row, guess: Row | None) -> Iterator[tuple[float, int, int]]:
        if i < count:
            yield from twice(moment.drafts[i], row, row if guess is None else guess)
            return
        other = drawn(row if guess is None else guess)
        yield from ((width, a, b) for a, width, b in both(drawn(row), other))

    def moved(tokens: tuple[int, ...], qs: tuple[Row, ...], first: int) -> Moment:
        known = (*moment.known, *tokens[: first + 1])
        drafts = tuple(map(Draft, tokens[first + 1 :], qs[first + 1 :]))
        new = [((start + i, seen[i]), rows[i]) for i in range(count + 1)]
        fresh = dict(new)
        kept = [(k, r) for k, r in moment.past if k not in fresh and k[0] > len(known)]
        later = [(k, r) for k, r in new if k[0] > len(known)]
        return Moment(known, drafts, tuple((kept + later)[-passes * (count + 1) :]))

    yield from go(0, (), (), (), None)


def outcomes(
    moment: Moment,
    target: Target,
    fresh: Callable[[Moment, int], Row],
    anew: bool,
    passes: int = 0,
) -> Iterator[tuple[float, Moment]]:
    """Yield what a step makes of a moment, with probabilities; the window's length stays."""
    past = [*moment.known, *(d.token for d in moment.drafts)]
    start = len(moment.known)
    rows = [target(tuple(past[: start + i])) for i in range(len(moment.drafts) + 1)]
    if passes:
        for chance, found in recalling(moment, target, passes, rows):
            for extra, filled in refill(found, len(moment.drafts), fresh):
                yield chance * extra, filled
        return

    def go(i: int, tokens: tuple[int, ...], first: int | None) -> Iterator[tuple[float, Moment]]:
        if i < len(moment.drafts):
            again = anew and first is not None
            for chance, code, kept in one(moment.drafts[i], rows[i], again):
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
            yield chance, Moment(moment.known, moment.drafts + new, moment.past)


def law(
    target: Target,
    tokens: int,
    window: int,
    fresh: Callable[[Moment, int], Row],
    *,
    anew: bool = False,
    passes: int = 0,
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
            for extra, found in outcomes(moment, target, fresh, anew, passes):
                if len(found.known) >= tokens:
                    done[found.known[:tokens]] += chance * extra
                else:
                    following[found] += chance * extra
        open_ = following
    return dict(done), steps
