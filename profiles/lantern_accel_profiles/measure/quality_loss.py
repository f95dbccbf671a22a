"""Measures the quality loss of relaxation in the same run as its speed.

Three figures per relaxed strategy: the probability mass it moved; how many of its tokens are those that
exact decoding samples with the same tree and the same uniforms; and how far its images are from plain
decoding's, next to the distance of two sets of plain decoding (the floor: what chance alone gives).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from PIL.Image import Resampling
from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.generation.result import image_grid, png_bytes, to_images
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.measure.record import (
    Distance,
    NotMeasured,
    Quality,
    Strip,
    not_measured,
)
from lantern_accel_profiles.quality import features as network_features
from lantern_accel_profiles.quality import interval as intervals
from lantern_accel_profiles.quality.exact_loss import exact_costs
from lantern_accel_profiles.quality.set_metrics import METRIC, kernel_distance, permutation_test

#: Images decoded together here; the figures do not depend on it.
BATCH = 8
#: Images per row of the contact sheet, and the largest side of one in pixels.
SHEET = 8
THUMBNAIL = 128
#: Images whose tokens are compared one by one; each has hundreds.
COMPARED = 16
#: Added to the seed for the second set of plain decoding.
OTHER_SEED = 10_000
PLAIN = Strategy(name="vanilla")


def images_for(strategies: int, images: int) -> int:
    """Return how many images the quality losses of this many strategies at one temperature take.

    Two sets of plain decoding, and for each strategy its own and those of its exact twin.
    """
    return 2 * images + strategies * (images + min(images, COMPARED)) if strategies else 0


def relaxed_mass(done: Decoded) -> Tensor:
    """Return the mass that relaxation moved per generated token, float ``[B]``."""
    return (done.quality_loss / done.tokens.shape[1]).float()


@dataclass
class ScoredImages:
    """Images of one strategy: tokens int64 ``[n, N]``, mass moved per token ``[n]``, pixels uint8.

    ``features``: what the network sees, where it was asked.
    """

    tokens: Tensor
    moved: Tensor
    pixels: Tensor
    features: intervals.Array | None = None


@dataclass(eq=False)
class QualityStudy:
    """Generates each set of images once and compares relaxed strategies with exact ones.

    ``images`` per strategy, prompts in turn; ``beat`` is called after every chunk, for progress.
    """

    pipeline: Pipeline
    prompts: Sequence[Prompt]
    images: int
    seed: int
    temperature: float
    beat: Callable[[str], None] = lambda text: None
    _sets: dict[tuple[str, int, int], ScoredImages] = field(default_factory=dict)

    def generate_images(
        self, strategy: Strategy, seed: int | None = None, images: int | None = None
    ) -> ScoredImages:
        """Return this strategy's images, all or the first few, decoding them on first use."""
        seed, images = self.seed if seed is None else seed, images or self.images
        # A name does not change the images.
        key = strategy.model_copy(update={"name": ""}).model_dump_json(), seed, images
        if key not in self._sets:
            self._sets[key] = self._decode(strategy, seed, images)
        return self._sets[key]

    def _decode(self, strategy: Strategy, seed: int, images: int) -> ScoredImages:
        sampling = self.pipeline.sampling(temperature=self.temperature)
        tokens, moved, pixels = [], [], []
        for start in range(0, images, BATCH):
            count = min(BATCH, images - start)
            chunk = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
            # Within a call image i has the stream (seed, i), so every chunk has a seed of its own.
            observer = exact_costs if strategy.acceptance.relaxed else None
            done, _ = self.pipeline.decode_only(
                chunk, strategy, sampling, seed + start, observer=observer
            )
            tokens.append(done.tokens)
            moved.append(relaxed_mass(done))
            pixels.append(self.pipeline.pixels(done.tokens))
            self.beat(f"quality loss: {strategy.name}: {start + count} of {images} images")
        return ScoredImages(torch.cat(tokens), torch.cat(moved), torch.cat(pixels))

    def measure(self, strategy: Strategy) -> Quality:
        """Return the quality loss of a relaxed strategy."""
        relaxed = self.generate_images(strategy)
        twin = strategy.model_copy(
            update={
                "name": f"exact decoding for {strategy.name}",
                "acceptance": Exact(),
                "coupling": "maximal",  # which samples by the same uniforms
            }
        )
        count = min(self.images, COMPARED)
        exact = self.generate_images(twin, images=count).tokens[:count]
        equal = (relaxed.tokens[:count] == exact).float()
        other = self.generate_images(PLAIN, self.seed + OTHER_SEED).tokens
        return Quality(
            strategy=strategy,
            temperature=self.temperature,
            images=self.images,
            total_variation_per_token=intervals.mean(relaxed.moved.tolist()),
            agreement=intervals.mean(equal.mean(dim=1).tolist()),
            chance_agreement=float((self.generate_images(PLAIN).tokens == other).float().mean()),
            first_difference=intervals.mean(equal.cumprod(dim=1).sum(dim=1).tolist()),
            distance=self._distance(strategy),
        )

    def _distance(self, strategy: Strategy) -> Distance | NotMeasured:
        if self.images < 2:
            return not_measured("one image has no distance; `--quality-images 16` or more")
        network = self._network
        if isinstance(network, str):
            return not_measured(network)
        relaxed, plain = (self._see(network, one, self.seed) for one in (strategy, PLAIN))
        other = self._see(network, PLAIN, self.seed + OTHER_SEED)
        p_value, detectable = permutation_test(relaxed, plain)
        return Distance(
            metric=METRIC,
            network=network_features.NETWORK,
            value=kernel_distance(relaxed, plain),
            floor=kernel_distance(other, plain),
            p_value=p_value,
            detectable=detectable,
        )

    def _see(
        self, network: network_features.EfficientNetLite0, strategy: Strategy, seed: int
    ) -> intervals.Array:
        made = self.generate_images(strategy, seed)
        if made.features is None:
            made.features = network.vectors(made.pixels)
        return made.features

    @cached_property
    def _network(self) -> network_features.EfficientNetLite0 | str:
        try:
            return network_features.load_network()
        except network_features.FeaturesMissing as missing:
            return str(missing)

    def strip(self, strategy: Strategy) -> Strip:
        """Return the first images of a strategy side by side, as a PNG."""
        pixels = self.generate_images(strategy).pixels[:SHEET]
        side = min(pixels.shape[1], THUMBNAIL)
        shown = [one.resize((side, side), Resampling.LANCZOS) for one in to_images(pixels)]
        return Strip(
            strategy=strategy.name,
            temperature=self.temperature,
            prompts=[self.prompts[i % len(self.prompts)] for i in range(len(shown))],
            png_base64=base64.b64encode(png_bytes(image_grid(shown, SHEET))).decode(),
        )
