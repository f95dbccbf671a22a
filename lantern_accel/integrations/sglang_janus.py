"""Janus-Pro in SGLang: a pipeline of one stage that owns its loop, with its configuration.

``sglang.py`` registers it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from sglang.multimodal_gen.configs.pipeline_configs.base import ModelTaskType, PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import ComposedPipelineBase
from sglang.multimodal_gen.runtime.pipelines_core.request_utils import normalize_output_seeds
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stages import PipelineStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.hf_diffusers_utils import maybe_download_model

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import ModelError
from lantern_accel.integrations.adapter import Own, durations, figures, settings_in, settings_of

#: Folders of these names are Janus; others need ``--pipeline-class-name JanusPipeline``.
MODELS = ["deepseek-ai/Janus-Pro-1B", "deepseek-ai/Janus-Pro-7B"]
#: What SGLang's API fills in where a request has no size.
NO_SIZE = (1024, 1024)
#: As in the file that registers this one.
SETTINGS = "LANTERN_ACCEL_SGLANG"
#: Options of the server that would change nothing, and are refused.
REFUSED = (
    "quantization", "component_quantizations", "transformer_weights_path", "lora_path",
    "cpu_offload_components", "layerwise_offload_components", "component_residency",
    "enable_torch_compile",
)  # fmt: skip

_log = logging.getLogger("lantern_accel")


@dataclass
class JanusPipelineConfig(PipelineConfig):  # type: ignore[misc]  # a class of SGLang has no types here
    """What SGLang asks of a pipeline. Requests that differ in prompt and seed only are merged."""

    task_type: ModelTaskType = ModelTaskType.T2I
    supports_auto_residency: bool = False

    def supports_disaggregation(self) -> bool:
        return False

    def validate_server_args(self, server_args: ServerArgs) -> None:
        """Raise :class:`ModelError` for a server that is spread over devices, or for :data:`REFUSED`."""
        if (many := server_args.num_gpus) != 1:
            raise ModelError(
                f"the server is spread over {many} devices, and tokens are drawn on one; start it with "
                "--num-gpus 1"
            )
        for name in REFUSED:
            if server_args.is_arg_explicitly_set(name) and getattr(server_args, name):
                option = name.replace("_", "-")
                raise ModelError(f"Janus is served without --{option}; start the server without it")


@dataclass
class JanusSamplingParams(SamplingParams):  # type: ignore[misc]  # as above
    """A request; ``lantern_accel``: what :func:`lantern_accel.generate` takes, such as a strategy."""

    num_inference_steps: int = 1
    guidance_scale: float = 5.0
    negative_prompt: str = ""
    lantern_accel: dict[str, object] = field(default_factory=dict)

    @classmethod
    def image_request_extra_fields(cls) -> frozenset[str]:
        return frozenset({"lantern_accel"})


class JanusStage(PipelineStage):  # type: ignore[misc]  # as above
    """Prompts in, images out; a merged request has several prompts."""

    def __init__(self, ours: Own) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, batch: Req, server_args: ServerArgs) -> OutputBatch:
        """Generate a request's images; raises :class:`RequestError` for what it cannot have."""
        prompts = batch.prompt if isinstance(batch.prompt, list) else [batch.prompt]
        given = batch.extra.get("dynamic_batch_seeds") or [batch.seed]
        many, seen = max(1, int(batch.num_outputs_per_prompt or 1)), 0
        seeds = [
            [seed % SEEDS for seed in normalize_output_seeds(one, num_outputs_per_prompt=many)]
            for one in given
        ]
        with self.progress_bar(batch=batch, unit="token") as bar:

            def report_progress(known: int, total: int) -> None:
                nonlocal seen
                bar.total = total
                bar.update(known - seen)
                seen = known

            done = self.ours.generate_images(
                prompts, seeds, self._read_settings(batch), report_progress
            )
        self.log_info("%s", figures(done))
        if batch.metrics is not None:
            for name, seconds in durations(done, "JanusStage").items():
                batch.metrics.record_stage(name, seconds)
        return OutputBatch(
            output=[np.asarray(one) for one in done.images],
            metrics=batch.metrics,
            usage={"completion_tokens": done.tokens.numel(), **figures(done)},
        )

    def _read_settings(self, batch: Req) -> dict[str, object]:
        """Return a request's settings."""
        asked = {"cfg_scale": batch.guidance_scale, **settings_of(batch.lantern_accel)}
        if batch.negative_prompt:
            asked["negative_prompt"] = batch.negative_prompt
        size = (batch.width, batch.height)
        if None not in size and size != NO_SIZE and not batch.is_warmup:
            asked["size"] = size
        return asked


class JanusPipeline(ComposedPipelineBase):  # type: ignore[misc]  # as above
    """Janus-Pro; its weights are not SGLang's components, so that it neither moves nor changes them."""

    pipeline_name = "JanusPipeline"

    def load_modules(
        self, server_args: ServerArgs, loaded_modules: object = None
    ) -> dict[str, object]:
        """Open the folder on the device of this process."""
        folder = maybe_download_model(self.model_path, revision=server_args.revision)
        self.ours = Own.on(folder, str(get_local_torch_device()), **settings_in(SETTINGS))
        return {}

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        self.add_stage(JanusStage(self.ours))


@cache
def register() -> None:
    """Register the pipeline, once in a process; another package's of this name stays."""
    try:
        register_pipeline(
            JanusPipeline,
            sampling_param_cls=JanusSamplingParams,
            pipeline_config_cls=JanusPipelineConfig,
            hf_model_paths=MODELS,
        )
    except ValueError as error:
        _log.warning("SGLang serves Janus-Pro without lantern-accel: %s", error)
