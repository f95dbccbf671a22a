"""LlamaGen's published models, LANTERN's drafters for them, and flan-t5."""

from __future__ import annotations

from lantern_accel.families.published import GB, MB, ModelEntry, drafter_entry, repo_file

_MIT = {"licence": "MIT", "licence_url": "https://github.com/FoundationVision/LlamaGen"}


def _c2i(size: str, pixels: int, nbytes: float, *, estimated: bool = False) -> ModelEntry:
    return ModelEntry(
        name=f"llamagen-{size.lower()}-{pixels}",
        kind="model",
        family="llamagen",
        summary=f"LlamaGen-{size}, ImageNet classes, {pixels} px",
        repo="FoundationVision/LlamaGen",
        files=(repo_file(f"c2i_{size}_{pixels}.pt", nbytes, estimated=estimated),),
        uses=("llamagen-vq-ds16-c2i",),
        config={"size": size, "pixels": pixels, "conditioning": "class"},
        **_MIT,
    )


def _t2i(stage: int, pixels: int, drafter: str) -> ModelEntry:
    return ModelEntry(
        name=f"llamagen-t2i-stage{stage}",
        kind="model",
        family="llamagen",
        summary=f"LlamaGen-XL, text, stage {'I' * stage}, {pixels} px",
        repo="peizesun/llamagen_t2i",
        files=(repo_file(f"t2i_XL_stage{stage}_{pixels}.pt", 3.11 * GB),),
        uses=("llamagen-vq-ds16-t2i", drafter, "flan-t5-xl"),
        config={"size": "XL", "pixels": pixels, "conditioning": "text"},
        **_MIT,
    )


def _vq(name: str, repo: str, path: str, nbytes: float, of: str, downsample: int) -> ModelEntry:
    return ModelEntry(
        name=name,
        kind="vq",
        family="llamagen",
        summary=f"LlamaGen's image tokenizer, {downsample} px a token, {of}",
        repo=repo,
        files=(repo_file(path, nbytes, estimated="ds8" in path),),
        config={"downsample": downsample},
        **_MIT,
    )


ENTRIES: tuple[ModelEntry, ...] = (
    _c2i("B", 256, 444 * MB),
    _c2i("B", 384, 444 * MB),
    _c2i("L", 256, 1.37 * GB),
    _c2i("L", 384, 1.37 * GB),
    _c2i("XL", 384, 3.10 * GB, estimated=True),
    _c2i("XXL", 384, 5.64 * GB, estimated=True),
    _c2i("3B", 384, 12.4 * GB),
    _t2i(1, 256, "llamagen-drafter"),
    _t2i(2, 512, "llamagen2-drafter"),
    _vq(
        "llamagen-vq-ds16-c2i",
        "FoundationVision/LlamaGen",
        "vq_ds16_c2i.pt",
        288 * MB,
        "class-conditional models",
        16,
    ),
    _vq(
        "llamagen-vq-ds8-c2i",
        "FoundationVision/LlamaGen",
        "vq_ds8_c2i.pt",
        281 * MB,
        "no published GPT draws its codes",
        8,
    ),
    _vq(
        "llamagen-vq-ds16-t2i",
        "peizesun/llamagen_t2i",
        "vq_ds16_t2i.pt",
        288 * MB,
        "text-conditional models",
        16,
    ),
    drafter_entry(
        "llamagen_drafter",
        "llamagen",
        "LlamaGen stage I",
        178 * MB,
        {"size": "XL", "pixels": 256, "conditioning": "text"},
    ),
    drafter_entry(
        "llamagen2_drafter",
        "llamagen",
        "LlamaGen stage II",
        178 * MB,
        {"size": "XL", "pixels": 512, "conditioning": "text"},
    ),
    ModelEntry(
        name="flan-t5-xl",
        kind="text",
        family="llamagen",
        summary="flan-T5-XL, whose encoder reads LlamaGen's captions",
        repo="google/flan-t5-xl",
        files=(
            repo_file("config.json", 1440),
            repo_file("model.safetensors.index.json", 53_000),
            repo_file("model-00001-of-00002.safetensors", 9.45 * GB),
            repo_file("model-00002-of-00002.safetensors", 1.95 * GB),
            repo_file("tokenizer.json", 2.42 * MB),
            repo_file("tokenizer_config.json", 2500, estimated=True),
            repo_file("special_tokens_map.json", 2200, estimated=True),
        ),
        config={"encoder_parameters": 1_223_527_424},
        licence="Apache-2.0",
        licence_url="https://huggingface.co/google/flan-t5-xl",
    ),
)
