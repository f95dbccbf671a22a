"""Token ids in, codes out: what every door of another library leads to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.errors import LanternError
from lantern_accel.families.base import Rows
from lantern_accel.families.registry import family
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.integrations.sharing import Memory, ModuleWeights, shared_pipeline
from lantern_accel.strategy.values import Sampling, Strategy

#: From a module's weights to the manifest of our model of it.
Describe = Callable[[ModuleWeights], Any]


class InterruptedDecodingError(LanternError):
    """Tokens were asked for no longer; what was drawn of them is no picture."""


@dataclass
class Accelerated:
    """Our decoder around one loaded module; made when it is first needed.

    ``memory`` says what it holds beside the module's own weights, once it was made. ``overrides`` are
    fields of :class:`Sampling` that win over what the library asks for.
    """

    module: nn.Module
    family: str
    describe: Describe
    strategy: str | Strategy = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    _pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline on the module's device, made anew where the module has moved since."""
        first = next(iter(self.module.parameters()))
        if self._pipeline is not None:
            weight = self._pipeline.model.target.weight
            if (weight.device, weight.dtype) == (first.device, first.dtype):
                return self._pipeline
            self.close()
        weights, kind = ModuleWeights(self.module), family(self.family)
        manifest = self.describe(weights)
        relaxed = isinstance(self.strategy, Strategy) and bool(self.strategy.neighbours)
        relaxed = relaxed or (
            isinstance(self.strategy, str) and self.strategy.startswith("lantern")
        )
        self._pipeline, self.memory = shared_pipeline(weights, kind, manifest, relaxed)
        logging.getLogger("lantern_accel").info("weights: %s", self.memory)
        return self._pipeline

    def close(self) -> None:
        """Free what is held beside the module."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def sampling(self, found: Sampling) -> Sampling:
        """Return the library's settings with the overrides."""
        return Sampling.model_validate({**found.model_dump(), **self.overrides})


def draw(
    pipeline: Pipeline,
    rows: Rows,
    shape: Hashable,
    strategy: str | Strategy,
    sampling: Sampling,
    seeds: Sequence[tuple[int, int]],
    on_progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the tokens of a batch, int64 ``[B, N]`` on the host.

    ``seeds``: for each image its seed and its index in the request, which fix its randomness. Images of
    one seed are decoded together. ``on_progress`` gets the tokens that are known of the slowest image of
    a part; an error that it raises ends decoding.
    """
    chosen = pipeline.strategy(strategy)
    out: dict[int, Tensor] = {}
    for seed in dict.fromkeys(one for one, _ in seeds):
        places = [i for i, (own, _) in enumerate(seeds) if own == seed]
        branches = sampling.branches
        index = [branch * len(seeds) + i for branch in range(branches) for i in places]
        masks = places if len(rows.mask) == len(seeds) else index
        part = Rows(rows.condition[index], rows.mask[masks])
        images = [seeds[i][1] for i in places]
        one = chosen
        if isinstance(strategy, str):  # its window is as long as this batch wants
            one = pipeline.fitted(chosen, len(images), len(images), sampling)
        tokens = pipeline.draw_tokens(part, shape, one, sampling, seed, images, on_progress)
        out.update(zip(places, tokens, strict=True))
    return torch.stack([out[i] for i in range(len(seeds))])


def fresh_seed() -> int:
    """Return a seed drawn from torch's global generator, as the libraries' own loops draw from it."""
    return int(torch.randint(0, 2**31 - 1, (1,)))
