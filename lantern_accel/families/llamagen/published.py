"""LlamaGen's published models, LANTERN's drafters for them, and flan-t5."""

from __future__ import annotations

from lantern_accel.families.published import (
    GB,
    MB,
    ModelEntry,
    drafter_entry,
    repo_files,
)

_MIT = {"licence": "MIT", "licence_url": "https://github.com/FoundationVision/LlamaGen"}
_CLASSES, _TEXT = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"


def _c2i(size: str, pixels: int, nbytes: float, *, estimated: bool = False) -> ModelEntry:
    path = f"c2i_{size}_{pixels}.pt"
    return ModelEntry(
        name=f"llamagen-{size.lower()}-{pixels}",
        family="llamagen",
        summary=f"LlamaGen-{size}, ImageNet classes, {pixels} px",
        repo=_CLASSES,
        files=repo_files({path: nbytes}, (path,) if estimated else ()),
        uses=("llamagen-vq-ds16-c2i",),
        config={"size": size, "pixels": pixels, "conditioning": "class"},
        **_MIT,
    )


def _t2i(stage: int, pixels: int, drafter: str) -> tuple[ModelEntry, ModelEntry]:
    """Return a model of text, and its drafter."""
    config = {"size": "XL", "pixels": pixels, "conditioning": "text"}
    stages = "I" * stage
    model = ModelEntry(
        name=f"llamagen-t2i-stage{stage}",
        family="llamagen",
        summary=f"LlamaGen-XL, text, stage {stages}, {pixels} px",
        repo=_TEXT,
        files=repo_files({f"t2i_XL_stage{stage}_{pixels}.pt": 3.11 * GB}),
        uses=("llamagen-vq-ds16-t2i", drafter.replace("_", "-"), "flan-t5-xl"),
        config=config,
        **_MIT,
    )
    return model, drafter_entry(drafter, "llamagen", f"LlamaGen stage {stages}", 178 * MB, config)


def _vq(repo: str, kind: str, downsample: int, nbytes: float, of: str) -> ModelEntry:
    path = f"vq_ds{downsample}_{kind}.pt"
    return ModelEntry(
        name=f"llamagen-vq-ds{downsample}-{kind}",
        kind="vq",
        family="llamagen",
        summary=f"LlamaGen's image tokenizer, {downsample} px a token, {of}",
        repo=repo,
        files=repo_files({path: nbytes}, (path,) if downsample == 8 else ()),
        config={"downsample": downsample},
        **_MIT,
    )


_FIRST, _FIRST_DRAFTER = _t2i(1, 256, "llamagen_drafter")
_SECOND, _SECOND_DRAFTER = _t2i(2, 512, "llamagen2_drafter")
ENTRIES: tuple[ModelEntry, ...] = (
    _c2i("B", 256, 444 * MB),
    _c2i("B", 384, 444 * MB),
    _c2i("L", 256, 1.37 * GB),
    _c2i("L", 384, 1.37 * GB),
    _c2i("XL", 384, 3.10 * GB, estimated=True),
    _c2i("XXL", 384, 5.64 * GB, estimated=True),
    _c2i("3B", 384, 12.4 * GB),
    _FIRST,
    _SECOND,
    _vq(_CLASSES, "c2i", 16, 288 * MB, "class-conditional models"),
    _vq(_CLASSES, "c2i", 8, 281 * MB, "no published GPT draws its codes"),
    _vq(_TEXT, "t2i", 16, 288 * MB, "text-conditional models"),
    _FIRST_DRAFTER,
    _SECOND_DRAFTER,
    ModelEntry(
        name="flan-t5-xl",
        kind="text",
        family="llamagen",
        summary="flan-T5-XL, whose encoder reads LlamaGen's captions",
        repo="google/flan-t5-xl",
        files=repo_files(
            {
                "config.json": 1440,
                "model.safetensors.index.json": 53_000,
                "model-00001-of-00002.safetensors": 9.45 * GB,
                "model-00002-of-00002.safetensors": 1.95 * GB,
                "tokenizer.json": 2.42 * MB,
                "tokenizer_config.json": 2500,
                "special_tokens_map.json": 2200,
            },
            ("tokenizer_config.json", "special_tokens_map.json"),
        ),
        config={"encoder_parameters": 1_223_527_424},
        licence="Apache-2.0",
        licence_url="https://huggingface.co/google/flan-t5-xl",
    ),
)
