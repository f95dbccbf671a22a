"""Tracks committed tokens per image on the host, and picks the next draft length."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lantern_accel.decoding.buckets import BucketChooser
from lantern_accel.strategy.length_policy import AcceptancePolicy, LengthStats

#: Steps between two looks at the lengths, while drafting and while decoding is plain.
DRAFTING_BLOCK, PLAIN_BLOCK = 4, 8


@dataclass(frozen=True)
class SyncSchedule:
    """Sets after which steps the host copies the lengths, and when it reads a copy.

    It copies them when the last image may be complete, or with ``first`` when the first may be.
    ``drafting`` and ``plain``: the most steps between two copies, with and without drafts; None: no
    limit. ``lag``: steps between a copy and its reading, so that the host does not wait.
    """

    lag: int = 0
    drafting: int | None = DRAFTING_BLOCK
    plain: int | None = PLAIN_BLOCK
    first: bool = False


@dataclass(frozen=True)
class LengthSnapshot:
    """A copy of the lengths after ``index`` steps. These add at most ``most`` tokens to an image.

    Since the previous copy, ``steps`` steps of one ``length`` were run.
    """

    length: int
    index: int
    steps: int
    most: int


@dataclass(frozen=True)
class StepProgress:
    """The state that the host reads after some steps.

    ``block``: the tokens that they added; ``known``: committed tokens of every image; ``failed``: the
    images with NaN or infinite logits, and the passes before that.
    """

    block: LengthStats
    known: tuple[int, ...]
    failed: Mapping[int, int]

    @property
    def complete(self) -> bool:
        """Whether every image is complete."""
        return not any(self.block.left)


class HostLoop:
    """The images in an engine's rows, which may begin at different steps.

    ``known``: each row's tokens that are known, as of the last look, all of them where none is generated;
    ``index``: steps so far.
    """

    def __init__(
        self,
        engine: Any,
        policy: AcceptancePolicy | None,
        schedule: SyncSchedule,
        known: int,
        step: Callable[[], None] | None,
    ) -> None:
        g = engine.geometry
        # Weak: an engine holds its loop, and frees its buffers when it is dropped, not at a collection.
        self.engine, self.policy = weakref.proxy(engine), policy
        self.schedule, self.step = schedule, step
        self.tokens, self.known = g.tokens, [known] * g.batch
        self.buckets = BucketChooser(engine.sizes, g)
        #: Steps so far, the tokens that these add to an image at most, and those before a row's image.
        self.index, self._most, self._joined = 0, 0, [0] * g.batch
        #: Copies of the lengths that are under way, and the last one that was read.
        self.posted, self._seen = list[LengthSnapshot](), LengthSnapshot(0, 0, 0, 0)

    def join(self, row: int, known: int = 1) -> None:
        """Let another image go on in a row, into which its prompt and ``known`` tokens were run."""
        self.known[row], self._joined[row] = known, self.index
        if self.policy is not None:
            self.policy.forget(row)

    def advance(self, stop: Callable[[], object] | None = None) -> StepProgress:
        """Run steps until the host has read how far images are; return that, and choose what follows.

        The host looks at the lengths where the schedule says, and the policy chooses the length of the
        steps after that. A device that lets its copies lag runs some steps more, no-ops on complete
        images. ``stop`` is called before each step; where that is true, nothing is read. Raises
        :class:`BackendError` where steps add no token to an image.
        """
        engine, last = self.engine, False
        while not last:
            if stop is not None and stop():
                left = tuple(self.tokens - one for one in self.known)
                stats = LengthStats(engine.now, 0, (0,) * len(left), left)
                return StepProgress(stats, tuple(self.known), {})
            if self.step is None:
                engine.step(self.buckets.size(self._farthest + self._since))
            else:
                self.step()
            self.index += 1
            self._most += engine.now
            # By then every image is complete.
            last = self.index - max(self._joined) >= self.tokens - 1
            if last or self._due():
                before = self.posted[-1] if self.posted else self._seen
                steps = self.index - before.index
                engine.session.progress.post()
                self.posted.append(LengthSnapshot(engine.now, self.index, steps, self._most))
            if self.posted and self.index - self.posted[0].index >= self.schedule.lag:
                break
        progress = self.read()
        while last and self.posted:
            progress = self.read()
        return progress

    @property
    def _since(self) -> int:
        """The tokens that steps since the last look add to an image at most."""
        return self._most - self._seen.most

    @property
    def _farthest(self) -> int:
        """The tokens that are committed of the farthest image that was not complete at the last look."""
        return max((one for one in self.known if one < self.tokens), default=1) - 1

    def _due(self) -> bool:
        """Return whether the host is to copy the lengths now."""
        one, length, farthest = self.schedule, self.engine.now, self._farthest
        lacks = [self.tokens - known for known in self.known if known < self.tokens]
        left = (min if one.first else max)(lacks, default=0)
        if self._since >= left:
            return True
        block = one.drafting if length > 1 else one.plain
        if block and length > 1 and not one.first and left <= 2 * block * length:
            block = 1  # towards the end every step may be the last
        before = self.posted[-1] if self.posted else self._seen
        if block and self.index - before.index >= block:
            return True
        # Whether knowing the lengths, of which each step adds one at least, can spare a larger bucket.
        least = farthest + self.index - self._seen.index
        most = farthest + self._since + (one.lag + 1) * length
        return self.buckets.size(least) < self.buckets.size(most)

    def read(self) -> StepProgress:
        """Read the oldest posted lengths, and choose the next length by the tokens added."""
        engine, tokens = self.engine, self.tokens
        self._seen = look = self.posted.pop(0)
        lengths, finite = engine.session.progress.read().tolist()
        gained, failed = [0] * len(lengths), {}
        for row, before in enumerate(self.known):
            passes = 1 + look.index - self._joined[row]
            if before == tokens or passes < 2:
                continue
            self.known[row] = lengths[row] + 1
            gained[row] = self.known[row] - before
            if gained[row] < min(look.steps, tokens - before):
                raise engine.not_replayed(look.index)
            if finite[row] < passes:
                failed[row] = finite[row]
        left = tuple(tokens - one for one in self.known)
        block = LengthStats(look.length, look.steps, tuple(gained), left)
        if self.policy is not None and any(left) and (engine.now > 1 or engine.source.returns):
            engine.move(self.policy.observe(block))
        return StepProgress(block, tuple(self.known), failed)
