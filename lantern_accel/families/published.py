"""Every published model by name, as data: where its files are, how large, and under which licence.

File sizes are those that the repositories list, rounded as they are there; where no listing was seen,
they are computed from the parameters and marked ``estimated``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lantern_accel.errors import ModelError, did_you_mean

Kind = Literal["model", "drafter", "vq", "text"]
MB, GB = 10**6, 10**9


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RepoFile(_Data):
    """One file of a repository on the Hugging Face Hub."""

    path: str
    nbytes: int = Field(ge=0)
    estimated: bool = False


class ModelEntry(_Data):
    """A published model, or a part that models share.

    ``uses`` names the entries of the parts beside the model's own weights. ``config`` is for the
    family, which alone understands it.
    """

    name: str
    kind: Kind
    family: str
    summary: str
    repo: str
    files: tuple[RepoFile, ...]
    licence: str
    licence_url: str
    uses: tuple[str, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its own files."""
        return sum(file.nbytes for file in self.files)

    @property
    def estimated(self) -> bool:
        """Whether a size is computed rather than listed."""
        return any(file.estimated and file.nbytes > MB for file in self.files)


_MIT = {"licence": "MIT", "licence_url": "https://github.com/FoundationVision/LlamaGen"}
_CHAMELEON = {
    "licence": "Chameleon Research License (non-commercial)",
    "licence_url": "https://ai.meta.com/resources/models-and-libraries/chameleon-license",
}


def _file(path: str, nbytes: float, *, estimated: bool = False) -> RepoFile:
    return RepoFile(path=path, nbytes=int(nbytes), estimated=estimated)


def _c2i(size: str, pixels: int, nbytes: float, *, estimated: bool = False) -> ModelEntry:
    return ModelEntry(
        name=f"llamagen-{size.lower()}-{pixels}",
        kind="model",
        family="llamagen",
        summary=f"LlamaGen-{size}, ImageNet classes, {pixels} px",
        repo="FoundationVision/LlamaGen",
        files=(_file(f"c2i_{size}_{pixels}.pt", nbytes, estimated=estimated),),
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
        files=(_file(f"t2i_XL_stage{stage}_{pixels}.pt", 3.11 * GB),),
        uses=("llamagen-vq-ds16-t2i", drafter, "flan-t5-xl"),
        config={"size": "XL", "pixels": pixels, "conditioning": "text"},
        **_MIT,
    )


def _drafter(name: str, family: str, of: str, nbytes: float, config: dict[str, Any]) -> ModelEntry:
    return ModelEntry(
        name=name.replace("_", "-"),
        kind="drafter",
        family=family,
        summary=f"LANTERN's drafter for {of}",
        repo=f"jadohu/{name}",
        files=(
            _file("config.json", 1000, estimated=True),
            _file("pytorch_model.bin", nbytes, estimated=True),
        ),
        config=config,
        **_CHAMELEON,
    )


def _vq(name: str, repo: str, path: str, nbytes: float, of: str, downsample: int) -> ModelEntry:
    return ModelEntry(
        name=name,
        kind="vq",
        family="llamagen",
        summary=f"LlamaGen's image tokenizer, {downsample} px a token, {of}",
        repo=repo,
        files=(_file(path, nbytes, estimated="ds8" in path),),
        config={"downsample": downsample},
        **_MIT,
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
            _file("config.json", 1.71 * MB),
            _file("model.safetensors.index.json", 34_400),
            *(_file(name, size * GB) for name, size in shards),
            # The 512 and 1024 repositories have no tokenizer: Meta's serves all.
            *(_file(n, s) for n, s in zip(tokenizer, sizes, strict=True) if pixels == 768),
        ),
        uses=("chameleon-vq",),
        config={"variant": "lumina", "pixels": pixels},
        **_CHAMELEON,
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
    ModelEntry(
        name="anole-7b",
        kind="model",
        family="chameleon",
        summary="Anole-7B, text, 512 px, original layout",
        repo="GAIR/Anole-7b-v0.1",
        files=(
            _file("models/7b/consolidated.pth", 14.0 * GB),
            _file("models/7b/params.json", 1000, estimated=True),
            _file("models/7b/consolidate_params.json", 1000, estimated=True),
        ),
        uses=("chameleon-vq", "anole-drafter"),
        config={"variant": "anole", "pixels": 512},
        **_CHAMELEON,
    ),
    ModelEntry(
        name="anole-7b-hf",
        kind="model",
        family="chameleon",
        summary="Anole-7B, text, 512 px, Hugging Face layout",
        repo="leloy/Anole-7b-v0.1-hf",
        files=(
            _file("config.json", 1.71 * MB),
            _file("model.safetensors.index.json", 60_700),
            _file("model-00001-of-00003.safetensors", 4.99 * GB),
            _file("model-00002-of-00003.safetensors", 4.99 * GB),
            _file("model-00003-of-00003.safetensors", 4.32 * GB),
            _file("tokenizer.json", 5.63 * MB),
        ),
        uses=("chameleon-vq", "anole-drafter"),
        config={"variant": "anole", "pixels": 512},
        **_CHAMELEON,
    ),
    _lumina(512),
    _lumina(768),
    _lumina(1024),
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
    ModelEntry(
        name="chameleon-vq",
        kind="vq",
        family="chameleon",
        summary="Chameleon's image tokenizer and text tokenizer, 16 px a token",
        repo="GAIR/Anole-7b-v0.1",
        files=(
            _file("tokenizer/text_tokenizer.json", 5.6 * MB, estimated=True),
            _file("tokenizer/vqgan.yaml", 1000, estimated=True),
            _file("tokenizer/vqgan.ckpt", 281 * MB, estimated=True),
        ),
        config={"downsample": 16},
        **_CHAMELEON,
    ),
    _drafter(
        "llamagen_drafter",
        "llamagen",
        "LlamaGen stage I",
        178 * MB,
        {"size": "XL", "pixels": 256, "conditioning": "text"},
    ),
    _drafter(
        "llamagen2_drafter",
        "llamagen",
        "LlamaGen stage II",
        178 * MB,
        {"size": "XL", "pixels": 512, "conditioning": "text"},
    ),
    _drafter("anole_drafter", "chameleon", "Anole-7B", 2.02 * GB, {"variant": "anole"}),
    ModelEntry(
        name="flan-t5-xl",
        kind="text",
        family="llamagen",
        summary="flan-T5-XL, whose encoder reads LlamaGen's captions",
        repo="google/flan-t5-xl",
        files=(
            _file("config.json", 1440),
            _file("model.safetensors.index.json", 53_000),
            _file("model-00001-of-00002.safetensors", 9.45 * GB),
            _file("model-00002-of-00002.safetensors", 1.95 * GB),
            _file("tokenizer.json", 2.42 * MB),
            _file("tokenizer_config.json", 2500, estimated=True),
            _file("special_tokens_map.json", 2200, estimated=True),
        ),
        config={"encoder_parameters": 1_223_527_424},
        licence="Apache-2.0",
        licence_url="https://huggingface.co/google/flan-t5-xl",
    ),
)

_BY_NAME = {one.name: one for one in ENTRIES}


def entry(name: str) -> ModelEntry:
    """Return a published model or part; raises :class:`ModelError` with the nearest names."""
    if name not in _BY_NAME:
        raise ModelError(f"no published model is named {name!r}{did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]


def is_published(name: str) -> bool:
    """Return whether ``name`` is a published model (not a part of one)."""
    return name in _BY_NAME and _BY_NAME[name].kind == "model"


def published(kind: Kind | None = "model") -> list[ModelEntry]:
    """Return the entries of one kind, or all."""
    return [one for one in ENTRIES if kind is None or one.kind == kind]


def parts_of(model: ModelEntry) -> dict[str, ModelEntry]:
    """Return the entries that a model's parts come from, by kind."""
    return {_BY_NAME[name].kind: _BY_NAME[name] for name in model.uses}
