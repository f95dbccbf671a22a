"""Pipelines for vLLM-Omni, in one stage that owns its loop: Janus-Pro here, GLM-Image in the next file.

A stage names one by its dotted name: ``load_format="custom_pipeline"`` and ``custom_pipeline_args=
{"pipeline_class": "lantern_accel.integrations.vllm_omni.JanusPipeline"}``. Settings of ours stand there
under ``lantern_accel``, and in a request's ``extra_args`` under the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.releases import require
from lantern_accel.generation.result import GenerationResult
from lantern_accel.integrations.adapter import Own, durations, figures, settings_of

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

#: What model files call their class, and vLLM-Omni has no pipeline for.
JANUS = ("JanusForConditionalGeneration", "MultiModalityCausalLM")
#: GLM-Image in one stage, as a deploy file's ``pipeline`` names it; vLLM-Omni's own has two.
GLM_IMAGE = "lantern_glm_image"

_log = logging.getLogger("lantern_accel")


def plugin() -> None:
    """Register both; the entry point in ``vllm_omni.general_plugins``, called in every process."""
    try:
        require("vllm-omni")
    except ModelError as error:
        return _log.warning("vLLM-Omni has no pipelines of lantern-accel: %s", error)
    from vllm_omni.config.pipeline_registry import register_pipeline
    from vllm_omni.config.stage_config import (
        PipelineConfig,
        StageExecutionType,
        StagePipelineConfig,
    )
    from vllm_omni.diffusion.registry import register_diffusion_model

    for name in JANUS:
        register_diffusion_model(name, __name__, "JanusPipeline")
    register_diffusion_model(
        GLM_IMAGE,
        f"{__name__}_glm_image",
        "GlmImagePipeline",
        post_process_func_name="get_glm_image_post_process_func",
    )
    stage = StagePipelineConfig(
        stage_id=0,
        model_stage="diffusion",
        execution_type=StageExecutionType.DIFFUSION,
        final_output=True,
        final_output_type="image",
        model_arch=GLM_IMAGE,
    )
    register_pipeline(PipelineConfig(model_type=GLM_IMAGE, stages=(stage,)))


def open_model(od_config: OmniDiffusionConfig) -> Own:
    """Open our model of a stage's folder, on its device and in its dtype."""
    require("vllm-omni")
    if (ranks := od_config.parallel_config.world_size) != 1:
        raise ModelError(
            f"the stage is spread over {ranks} devices, and tokens are sampled on one; set the sizes of "
            "its parallel_config to 1"
        )
    from vllm_omni.diffusion.distributed.utils import get_local_device
    from vllm_omni.model_executor.model_loader.weight_utils import download_weights_from_hf_specific

    folder = od_config.model
    if not Path(folder).exists():
        folder = download_weights_from_hf_specific(folder, od_config.revision, ["*"])
    given = settings_of((od_config.custom_pipeline_args or {}).get("lantern_accel"))
    dtype = str(od_config.dtype).removeprefix("torch.")
    return Own.on(folder, str(get_local_device()), dtype, **given)


def seeds_of(params: OmniDiffusionSamplingParams) -> list[int]:
    """Return a seed for each image of a request: its own, and those that follow."""
    given, count = params.generator, max(1, params.num_outputs_per_prompt)
    if isinstance(given, list):
        return [one.initial_seed() % SEEDS for one in given]
    seed = given.initial_seed() if params.seed is None else params.seed
    return [(seed + i) % SEEDS for i in range(count)]


def text_of(prompt: str | Mapping[str, str]) -> str:
    """Return the text of a prompt, which vLLM-Omni writes as a string or a dict."""
    return prompt if isinstance(prompt, str) else prompt.get("prompt") or ""


def stop_if_cancelled(*_: int) -> None:
    """Raise vLLM-Omni's error for a request that nobody waits for any more."""
    from vllm_omni.diffusion.cancellation import check_request_cancellation

    check_request_cancellation()


class JanusPipeline(nn.Module):
    """Janus-Pro: prompts in, images out; vLLM-Omni's diffusion stages call it.

    Requests that wait together are generated together. Raises :class:`ModelError` for a stage that is
    quantized, spread over devices, offloaded, or given an adapter.
    """

    supports_request_batch = True
    supports_request_cancellation = True

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        for name in ("quantization_config", "lora_path", "enable_cpu_offload"):
            if getattr(od_config, name, None):
                raise ModelError(f"Janus is served without {name}; leave it out of the stage")
        self.ours = open_model(od_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load nothing: the weights were read when the pipeline was made."""
        return set()

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Return a ``DiffusionOutput`` for each request; what one cannot have is its error alone."""
        from vllm_omni.diffusion.data import DiffusionOutput
        from vllm_omni.errors import OmniClientError

        try:
            done = self._generate(req.requests, dummy=req.is_dummy_run())
        except RequestError as error:
            if req.num_reqs > 1:
                return [self.forward(type(req)(requests=[one]))[0] for one in req.requests]
            return [DiffusionOutput.from_exception(OmniClientError(str(error)))]
        many = done.columns
        return [
            DiffusionOutput(
                output={
                    "payload": {"image": done.images[i * many : (i + 1) * many]},
                    "metadata": {"lantern_accel": figures(done)},
                },
                stage_durations=durations(done, "JanusPipeline"),
            )
            for i in range(req.num_reqs)
        ]

    def _generate(self, requests: Sequence[OmniDiffusionRequest], dummy: bool) -> GenerationResult:
        """Generate requests of one number of images, one guidance and one negative prompt."""
        asked = [{} if dummy else self._read_settings(one) for one in requests]
        seeds = [seeds_of(one.sampling_params) for one in requests]
        if any(one != asked[0] for one in asked) or len({len(one) for one in seeds}) > 1:
            raise RequestError(
                "requests that differ in more than prompt and seed are decoded apart"
            )
        texts = [text_of(one.prompt) for one in requests]
        return self.ours.generate_images(texts, seeds, asked[0], stop_if_cancelled)

    def _read_settings(self, request: OmniDiffusionRequest) -> dict[str, object]:
        """Return a request's settings; raises :class:`RequestError` for what it cannot have."""
        params = request.sampling_params
        prompt = {} if isinstance(request.prompt, str) else request.prompt
        if prompt.get("multi_modal_data"):
            raise RequestError("images as input are not supported; leave them out")
        if getattr(params, "lora_request", None) is not None:
            raise RequestError("adapters (lora) are not supported; leave them out")
        asked = settings_of((params.extra_args or {}).get("lantern_accel"))
        if params.guidance_scale_provided:
            asked.setdefault("cfg_scale", params.guidance_scale)
        if prompt.get("negative_prompt"):
            asked["negative_prompt"] = prompt["negative_prompt"]
        if params.width is not None and params.height is not None and not params.width_not_provided:
            asked["size"] = (params.width, params.height)
        return asked
