"""The batches of a training step: weighted images in random views with fresh captions, and scenes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.text import PAD_ID, TextEncoderConfig, place
from lantern_accel.families.llamagen.words import normalise
from lantern_emoji.captions import caption, plain_caption
from lantern_emoji.data import Record
from lantern_emoji.scenes import Scene, scene_caption


@dataclass(frozen=True)
class SceneTokens:
    """Scenes and their codes, int16 ``[n, grid * grid]``, in the same order."""

    scenes: Sequence[Scene]
    codes: NDArray[np.int16]


class Batches:
    """Draws batches of one split; ``scene_share`` of the examples are scenes.

    ``tokens`` int16 ``[n, views, grid * grid]``. ``group_weights``, ``concept_weights`` and
    ``style_weights`` are factors on the records' own weights. ``default_style``: the one that a
    caption without a style word means.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokens: NDArray[np.int16],
        tokenizer: Any,
        text: TextEncoderConfig,
        split: str,
        group_weights: Mapping[str, float] | None = None,
        concept_weights: Mapping[str, float] | None = None,
        *,
        style_weights: Mapping[str, float] | None = None,
        default_style: str | None = None,
        scenes: SceneTokens | None = None,
        scene_share: float = 0.0,
    ) -> None:
        factor, further, styles = group_weights or {}, concept_weights or {}, style_weights or {}
        self.default_style = default_style
        chosen = [r for r in records if r.split == split]
        self.records = {r.index: r for r in records}
        self.rows = [r.index for r in chosen]
        weights = np.array(
            [
                r.weight
                * factor.get(r.group, 1.0)
                * further.get(r.concept, 1.0)
                * styles.get(r.style, 1.0)
                for r in chosen
            ]
        )
        if not chosen or weights.sum() <= 0:
            raise DataError(f"the data has no image in the split {split!r} with a weight above 0")
        self._cumulative = weights.cumsum().tolist()
        self.tokens, self.tokenizer, self.text = tokens, tokenizer, text
        self.scenes = scenes
        self.scene_rows = (
            [i for i, scene in enumerate(scenes.scenes) if scene.split == split] if scenes else []
        )
        self.scene_share = scene_share if self.scene_rows else 0.0

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokenise captions as a request would: ids int64 and mask bool, both ``[B, prefix]``."""
        rows = [place(self.tokenizer.encode(normalise(text)).ids, self.text) for text in texts]
        ids = torch.tensor(rows)
        return ids, ids != PAD_ID

    def sample_batch(
        self, size: int, rng: random.Random, *, plain: bool = False
    ) -> tuple[Tensor, ...]:
        """Return ``ids, mask, codes``; ``plain`` takes the first view and the bare name."""
        codes = np.empty((size, self.tokens.shape[-1]), np.int64)
        texts = []
        for i in range(size):
            if rng.random() < self.scene_share:
                assert self.scenes is not None
                row = rng.choice(self.scene_rows)
                codes[i] = self.scenes.codes[row]
                scene = self.scenes.scenes[row]
                texts.append(scene_caption(scene, self.records, rng, self.default_style))
                continue
            pick = rng.choices(self.rows, cum_weights=self._cumulative)[0]
            view = 0 if plain else rng.randrange(self.tokens.shape[1])
            codes[i] = self.tokens[pick, view]
            record = self.records[pick]
            style = self.default_style
            texts.append(plain_caption(record, style) if plain else caption(record, rng, style))
        return (*self.encode(texts), torch.from_numpy(codes))
