"""Switches the draft length between steps on shared buffers.

A step itself is one of a few fixed ones, which a device captures each, of windows, chains or trees. The
host chooses among them by counts that it reads anyway. Where drafts are accepted a long step pays, where
they are not plain decoding does, and what a step of each length costs is the device's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.length_policy import (
    CHAIN_GAIN,
    GAIN,
    AcceptancePolicy,
    LengthPolicy,
    usual_tokens_per_step,
)
from lantern_accel.decoding.looks import AdaptiveSchedule, LookSchedule
from lantern_accel.device.backend import Stopwatch
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, with_tokens_per_step

#: A length that promises less than this share of the best one's speed is not timed again.
HOPELESS = 0.8
#: How often a length that looks so is timed again before.
AGAIN = 2
#: Milliseconds that are timed at least, by as many short steps in a row, and the most steps.
TIMED_MS, MOST_TIMED = 5.0, 8
#: All lengths are timed in turns until that has taken so many milliseconds or more, or so many rounds.
ROUNDS_MS, MOST_ROUNDS = 700.0, 10


class AdaptiveEngine(EngineBase):
    """An engine whose steps have one of several lengths, 1 being plain decoding.

    ``engines``: one for each length, which step on the buffers of the longest. The host moves between
    them by :attr:`chosen`; None: by acceptance, among the lengths whose costs are known, or all of them
    where none is. ``functions``: what a device captures.
    """

    chosen: LengthPolicy | None = None
    functions: dict[str, Callable[[], None]]
    usable: frozenset[int] | None = None
    """The lengths that a device has captured so far, and that steps may have; None: all."""

    def __init__(self, engines: Mapping[int, EngineBase], strategy: Strategy) -> None:
        self.now = max(engines)
        self.engines, self.strategy, self.counted = engines, strategy, {}
        self.longest = longest = engines[self.now]
        self._step_on(longest)
        for name in ["geometry", "source", "drafting", "fused", "returns", "settles", "untimed"]:
            setattr(self, name, getattr(longest, name))
        self.divide(usual(self.geometry, self.verifying.cache.layout, self.ops))

    @property
    def lengths(self) -> list[int]:
        """The lengths that a step may have, rising; 1 is plain decoding."""
        return sorted(self.engines)

    @property
    def longest_length(self) -> int:
        return max(self.engines)

    def divide(self, sizes: Sequence[int]) -> None:
        """Take the one bucket that spares an image most: each is a function for every length."""
        whole = self.verifying.cache.layout.capacity
        needed = self.geometry.prefix + self.geometry.ahead

        def spared(size: int) -> int:
            # Slots that are not looked at, for as long as the bucket serves.
            return (size - needed) * (whole - size)

        super().divide(sorted(sizes, key=spared, reverse=True)[:1])
        for engine in self.engines.values():
            engine.divide(self.sizes[:-1])
        #: Replaced by captured functions where a device captures.
        self.functions = self.host_functions()

    def _apply(self, strategy: Strategy, sampling: Sampling) -> None:
        self.longest._apply(strategy, sampling)
        for engine in (self, *self.engines.values()):
            engine.strategy, engine.sampling = strategy, sampling

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        self.longest.load(condition, prefix_mask, randomness)

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        self.longest.prefill()

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name."""
        return self.longest.changes

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers, which all lengths share."""
        return self.longest.nbytes

    def host_functions(self) -> dict[str, Callable[[], None]]:
        """Return what a device captures beside prefill: a step of each length, and moving to it."""
        found: dict[str, Callable[[], None]] = {}
        for length, engine in self.engines.items():
            found |= {self._name(length, slots): one for slots, one in engine.steps.items()}
            found |= {f"{verb} {length}": one for verb, one in engine.moves().items()}
        found.pop(f"widen {min(self.engines)}", None)  # no step is shorter
        return found

    def functions_of(self, length: int) -> dict[str, Callable[[], None]]:
        """Return those of :meth:`host_functions` that steps of one length need."""
        found = self.host_functions()
        names = [self._name(length, slots) for slots in self.sizes]
        names += [f"{verb} {length}" for verb in ("widen", "gather")]
        return {name: found[name] for name in names if name in found}

    @property
    def draft_lengths(self) -> tuple[DraftLength, ...]:
        """What is known of those lengths that steps may have now."""
        tree: Any = self.strategy.drafts
        may = self.lengths if self.usable is None else self.usable
        return tuple(one for one in tree.draft_lengths if one.length in may)

    def _name(self, length: int, slots: int | None = None) -> str:
        """Return the name of a step among :meth:`host_functions`."""
        within = "" if slots is None or slots == self.sizes[-1] else f" within {slots}"
        return f"step {length}{within}"

    def step(self, slots: int | None = None) -> None:
        """One step of the present length. No value is read by the host, but to price exactly."""
        engine = self.engines[self.now]
        engine.accounting = self.accounting
        if self.accounting == "exact":  # a captured step has the bound
            engine.step(slots)
        else:
            self.functions[self._name(self.now, slots)]()

    def move(self, length: int) -> None:
        """Go on with another length; its steps find what they need (:meth:`moves`)."""
        if length != self.now:
            first = self.functions.get(f"{'widen' if length > self.now else 'gather'} {length}")
            if first is not None:
                first()
        self.now = length

    def usual(self, length: int) -> float:
        """Return the tokens that a step of this length brings, where nobody has counted them.

        Of a drafter, or a copy of the target, that is the most: how often it is right is counted.
        """
        return usual_tokens_per_step(length) if self.settles else float(length)

    def count(self, length: int, steps: int) -> tuple[int, int]:
        """Take some steps of one length; return the tokens gained and the steps, summed over images.

        A request was started before, and must be started again.
        """
        self.now = max(self.lengths)  # what prefill has prepared
        self.move(length)
        for _ in range(steps):
            self.step()
        return int(self.state.length.cpu().sum()), int(self.state.steps.cpu().sum())

    def length_policy(self) -> LengthPolicy:
        if self.chosen is not None:
            return self.chosen
        known = with_tokens_per_step(self.draft_lengths, {n: self.usual(n) for n in self.lengths})
        timed = tuple(one for one in known if one.cost is not None)
        # A draft head guesses all drafts anew: nothing has to settle after a move.
        gain = GAIN if self.settles and not self.geometry.guesses else CHAIN_GAIN
        return AcceptancePolicy(timed or known, gain, self.geometry.batch)

    def schedule(self, watched: bool, check_every: int) -> LookSchedule:
        """Return when the host looks at the lengths: as often as its policy needs them."""
        return AdaptiveSchedule(self.geometry, self._progress.lag, self.returns, watched)

    def calibrate(
        self, watch: Callable[[], Stopwatch], rounds: int = 3, least: float = ROUNDS_MS
    ) -> dict[int, list[float]]:
        """Time steps of every length in turns, milliseconds; the request must be started again.

        It takes ``rounds`` turns, and more where steps are short, until that has taken ``least``
        milliseconds: a busy moment of the machine outlasts a few of those. A length that promises far
        less than the best is timed no further; if it is longer than that, longer ones, which cost more
        still, neither.
        """
        times: dict[int, list[float]] = {}
        lengths = [one.length for one in self.draft_lengths]
        worth = {p.length: p.tokens_per_step or self.usual(p.length) for p in self.draft_lengths}
        number, spent = 0, 0.0
        while number <= rounds or (spent < least and number <= MOST_ROUNDS):
            for length in list(lengths):
                times.setdefault(length, []).append(self._timed(length, watch))
                spent += times[length][-1]
                if length == 1 or not (number or self.untimed):  # a first step may be slow
                    continue
                for _ in range(AGAIN):  # so may any on a busy machine
                    if not (best := _better(length, times, worth)):
                        break
                    times[length].append(self._timed(length, watch))
                if best := _better(length, times, worth):
                    past = length > best
                    lengths = [n for n in lengths if n < length or (n > length and not past)]
                    if past:
                        break
            if not number:  # the first round warms up
                times = {n: found for n, found in times.items() if n not in lengths}
            number += 1
        return times

    def _timed(self, length: int, watch: Callable[[], Stopwatch]) -> float:
        """Time a step of one length, milliseconds: of several in a row, if steps are short.

        Threads that have slept wake in a good part of a short step. In decoding they are awake, and a
        step of one token, which would look dearest, is what all others are compared with.
        """
        for _ in range(self.untimed + 1):
            self.state.rewind(self.geometry.tokens // 2, pending=length)
            self.move(length)
            with watch() as one:
                self.step()
        count = min(math.ceil(TIMED_MS / (1e3 * one.seconds or TIMED_MS)), MOST_TIMED)
        if count == 1:
            return 1e3 * one.seconds
        with watch() as all_:
            for _ in range(count):
                self.step()
        return 1e3 * all_.seconds / count


def _better(
    length: int, times: Mapping[int, Sequence[float]], worth: Mapping[int, float]
) -> int | None:
    """Return the length of the best speed where this one promises far less; None where it does not."""
    promise = {n: worth.get(n, 1.0) / min(found) for n, found in times.items()}
    best = max(promise, key=lambda one: promise[one])
    return best if promise[length] < HOPELESS * promise[best] else None
