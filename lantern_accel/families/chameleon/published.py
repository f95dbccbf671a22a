"""Anole and Lumina-mGPT as published, Chameleon's tokenizers, and LANTERN's drafter for Anole."""

from __future__ import annotations

from lantern_accel.families.published import (
    CHAMELEON_LICENCE,
    GB,
    MB,
    ModelEntry,
    RepoFile,
    drafter_entry,
    estimated_files,
    repo_files,
)


def _model(
    name: str, summary: str, repo: str, pixels: int, files: tuple[RepoFile, ...]
) -> ModelEntry:
    variant = "anole" if name.startswith("anole") else "lumina"
    return ModelEntry(
        name=name,
        family="chameleon",
        summary=summary,
        repo=repo,
        files=files,
        uses=("chameleon-vq", "anole-drafter")[: 2 if variant == "anole" else 1],
        config={"variant": variant, "pixels": pixels},
        **CHAMELEON_LICENCE,
    )


def _lumina(pixels: int) -> ModelEntry:
    files = {
        "config.json": 1.71 * MB,
        "model.safetensors.index.json": 34_400,
        "model-00001-of-00002.safetensors": 9.98 * GB,
        "model-00002-of-00002.safetensors": 4.05 * GB,
    }
    if pixels == 768:  # the 512 and 1024 repositories have no tokenizer: Meta's serves all
        files |= {
            "special_tokens_map.json": 130,
            "tokenizer.json": 5.63 * MB,
            "tokenizer_config.json": 2.92 * MB,
        }
    name = f"Lumina-mGPT-7B-{pixels}"
    summary = f"Lumina-mGPT-7B, text, {pixels} px"
    return _model(name.lower(), summary, f"Alpha-VLLM/{name}", pixels, repo_files(files))


ENTRIES: tuple[ModelEntry, ...] = (
    _model(
        "anole-7b",
        "Anole-7B, text, 512 px, original layout",
        "GAIR/Anole-7b-v0.1",
        512,
        repo_files(
            {
                "models/7b/consolidated.pth": 14.0 * GB,
                "models/7b/params.json": 1000,
                "models/7b/consolidate_params.json": 1000,
            },
            ("models/7b/params.json", "models/7b/consolidate_params.json"),
        ),
    ),
    _model(
        "anole-7b-hf",
        "Anole-7B, text, 512 px, Hugging Face layout",
        "leloy/Anole-7b-v0.1-hf",
        512,
        repo_files(
            {
                "config.json": 1.71 * MB,
                "model.safetensors.index.json": 60_700,
                "model-00001-of-00003.safetensors": 4.99 * GB,
                "model-00002-of-00003.safetensors": 4.99 * GB,
                "model-00003-of-00003.safetensors": 4.32 * GB,
                "tokenizer.json": 5.63 * MB,
            }
        ),
    ),
    *(_lumina(pixels) for pixels in (512, 768, 1024)),
    ModelEntry(
        name="chameleon-vq",
        kind="vq",
        family="chameleon",
        summary="Chameleon's image tokenizer and text tokenizer, 16 px a token",
        repo="GAIR/Anole-7b-v0.1",
        files=estimated_files(
            {
                "tokenizer/text_tokenizer.json": 5.6 * MB,
                "tokenizer/vqgan.yaml": 1000,
                "tokenizer/vqgan.ckpt": 281 * MB,
            }
        ),
        config={"downsample": 16},
        **CHAMELEON_LICENCE,
    ),
    drafter_entry("anole_drafter", "chameleon", "Anole-7B", 2.02 * GB, {"variant": "anole"}),
)
