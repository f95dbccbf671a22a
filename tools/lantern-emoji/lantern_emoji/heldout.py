"""The emoji that the bundled model was trained on, and those kept from it, for evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np

from lantern_accel.errors import DataError
from lantern_accel.training.imageset import ImageSet
from lantern_emoji.captions import plain_caption
from lantern_emoji.data import load_data
from lantern_emoji.render import SIZE


class EmojiImages:
    """A source of at most ``count`` images of a split, the same for the same seed."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def images(self, manifest: Any, picture: tuple[int, int], split: str) -> ImageSet:
        """Return captioned images of a split, drawn as training draws them.

        Raises :class:`DataError` for another kind of model, and where the data is not there.
        """
        if getattr(manifest, "text", None) is None or picture != (SIZE, SIZE):
            raise DataError(
                "there are no images for this kind of model; name a folder of captioned ones "
                "with --images"
            )
        data = load_data()
        rows = data.split(split)
        if not rows:
            raise DataError(f"the data has no images in the split {split!r}")
        # Variants of people, and flags, come only rarely.
        weights = np.array([data.records[i].weight for i in rows])
        draw = np.random.default_rng(self.seed)
        size = min(self.count, len(rows))
        picked = draw.choice(rows, size, replace=False, p=weights / weights.sum()).tolist()
        style = manifest.defaults.style
        return ImageSet(
            data.images[picked], [plain_caption(data.records[i], style) for i in picked]
        )
