"""GLM-Image as published: the prior and its tokenizer; the diffusion half is diffusers' to load."""

from __future__ import annotations

from lantern_accel.families.published import GB, MB, ModelEntry, repo_file

#: The prior's file in bfloat16 by its parameters, vision tower and picture tokenizer included.
_PRIOR = 20.23 * GB

ENTRIES: tuple[ModelEntry, ...] = (
    ModelEntry(
        name="glm-image",
        kind="model",
        family="glm_image",
        summary="GLM-Image's prior, text, sizes that are multiples of 32 px",
        repo="zai-org/GLM-Image",
        files=(
            repo_file("model_index.json", 600, estimated=True),
            repo_file("vision_language_encoder/config.json", 2500, estimated=True),
            repo_file("vision_language_encoder/generation_config.json", 200, estimated=True),
            repo_file(
                "vision_language_encoder/model.safetensors.index.json", 70_000, estimated=True
            ),
            *(
                repo_file(
                    f"vision_language_encoder/model-{i:05d}-of-00005.safetensors",
                    _PRIOR / 5,
                    estimated=True,
                )
                for i in range(1, 6)
            ),
            repo_file("processor/tokenizer.json", 21 * MB, estimated=True),
            repo_file("processor/tokenizer_config.json", 3_000_000, estimated=True),
        ),
        # About 7 billion parameters in bfloat16, by the model card; its file was not seen.
        config={"beside": {"the diffusion half": 14 * GB}},
        licence="MIT",
        licence_url="https://huggingface.co/zai-org/GLM-Image",
    ),
)
