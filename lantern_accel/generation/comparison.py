"""The sources of drafts that auto compares for a batch, over the first images that it draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from lantern_accel.generation.timed import Timed
from lantern_accel.strategy.values import Strategy

#: What drafts must promise over plain decoding by costs of a few steps: these are uncertain by a tenth.
ENOUGH = 1.15
#: Images of a source after which its figures do not change any more.
COUNTED_IMAGES = 8
#: Images after which steps are timed once more: a minute in which the machine was busy made some of them
#: look dear, and a choice is kept.
TIMED_AFTER = (1, 2, 4, 8)
#: What a source must promise to be timed again, as a share of the best, and how many are at most.
NEAR, MOST_NEAR = 0.7, 3


class Comparison(BaseModel):
    """What was timed for a batch, and which of it promises most.

    ``images``: drawn so far with whatever was chosen; ``timings``: how often steps were timed.
    """

    model_config = ConfigDict(extra="forbid")

    timed: list[Timed]
    images: int = 0
    timings: int = 1

    @property
    def due(self) -> bool:
        """Whether steps are to be timed again before the next image."""
        more = TIMED_AFTER[self.timings - 1 :]
        return bool(more) and self.images >= more[0]

    @property
    def ends(self) -> bool:
        """Whether steps are timed no more."""
        return self.timings > len(TIMED_AFTER)

    def level(self) -> Comparison:
        """Return it with all costs relative to the least plain step that was timed for any source."""
        plain = min((one.plain for one in self.timed if one.plain is not None), default=0.0)
        if not plain:
            return self
        return self.model_copy(update={"timed": [one.relative_to(plain) for one in self.timed]})

    def best(self, batch: int) -> Timed:
        """Return the source that promises a batch most, the first of equals."""
        return max(self.timed, key=lambda one: one.speed(batch) * one.certainty)

    def pays(self, batch: int) -> bool:
        """Whether the best promises enough, or was known to and has drawn too few images to say."""
        return self.best(batch).promise(batch) >= ENOUGH or any(one.young for one in self.timed)

    def near(self, batch: int) -> list[int]:
        """Return which sources may yet turn out to be the best, or to pay: positions, the best first."""
        promises = [one.speed(batch) * one.certainty for one in self.timed]
        least = NEAR * max(ENOUGH, *promises)
        order = sorted(range(len(promises)), key=lambda at: -promises[at])
        return [at for at in order if promises[at] >= least][:MOST_NEAR]

    def count(
        self, drafted: Strategy | None, counted: Mapping[int, Sequence[int]], batch: int
    ) -> bool:
        """Count the images of a batch in; return whether anything is known that was not before.

        ``drafted``: what they were drawn with, ``counted``: tokens gained and steps by length; None:
        with plain decoding.
        """
        news = not self.ends
        self.images += batch
        for one in self.timed:
            if drafted is not None and one.drafts_as(drafted) and one.images < COUNTED_IMAGES:
                one.count(counted)
                one.images += batch
                news = True
                break
        self.timed = [one.weighed() for one in self.timed]
        return news
