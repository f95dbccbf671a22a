"""What the host knows of images that are under way: how far they are, and what it decides by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lantern_accel.decoding.buckets import BucketChooser
from lantern_accel.decoding.host_sync import Look, SyncSchedule
from lantern_accel.decoding.policy import Block, LengthPolicy


@dataclass(frozen=True)
class Progress:
    """What the host read after some steps.

    ``block``: the tokens that they added; ``known``: the tokens of every image that are known;
    ``failed``: images whose numbers were not finite, with the passes before that.
    """

    block: Block
    known: tuple[int, ...]
    failed: Mapping[int, int]

    @property
    def complete(self) -> bool:
        """Whether every image is."""
        return not any(self.block.left)


class Course:
    """The images in an engine's rows, which may begin at different steps.

    ``known``: each row's tokens that are known, as of the last look, all of them where none is generated;
    ``index``: steps so far.
    """

    def __init__(
        self,
        engine: Any,
        steps: Mapping[int, Callable[[], None]],
        policy: LengthPolicy,
        schedule: SyncSchedule,
        known: int,
    ) -> None:
        g = engine.geometry
        self.engine, self.steps, self.policy, self.schedule = engine, steps, policy, schedule
        self.buckets, self.known = BucketChooser([*steps], g), [known] * g.batch
        self.buckets.record_lengths([known - 1], 0)
        #: Steps before each row's image joined, and those of the last copy of the lengths.
        self._joined, self._looked, self.index = [0] * g.batch, 0, 0
        #: Copies of the lengths that are under way.
        self.posted: list[Look] = []

    def join(self, row: int) -> None:
        """Let another image go on in a row, whose prompt was run into it."""
        self.known[row], self._joined[row] = 1, self.index
        self.policy.forget(row)

    def advance(self) -> Progress:
        """Run steps until the host has read how far images are; return that, and choose what follows.

        The host looks at the lengths where the schedule says, and the policy chooses the length of the
        steps after that. A device that lets its copies lag runs some steps more, no-ops on complete
        images. Raises :class:`BackendError` where steps add no token to an image.
        """
        engine, tokens, last = self.engine, self.engine.geometry.tokens, False
        self.schedule.resume([tokens - one for one in self.known], engine.now)
        while not last:
            self.index += 1
            self.steps[self.buckets.size()]()
            self.buckets.record_step(engine.now)
            # By then every image is complete.
            last = self.index - max(self._joined) >= tokens - 1
            if self.schedule.due(self.index, self.buckets) or last:
                engine.session.progress.post()
                self.posted.append(Look(engine.now, self.index, self.index - self._looked))
                self._looked = self.index
            if self.schedule.readable(self.index, self.posted):
                break
        progress = self.read()
        while last and self.posted:
            progress = self.read()
        return progress

    def read(self) -> Progress:
        """Read the oldest posted lengths, and choose the next length by the tokens added."""
        engine, tokens = self.engine, self.engine.geometry.tokens
        look = self.posted.pop(0)
        lengths, finite = engine.session.progress.read().tolist()
        self.buckets.record_lengths(lengths, look.index)
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
        block = Block(look.length, look.steps, tuple(gained), left)
        counts = engine.counted.setdefault(look.length, [0, 0])
        for gain, lacks in zip(gained, left, strict=True):
            if lacks:  # the last step of an image that it did not need all of says little
                counts[0] += gain
                counts[1] += look.steps
        if any(left):
            if engine.now > 1 or engine.source.returns:
                engine.move(self.policy.observe(block))
            self.schedule.record(block, engine.now, self.posted)
        return Progress(block, tuple(self.known), failed)
