"""Anole and Lumina-mGPT as published, Chameleon's tokenizers, and LANTERN's drafter for Anole."""

from __future__ import annotations

from lantern_accel.families.published import (
    CHAMELEON_LICENCE,
    GB,
    MB,
    ModelEntry,
    drafter_entry,
    repo_file,
)


def _lumina(pixels: int) -> ModelEntry:
    shards = (
        ("model-00001-of-00002.safetensors", 9.98),
        ("model-00002-of-00002.safetensors", 4.05),
    )
    tokenizer = ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
    sizes = (130, 5.63 * MB, 2.92 * MB)
    return ModelEntry(
        name=f"lumina-mgpt-7b-{pixels}",
        kind="model",
        family="chameleon",
        summary=f"Lumina-mGPT-7B, text, {pixels} px",
        repo=f"Alpha-VLLM/Lumina-mGPT-7B-{pixels}",
        files=(
            repo_file("config.json", 1.71 * MB),
            repo_file("model.safetensors.index.json", 34_400),
            *(repo_file(name, size * GB) for name, size in shards),
            # The 512 and 1024 repositories have no tokenizer: Meta's serves all.
            *(repo_file(n, s) for n, s in zip(tokenizer, sizes, strict=True) if pixels == 768),
        ),
        uses=("chameleon-vq",),
        config={"variant": "lumina", "pixels": pixels},
        **CHAMELEON_LICENCE,
    )


ENTRIES: tuple[ModelEntry, ...] = (
    ModelEntry(
        name="anole-7b",
        kind="model",
        family="chameleon",
        summary="Anole-7B, text, 512 px, original layout",
        repo="GAIR/Anole-7b-v0.1",
        files=(
            repo_file("models/7b/consolidated.pth", 14.0 * GB),
            repo_file("models/7b/params.json", 1000, estimated=True),
            repo_file("models/7b/consolidate_params.json", 1000, estimated=True),
        ),
        uses=("chameleon-vq", "anole-drafter"),
        config={"variant": "anole", "pixels": 512},
        **CHAMELEON_LICENCE,
    ),
    ModelEntry(
        name="anole-7b-hf",
        kind="model",
        family="chameleon",
        summary="Anole-7B, text, 512 px, Hugging Face layout",
        repo="leloy/Anole-7b-v0.1-hf",
        files=(
            repo_file("config.json", 1.71 * MB),
            repo_file("model.safetensors.index.json", 60_700),
            repo_file("model-00001-of-00003.safetensors", 4.99 * GB),
            repo_file("model-00002-of-00003.safetensors", 4.99 * GB),
            repo_file("model-00003-of-00003.safetensors", 4.32 * GB),
            repo_file("tokenizer.json", 5.63 * MB),
        ),
        uses=("chameleon-vq", "anole-drafter"),
        config={"variant": "anole", "pixels": 512},
        **CHAMELEON_LICENCE,
    ),
    _lumina(512),
    _lumina(768),
    _lumina(1024),
    ModelEntry(
        name="chameleon-vq",
        kind="vq",
        family="chameleon",
        summary="Chameleon's image tokenizer and text tokenizer, 16 px a token",
        repo="GAIR/Anole-7b-v0.1",
        files=(
            repo_file("tokenizer/text_tokenizer.json", 5.6 * MB, estimated=True),
            repo_file("tokenizer/vqgan.yaml", 1000, estimated=True),
            repo_file("tokenizer/vqgan.ckpt", 281 * MB, estimated=True),
        ),
        config={"downsample": 16},
        **CHAMELEON_LICENCE,
    ),
    drafter_entry("anole_drafter", "chameleon", "Anole-7B", 2.02 * GB, {"variant": "anole"}),
)
