"""GLM-Image's prior in SGLang: an entry point of its plug-ins, and the hooks that it registers.

SGLang calls :func:`plugin` in each of its processes. The autoregressive stage then decodes its prior with
lantern-accel, in its process and around its module; what cannot be decoded goes through SGLang's own
loop, with one line in its log. Janus-Pro, in the next file, is registered with what SGLang has from
outside.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import DoesNotFitError, LanternError
from lantern_accel.families.glm_image.grids import grid_of, prior_token_ids
from lantern_accel.families.releases import require
from lantern_accel.integrations.adapter import SampledTokens, fresh_seeds, settings_in
from lantern_accel.integrations.glm_image import sample_prior
from lantern_accel.integrations.transformers import decoder_of

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image import (
        GlmImageAR,
    )
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

#: The stage whose methods are hooked.
STAGE = (
    "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image.GlmImageAR"
)
#: What SGLang calls before it looks for pipelines from outside.
EXTERNAL = "sglang.multimodal_gen.runtime.utils.external_model_package.load_external_model_package"
#: A JSON object: ``strategy``, and fields of ``Sampling`` that win over the model's own.
SETTINGS = "LANTERN_ACCEL_SGLANG"

#: Codes of an image, codes of given images, and the usage of another server.
Prior = tuple[Tensor, Tensor | None, object]

_log = logging.getLogger("lantern_accel")


def plugin() -> None:
    """Register the hooks; the entry point in ``sglang.multimodal_gen.plugins``.

    Of a release outside the tested range nothing is hooked, and a line says so.
    """
    try:
        for library in ("sglang", "transformers"):
            require(library)
        settings_in(SETTINGS)
    except LanternError as error:
        return _log.warning("SGLang decodes without lantern-accel: %s", error)
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    HookRegistry.register(f"{STAGE}.generate_prior_tokens", _prior, HookType.REPLACE)
    HookRegistry.register(f"{STAGE}.forward", _forward, HookType.AROUND)
    HookRegistry.register(EXTERNAL, _janus, HookType.AFTER)


def _janus(_: None) -> None:
    """Register Janus-Pro where SGLang loads what is not its own; its registry is not imported before."""
    from lantern_accel.integrations import sglang_janus

    sglang_janus.register()


@dataclass
class _ImageSeeds:
    """The seeds of a request's images, and what was sampled: codes by seed, and the batches."""

    seeds: list[int]
    codes: dict[int, Tensor] = field(default_factory=dict)
    drawn: list[SampledTokens] = field(default_factory=list)


_request: ContextVar[_ImageSeeds | None] = ContextVar("lantern_accel_sglang", default=None)


def _forward(
    own: Callable[..., OutputBatch], stage: GlmImageAR, batch: Req, server_args: ServerArgs
) -> OutputBatch:
    """Note a request's seeds, so that its images are generated together, and afterwards its figures."""
    count = max(1, int(batch.num_outputs_per_prompt or 1))
    first, *more = batch.seed if isinstance(batch.seed, list) and batch.seed else [batch.seed]
    follow = [] if first is None else [first, *more, *range(first + 1 + len(more), first + count)]
    request = _ImageSeeds([int(one) for one in follow[:count]])
    mark = _request.set(request)
    try:
        return own(stage, batch, server_args)
    finally:
        _request.reset(mark)
        if seconds := sum(one.seconds for one in request.drawn):
            speed = sum(one.tokens.numel() for one in request.drawn) / seconds
            said = {"prior_seconds": seconds, "prior_tokens_per_second": speed}
            batch.extra["lantern_accel"] = said
            if batch.metrics is not None:
                batch.metrics.record_stage("lantern_accel.prior", seconds)


def _prior(
    stage: GlmImageAR,
    prompt: str,
    height: int,
    width: int,
    server_args: ServerArgs,
    image: object = None,
    seed: int | None = None,
) -> Prior:
    """Stand for ``GlmImageAR.generate_prior_tokens``: codes of an image's 16-pixel cells, int64
    ``[1, 4HW]``, and None for the rest.
    """
    module = stage.vision_language_encoder
    if server_args.srt_encoder_url is not None or not isinstance(module, nn.Module):
        why = "another server has its weights"
    elif image:
        why = "images as input are not supported"
    else:
        try:
            rows, columns = grid_of(width, height, "the prior")
            codes = _codes(stage, prompt, (width, height), seed)
            ids = prior_token_ids(codes[None], rows, columns)
            return ids.to(next(module.parameters()).device), None, None
        except LanternError as error:
            why = str(error)
    _log.warning("SGLang decodes this prior itself: %s", why)
    plain: Callable[..., Prior] = inspect.unwrap(type(stage).generate_prior_tokens)
    return plain(stage, prompt, height, width, server_args, image=image, seed=seed)


@torch.no_grad()
def _codes(stage: GlmImageAR, prompt: str, size: tuple[int, int], seed: int | None) -> Tensor:
    """Return an image's codes, ``[N]``, sampled with those that the request will ask for next."""
    request = _request.get() or _ImageSeeds([])
    ours = decoder_of(stage.vision_language_encoder, **settings_in(SETTINGS))

    def generate(seeds: list[tuple[int, int]]) -> Tensor:
        drawn = sample_prior(ours, stage.processor, [prompt] * len(seeds), size, seeds)
        request.drawn.append(drawn)
        _log.info("prior: %s; weights: %s", drawn, ours.memory)
        return drawn.tokens

    if seed is None:
        return generate(fresh_seeds(1))[0]
    if seed not in request.codes:
        wanted = [*dict.fromkeys((seed, *request.seeds))]
        try:
            made = generate([(one % SEEDS, 0) for one in wanted])
        except DoesNotFitError:  # all at once
            wanted, made = [seed], generate([(seed % SEEDS, 0)])
        request.codes.update(zip(wanted, made, strict=True))
    return request.codes[seed]
