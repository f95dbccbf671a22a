"""Chooses the steps after which the host reads how far each image is; copies may lag some steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lantern_accel.decoding.buckets import BucketChooser
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.policy import Block

#: Steps between two looks at the lengths, on a device whose copies lag.
LAGGING_BLOCK = 8
#: Steps between two looks, while drafting and while decoding is plain.
DRAFTING_BLOCK, PLAIN_BLOCK = 4, 8


@dataclass(frozen=True)
class Look:
    """A copy under way: after ``index`` steps, ``steps`` of one ``length`` since the last."""

    length: int
    index: int
    steps: int


class SyncSchedule(ABC):
    """Decides after which steps the host copies the lengths, and when it reads the oldest copy."""

    def begin(self, length: int) -> None:  # noqa: B027, optional
        """Prepare for an image whose first steps have this length."""

    def resume(self, left: Sequence[int], length: int) -> None:  # noqa: B027, optional
        """Go on with steps of ``length`` where images lack ``left`` tokens, 0 where none is generated."""

    @abstractmethod
    def due(self, index: int, buckets: BucketChooser) -> bool:
        """Return whether the lengths after step ``index``, counted from 1, are to be copied."""

    @abstractmethod
    def readable(self, index: int, posted: Sequence[Look]) -> bool:
        """Return whether the oldest copy is to be read after step ``index``."""

    def record(  # noqa: B027, optional
        self, block: Block, length: int, posted: Sequence[Look]
    ) -> None:
        """Record what was read, with the length of the next steps and the copies still under way."""


class FixedSchedule(SyncSchedule):
    """Looks from the earliest step on at which an image can be complete, for steps of one length.

    Every eighth step before that where progress is ``watched``, and where another bucket may be due. A
    copy is read ``lag`` steps later.
    """

    def __init__(self, g: Geometry, lag: int, watched: bool) -> None:
        self.most, self.lag, self.watched = g.depth + 1, lag, watched
        self.earliest = -(-(g.tokens - 1) // self.most)

    def due(self, index: int, buckets: BucketChooser) -> bool:
        late = index >= self.earliest or (self.watched and index % 8 == 0)
        return late or buckets.worth_reading(self.lag + 1, self.most)

    def readable(self, index: int, posted: Sequence[Look]) -> bool:
        return bool(posted) and index - posted[0].index >= self.lag


class AdaptiveSchedule(SyncSchedule):
    """Looks every few steps, after every one towards the end, for steps that change their length.

    Where copies lag, one is read when the next is posted. ``returns``: plain decoding can be left again;
    else nothing is decided while it lasts.
    """

    def __init__(self, g: Geometry, lag: int, returns: bool, watched: bool) -> None:
        self.tokens, self.lag, self.asks = g.tokens, lag, returns or watched
        #: Steps until the next look, and from the last one to it.
        self.left = self.block = 0

    def begin(self, length: int) -> None:
        self.left = self.block = self._stretch(self.tokens - 1, length, 0, 1.0)

    def due(self, index: int, buckets: BucketChooser) -> bool:
        self.left -= 1
        if self.left:
            return False
        self.left = self.block
        return True

    def readable(self, index: int, posted: Sequence[Look]) -> bool:
        return len(posted) > (1 if self.lag else 0)

    def record(self, block: Block, length: int, posted: Sequence[Look]) -> None:
        since = sum(one.steps for one in posted)
        rate = max(min(block.gained) / block.steps, 1.0)
        self.left = self.block = self._stretch(max(block.left), length, since, rate)

    def _stretch(self, left: int, length: int, since: int, rate: float) -> int:
        """Return the steps until the next look, where the slowest image lacks ``left`` tokens.

        A device whose copies lag was given ``since`` steps that nothing is known of yet. Towards the end
        it is asked when the image should be complete, at the ``rate`` of the last steps known.
        """
        if self.lag:
            # Of what was left at the last look, the steps since have taken their share already.
            coming = math.ceil(left / rate) - since
            return max(min(coming, LAGGING_BLOCK), 1)
        if length > 1:  # towards the end every step may be the last
            return DRAFTING_BLOCK if left > 2 * DRAFTING_BLOCK * length else 1
        return min(left, PLAIN_BLOCK if self.asks else left)


class RowSchedule(SyncSchedule):
    """Looks every few steps, and no later than the first image can be complete: its row is wanted."""

    left = 0

    def resume(self, left: Sequence[int], length: int) -> None:
        least = min(one for one in left if one)
        self.left = min(DRAFTING_BLOCK if length > 1 else PLAIN_BLOCK, -(-least // length))

    def due(self, index: int, buckets: BucketChooser) -> bool:
        self.left -= 1
        return not self.left

    def readable(self, index: int, posted: Sequence[Look]) -> bool:
        return bool(posted)
