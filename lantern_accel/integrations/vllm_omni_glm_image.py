"""GLM-Image for vLLM-Omni as one stage: our prior, then the release's painting by vLLM-Omni's pipeline.

``vllm_omni.py`` registers it.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.glm_image.pipeline_glm_image import GlmImagePipeline as Theirs
from vllm_omni.diffusion.models.glm_image.pipeline_glm_image import get_glm_image_post_process_func
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.errors import OmniClientError

from lantern_accel.errors import RequestError
from lantern_accel.families.glm_image.grids import PIXELS, grid_of, prior_token_ids
from lantern_accel.integrations.vllm_omni import open_model, seeds_of, stop_if_cancelled, text_of

__all__ = ["GlmImagePipeline", "get_glm_image_post_process_func"]  # where the registry looks

_log = logging.getLogger("lantern_accel")


class GlmImagePipeline(Theirs):  # type: ignore[misc]  # a class of vLLM-Omni has no types here
    """GLM-Image: prompts in, images out; the folder has the prior and its processor.

    A request with its own ``prior_token_ids`` is painted only, as by vLLM-Omni.
    """

    supports_request_cancellation = True

    def __init__(self, *, od_config: object, prefix: str = "") -> None:
        ours = open_model(od_config)
        super().__init__(od_config=od_config, prefix=prefix)
        self.ours = ours

    def forward(self, req: DiffusionRequestBatch) -> object:
        """Decode the priors of a request's images in one batch, then paint one after another."""
        request = req.requests[0]
        params, prompt = request.sampling_params, request.prompt
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        known = {**params.extra_args, **(given.get("extra") or {})}
        if req.is_dummy_run() or "prior_token_ids" in known:
            return super().forward(req)
        usual = self.default_sample_size * self.vae_scale_factor
        width, height = (  # rounded down, as between vLLM-Omni's two stages
            (given.get(name) or getattr(params, name) or usual) // PIXELS * PIXELS
            for name in ("width", "height")
        )
        seeds = seeds_of(params)
        try:
            if given.get("multi_modal_data"):
                raise RequestError("images as input are not supported; leave them out")
            rows, columns = grid_of(width, height, "the prior")
            drawn = self.ours.generate_prompts(
                [text_of(prompt)] * len(seeds),
                (width, height),
                [(one, 0) for one in seeds],
                stop_if_cancelled,
            )
        except RequestError as error:
            return DiffusionOutput.from_exception(OmniClientError(str(error)))
        _log.info("prior: %s", drawn)
        painted = []
        for seed, ids in zip(seeds, prior_token_ids(drawn.tokens, rows, columns), strict=True):
            stop_if_cancelled()
            one, own = copy.copy(request), copy.copy(params)
            own.seed, own.num_outputs_per_prompt = seed, 1
            one.prompt = {
                **given, "width": width, "height": height, "extra": {"prior_token_ids": ids}
            }  # fmt: skip
            one.sampling_params = own
            painted.append(super().forward(type(req)(requests=[one])))
        done = painted[-1]
        done.output = torch.cat([one.output for one in painted])
        own_times = done.stage_durations or {}  # of the last image
        done.stage_durations = {**own_times, "GlmImagePipeline.prior": drawn.seconds}
        return done
