"""Steps of several lengths on one state: the host moves between them by what it reads anyway.

A step itself is one of a few fixed ones, which a device captures each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lantern_accel.decoding.base import Decoded, EngineBase
from lantern_accel.decoding.buckets import Reach, Steps, Within, usual
from lantern_accel.decoding.length_policy import (
    GAIN,
    AcceptancePolicy,
    Block,
    LengthPolicy,
    usual_tokens_per_step,
)
from lantern_accel.device.backend import Stopwatch
from lantern_accel.strategy.values import DraftLength, Sampling, Strategy, with_tokens_per_step

#: Steps between two looks at the lengths, on a device whose copies lag.
LAGGING_BLOCK = 8
#: A length that promises less than this share of the best one's speed is not timed again.
HOPELESS = 0.8
#: Milliseconds that are timed at least, by as many short steps in a row, and the most steps.
TIMED_MS, MOST_TIMED = 5.0, 8
#: Steps between two looks, while drafting and while decoding is plain: a look costs the host some percent
#: of a short step.
DRAFTING_BLOCK, PLAIN_BLOCK = 4, 8


class AdaptiveEngine(EngineBase):
    """An engine whose steps have one of several lengths, 1 being plain decoding.

    ``now``: the present one. ``chosen``: the rule that chooses; None: by acceptance, among the lengths
    whose costs are known, or all of them where none is. ``functions``: what a device captures.
    """

    now: int
    chosen: LengthPolicy | None
    functions: dict[str, Callable[[], None]]
    counted: dict[int, list[int]]
    """Tokens gained and steps of the last request by length, summed over images that needed them all."""
    usable: frozenset[int] | None = None
    """The lengths that a device has captured so far, and that steps may have; None: all."""
    returns = True
    """Whether plain decoding can be left again."""
    gain = GAIN
    """What a move to another length must promise."""
    untimed = 1
    """Steps of a length before the one that is timed: they find other steps' data in the caches."""

    engines: Mapping[int, EngineBase]
    """The engines of the lengths that draft, on the buffers of the longest."""

    def _step_on(self, engines: Mapping[int, EngineBase], strategy: Strategy) -> None:
        """Take the buffers of the longest of ``engines``, and its strategy's name and lengths."""
        longest = engines[max(engines)]
        self.engines, self.now, self.strategy = engines, max(engines), strategy
        self.sampling, self.ops, self.greedy = longest.sampling, longest.ops, longest.greedy
        self.geometry, self.runtime_params = longest.geometry, longest.runtime_params
        self.filters, self.choices = longest.filters, longest.choices
        self.verifying, self.drafting = longest.verifying, longest.drafting
        self.source = longest.source
        self.state, self.finite, self.rule = longest.state, longest.finite, longest.rule
        self.fused, self._planned = longest.fused, longest._planned
        self._progress = longest._progress
        self.counted = {}
        self.divide(usual(self.geometry, self.verifying.cache.layout, self.ops))

    @property
    def owners(self) -> dict[int, Any]:
        """What has the step of each length."""
        return {**self.engines}

    @property
    def lengths(self) -> list[int]:
        """The lengths that a step may have, rising; 1 is plain decoding."""
        return sorted(self.owners)

    def divide(self, sizes: Sequence[int]) -> None:
        """Take the one bucket that spares an image most: each is a function for every length."""
        whole = self.verifying.cache.layout.capacity
        needed = self.geometry.prefix + self.geometry.ahead

        def spared(size: int) -> int:
            # Slots that are not looked at, for as long as the bucket serves.
            return (size - needed) * (whole - size)

        super().divide(sorted(sizes, key=spared, reverse=True)[:1])
        for owner in self.owners.values():
            owner.divide(self.sizes[:-1])
        #: Replaced by captured functions where a device captures.
        self.functions = self.host_functions()

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        super().configure(strategy, sampling)
        for engine in self.engines.values():
            engine.strategy, engine.sampling = strategy, sampling

    def host_functions(self) -> dict[str, Callable[[], None]]:
        """Return what a device captures beside prefill: a step of each length."""
        found: dict[str, Callable[[], None]] = {}
        for length, owner in self.owners.items():
            found[self._name(length)] = owner.step
            for slots in self.sizes[:-1]:
                found[self._name(length, slots)] = Within(owner, slots).step
        return found

    def functions_of(self, length: int) -> dict[str, Callable[[], None]]:
        """Return those of :meth:`host_functions` that steps of one length need."""
        found = self.host_functions()
        names = [self._name(length, slots) for slots in self.sizes]
        return {name: found[name] for name in (*names, f"widen {length}") if name in found}

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        self.engines[max(self.engines)].prefill()

    @abstractmethod
    def at_middle(self, length: int) -> None:
        """Be in the middle of an image, for a step of this length to be timed."""

    @property
    def draft_lengths(self) -> tuple[DraftLength, ...]:
        """What is known of those lengths that steps may have now."""
        tree: Any = self.strategy.tree
        may = self.lengths if self.usable is None else self.usable
        return tuple(one for one in tree.draft_lengths if one.length in may)

    def _name(self, length: int, slots: int | None = None) -> str:
        """Return the name of a step among :meth:`host_functions`."""
        within = "" if slots is None or slots == self.sizes[-1] else f" within {slots}"
        return f"step {length}{within}"

    def step(self, slots: int | None = None) -> None:
        """One step of the present length. No value is read by the host."""
        self.functions[self._name(self.now, slots)]()

    def move(self, length: int) -> None:
        """Go on with another length."""
        self.now = length

    def usual(self, length: int) -> float:
        """Return the tokens that a step of this length brings, where nobody has counted them."""
        return usual_tokens_per_step(length)

    def count(self, length: int, steps: int) -> tuple[int, int]:
        """Take some steps of one length; return the tokens gained and the steps, summed over images.

        A request was started before, and must be started again.
        """
        self.now = max(self.lengths)  # what prefill has prepared
        self.move(length)
        for _ in range(steps):
            self.step()
        return int(self.state.length.cpu().sum()), int(self.state.steps.cpu().sum())

    def _count(self, block: Block) -> None:
        """Add what a block's steps have brought to what is counted, of images that lack tokens still."""
        open_ = [gained for gained, left in zip(block.gained, block.left, strict=True) if left]
        counts = self.counted.setdefault(block.length, [0, 0])
        counts[0] += sum(open_)
        counts[1] += len(open_) * block.steps

    def _pacing(self) -> LengthPolicy:
        if self.chosen is not None:
            return self.chosen
        known = with_tokens_per_step(self.draft_lengths, {n: self.usual(n) for n in self.lengths})
        timed = tuple(one for one in known if one.cost is not None)
        return AcceptancePolicy(timed or known, self.gain, self.geometry.batch)

    def calibrate(self, watch: Callable[[], Stopwatch], rounds: int = 3) -> dict[int, list[float]]:
        """Time steps of every length in turns, milliseconds; the request must be started again.

        A length that promises far less than another is timed no further, and longer ones, which cost
        more still, neither.
        """
        times: dict[int, list[float]] = {}
        lengths = [one.length for one in self.draft_lengths]
        worth = {p.length: p.tokens_per_step or self.usual(p.length) for p in self.draft_lengths}
        for number in range(rounds + 1):
            for length in list(lengths):
                times.setdefault(length, []).append(self._timed(length, watch))
                promise = {n: worth.get(n, 1.0) / min(found) for n, found in times.items()}
                if length == 1 or not (number or self.untimed):  # a first step may be slow
                    continue
                if promise[length] < HOPELESS * max(promise.values()):
                    lengths = [each for each in lengths if each < length]
                    break
            if not number:  # the first round warms up
                times = {n: found for n, found in times.items() if n not in lengths}
        return times

    def _timed(self, length: int, watch: Callable[[], Stopwatch]) -> float:
        """Time a step of one length, milliseconds: of several in a row, if steps are short.

        Threads that have slept wake in a good part of a short step. In decoding they are awake, and a
        step of one token, which would look dearest, is what all others are compared with.
        """
        for _ in range(self.untimed + 1):
            self.at_middle(length)
            with watch() as one:
                self.step()
        count = min(math.ceil(TIMED_MS / (1e3 * one.seconds or TIMED_MS)), MOST_TIMED)
        if count == 1:
            return 1e3 * one.seconds
        with watch() as all_:
            for _ in range(count):
                self.step()
        return 1e3 * all_.seconds / count

    def run(
        self,
        step: Steps | None = None,
        on_progress: Callable[[int], None] | None = None,
        check_every: int = 1,
    ) -> Decoded:
        """Step until every image is complete; call :meth:`start` first.

        ``step`` runs in place of a step of the present length, or one for each bucket. The host reads the
        lengths every few steps, after every one towards the end, and gives the rule what they gained;
        late where the device's copies lag.
        """
        tokens, rule = self.geometry.tokens, self._pacing()
        steps = self._of_buckets(step)
        reach = Reach([*steps], self.geometry)
        lag = self._progress.lag
        self.now, self.counted = max(self.lengths), {}  # what prefill has prepared
        self.move(rule.begin())
        known = [1] * self.geometry.batch
        posted: list[tuple[int, int, int]] = []
        index, since, rate = 0, 0, 1.0

        def stretch(left: int) -> int:
            """Return the steps until the next look, where the slowest image lacks so many tokens.

            A device whose copies lag was given ``since`` steps that nothing is known of yet. Towards the
            end it is asked when the image should be complete, at the ``rate`` of the last steps known.
            """
            if lag:
                # Of what was left at the last look, the steps since have taken their share already.
                coming = math.ceil(left / rate) - since
                return max(min(coming, LAGGING_BLOCK), 1)
            if self.now > 1:  # towards the end every step may be the last
                return DRAFTING_BLOCK if left > 2 * DRAFTING_BLOCK * self.now else 1
            return min(left, PLAIN_BLOCK if self.returns or on_progress is not None else left)

        def read_block() -> Block:
            """Read the oldest posted lengths, and return what its steps have brought."""
            nonlocal known
            length, done, ran = posted.pop(0)
            lengths, finite = self._progress.read().tolist()
            self._require(finite, 1 + done, index)
            reach.record_lengths(lengths, done)
            lengths = [one + 1 for one in lengths]
            gained = tuple(after - before for after, before in zip(lengths, known, strict=True))
            known = lengths
            if on_progress is not None:
                on_progress(min(known))
            return Block(length, ran, gained, tuple(tokens - one for one in known))

        due = ran = stretch(tokens - 1)
        for index in range(1, tokens):
            steps[reach.size()]()
            reach.record_step(self.now)
            due -= 1
            if due:
                continue
            self._progress.post()
            posted.append((self.now, index, ran))
            due = ran
            if len(posted) == 1 and lag:
                continue
            block = read_block()
            self._count(block)
            if not any(block.left):
                break
            if self.now > 1 or self.returns:
                self.move(rule.observe(block))
            since = sum(count for _, _, count in posted)
            rate = max(min(block.gained) / block.steps, 1.0)
            due = ran = stretch(max(block.left))
        while posted:  # so that the next request does not read this one's
            read_block()
        self._check_replayed(index)
        self._require(self.finite.count.tolist(), 1 + index, index)
        return self.decoded()
