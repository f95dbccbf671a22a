"""Janus as published: where its files are, and the sizes of its Llamas."""

from __future__ import annotations

from typing import Any

from lantern_accel.families.published import GB, MB, ModelEntry, repo_files

_LICENCE = {
    "licence": "DeepSeek Model License 1.0 (use-based restrictions)",
    "licence_url": "https://github.com/deepseek-ai/Janus/blob/main/LICENSE-MODEL",
}
_SMALL = {"dim": 2048, "n_layer": 24, "n_head": 16, "ffn_dim": 5632}
_LARGE = {"dim": 4096, "n_layer": 30, "n_head": 32, "ffn_dim": 11008}
_LARGE_FILES = {
    "pytorch_model.bin.index.json": 90_000,
    "pytorch_model-00001-of-00002.bin": 9.99 * GB,
    "pytorch_model-00002-of-00002.bin": 4.85 * GB,
}


def _janus(
    name: str, variant: str, target: dict[str, int], weights: dict[str, float]
) -> ModelEntry:
    files = {"config.json": 1500, **weights, "tokenizer.json": 4.7 * MB}
    config: dict[str, Any] = {"variant": variant, "target": target}
    return ModelEntry(
        name=name.lower(),
        family="janus",
        summary=f"{name}, text, 384 px",
        repo=f"deepseek-ai/{name}",
        files=repo_files(files, ("config.json", "tokenizer.json")),
        config=config,
        **_LICENCE,
    )


ENTRIES: tuple[ModelEntry, ...] = (
    _janus("Janus-Pro-1B", "pro", _SMALL, {"pytorch_model.bin": 4.18 * GB}),
    _janus("Janus-Pro-7B", "pro", _LARGE, _LARGE_FILES),
    _janus("Janus-1.3B", "1.3b", _SMALL, {"model.safetensors": 4.18 * GB}),
)
