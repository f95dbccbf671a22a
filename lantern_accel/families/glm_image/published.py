"""GLM-Image as published: the prior and its tokenizer; the diffusion half is diffusers' to load."""

from __future__ import annotations

from lantern_accel.families.published import GB, MB, ModelEntry, estimated_files

#: The prior's file in bfloat16 by its parameters, vision tower and picture tokenizer included.
_PRIOR = 20.23 * GB
_SHARDS = (f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6))
#: By path in the folder of the prior.
_PRIOR_FILES: dict[str, float] = {
    "config.json": 2500,
    "generation_config.json": 200,
    "model.safetensors.index.json": 70_000,
    **dict.fromkeys(_SHARDS, _PRIOR / 5),
}

ENTRIES: tuple[ModelEntry, ...] = (
    ModelEntry(
        name="glm-image",
        family="glm_image",
        summary="GLM-Image's prior, text, sizes that are multiples of 32 px",
        repo="zai-org/GLM-Image",
        files=estimated_files(
            {
                "model_index.json": 600,
                **{f"vision_language_encoder/{name}": n for name, n in _PRIOR_FILES.items()},
                "processor/tokenizer.json": 21 * MB,
                "processor/tokenizer_config.json": 3_000_000,
            }
        ),
        # About 7 billion parameters in bfloat16, by the model card; its file was not seen.
        config={"beside": {"the diffusion half": 14 * GB}},
        licence="MIT",
        licence_url="https://huggingface.co/zai-org/GLM-Image",
    ),
)
