"""The one interface between another library's engine and our decoder.

diffusers, transformers, SGLang and vLLM-Omni stand on it: :class:`Own` opens weights of our own, and
``decoding.Accelerated`` decodes around a module that the library has loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.context import own_context
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.families.base import Rows
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.result import GenerationResult
from lantern_accel.strategy.sampling import named_once
from lantern_accel.strategy.values import Sampling, Strategy


class InterruptedDecodingError(LanternError):
    """Tokens were asked for no longer; what was sampled of them is not an image."""


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a batch, int64 ``[B, N]`` on the host, and the seconds of prefill and decoding."""

    tokens: Tensor
    seconds: float

    def __str__(self) -> str:
        many, each = self.tokens.shape
        speed = f"{self.tokens.numel() / self.seconds:,.0f} tokens/s"
        return f"{many} x {each:,} tokens in {self.seconds:.2f} s, {speed}"


@dataclass
class Adapter:
    """Our decoder as another library's engine calls it; what it is made of is a subclass's matter.

    An engine gives the weights, what tokens are sampled from, a seed and an index for each image, and a
    function that is called while tokens are sampled and that may raise to end it; it gets a
    :class:`SampledTokens`, which ``last`` keeps. ``overrides`` are fields of :class:`Sampling` that win
    over what the engine asks for.
    """

    strategy: str | Strategy = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)
    last: SampledTokens | None = None
    pipeline: Pipeline | None = None

    def generate_rows(
        self,
        rows: Rows,
        shape: Hashable,
        sampling: Sampling,
        seeds: Sequence[tuple[int, int]],
        on_progress: Callable[[int], None] | None = None,
    ) -> SampledTokens:
        """Generate a batch of rows, whatever their seeds.

        ``seeds``: for each image its seed and its index in the request, which fix its randomness.
        ``on_progress`` gets the tokens that are known of the slowest image.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        chosen = pipeline.strategy(self.strategy, tuned_for=(len(seeds), sampling))
        with pipeline.backend.stopwatch() as watch:
            done, _ = pipeline.decode_rows(
                lambda: (rows, shape), chosen, sampling, seeds, on_progress=on_progress
            )
        self.last = SampledTokens(done.tokens, watch.seconds)
        return self.last


@dataclass(kw_only=True)
class Own(Adapter):
    """Our decoder on a model of ours; ``opened``: it is closed with this."""

    pipeline: Pipeline
    opened: bool = False

    @classmethod
    def on(
        cls, weights: str | Path | Pipeline, device: str, dtype: str = "auto",
        strategy: str | Strategy = "auto", **overrides: object,
    ) -> Own:  # fmt: skip
        """Open the weights that an engine names, on its device, or take a pipeline of ours."""
        from lantern_accel.api import load

        if isinstance(weights, Pipeline):
            return cls(strategy, overrides, pipeline=weights)
        pipeline = load(weights, device=device, dtype=dtype)
        return cls(strategy, overrides, pipeline=pipeline, opened=True)

    @own_context()
    def generate_prompts(
        self,
        prompts: Sequence[str],
        size: tuple[int, int],
        seeds: Sequence[tuple[int, int]],
        on_progress: Callable[[int], None] | None = None,
    ) -> SampledTokens:
        """Generate one image of each prompt, ``size`` being width and height in pixels."""
        pipeline = self.pipeline
        made = pipeline.conditions(prompts, size)
        sampling = pipeline.sampling(**self.overrides)
        rows = pipeline.model.family.rows(pipeline.model, made, sampling)
        return self.generate_rows(rows, made.shape, sampling, seeds, on_progress)

    def generate_images(
        self,
        prompts: Sequence[str],
        seeds: Sequence[Sequence[int]],
        asked: Mapping[str, Any],
        on_progress: Callable[[int, int], None],
    ) -> GenerationResult:
        """Generate an image for each seed of each prompt; every prompt has the same number of seeds.

        ``asked``: what :func:`lantern_accel.generate` takes; it wins over what the engine was given.
        What ``on_progress`` raises ends the request, and comes back as it is.
        """
        settings = {"strategy": self.strategy, **self.overrides, **asked}
        settings |= {"num_images": len(seeds[0]), "seed": [one for some in seeds for one in some]}
        return self.pipeline.generate(list(prompts), on_progress=on_progress, **settings)

    def close(self) -> None:
        """Free what was opened."""
        if self.opened:
            self.pipeline.close()


def settings_of(given: object) -> dict[str, Any]:
    """Return settings of ours that an engine passes on; raises :class:`RequestError` for no object."""
    given = given or {}
    if not isinstance(given, dict):
        raise RequestError(f"lantern_accel is {given!r}; make it an object of settings")
    return named_once(given)


def settings_in(variable: str) -> dict[str, Any]:
    """Return what an environment variable asks for; raises :class:`RequestError` for other text."""
    text = os.environ.get(variable) or "{}"
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return named_once(found)
    raise RequestError(
        f"{variable} is {text!r}; make it a JSON object, such as "
        '{"strategy": "scd", "temperature": 0.9}'
    )


def durations(done: GenerationResult, name: str) -> dict[str, float]:
    """Return the seconds of both halves of a call, under the name of what drew them."""
    spent = done.stats.seconds
    return {f"{name}.prior": spent.prefill + spent.decode, f"{name}.pixels": spent.pixels}


def figures(done: GenerationResult) -> dict[str, float | None]:
    """Return what people compare; tokens a second are those of the prior alone."""
    return {
        "prior_tokens_per_second": done.stats.tokens_per_second,
        "seconds_per_image": done.stats.seconds.total / len(done.images),
    }


def fresh_seeds(count: int) -> list[tuple[int, int]]:
    """Return seeds of images, taken from torch's global generator as the libraries' own loops do."""
    seed = int(torch.randint(0, 2**31 - 1, (1,)))
    return [(seed, i) for i in range(count)]
