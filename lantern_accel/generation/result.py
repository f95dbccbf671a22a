"""What crosses the boundary of the library: requests, statistics, results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lantern_accel.strategy.values import Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

#: Version of the JSON that ``--json`` writes.
STATS_SCHEMA = 1


class GenerationRequest(BaseModel):
    """One call of ``generate``, checked before any work is done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: tuple[str | int, ...] = Field(min_length=1)
    strategy: Strategy
    sampling: Sampling
    num_images: int = Field(1, ge=1, le=10_000, description="images a prompt")
    seed: int = Field(ge=0, lt=2**63)
    batch_size: int | None = Field(None, ge=1, le=1024, description="images decoded together")
    size: tuple[int, int] | None = Field(None, description="width and height in pixels")

    @field_validator("prompts")
    @classmethod
    def _not_empty(cls, prompts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        for prompt in prompts:
            if isinstance(prompt, str) and not prompt.strip():
                raise ValueError("the prompt is empty; describe a thing, such as 'red heart'")
        return prompts


class PhaseSeconds(BaseModel):
    """Wall time by phase, the device's pending work included. Drafting lies within ``decode``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: float
    prefill: float
    decode: float
    pixels: float
    total: float


class GenerationStats(BaseModel):
    """Figures of one call. ``step_compression`` is tokens per target forward after prefill."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = STATS_SCHEMA
    tokens: int = Field(description="image tokens, all images")
    tokens_sha256: str = Field(
        description="of the tokens as int64: equal where two runs drew alike"
    )
    steps: int = Field(description="target forwards after prefill, summed over images")
    step_compression: float
    accepted_histogram: list[int] = Field(description="steps by number of accepted drafts")
    total_variation: float = Field(description="relaxed mass used, a generated token")
    seconds: PhaseSeconds
    tokens_per_second: float | None = Field(
        description="tokens over prefill and decode seconds; None on a simulated device"
    )
    images: int
    prompts: list[str | int]
    device: str
    device_name: str
    simulated: bool = Field(description="a device in software: its seconds are not the device's")
    backend: str
    backend_version: str
    dtype: str
    model: str
    weights_hash: str
    strategy: Strategy
    sampling: Sampling
    seed: int
    batch_size: int
    buffers_bytes: int = Field(description="static caches and state of the decoding engine")
    lantern_accel: str
    torch: str


@dataclass(frozen=True)
class GenerationResult:
    """Images, their tokens (int64 ``[n, tokens]``, on the host) and the figures of the call.

    Images of the first prompt come first.
    """

    images: list[Image]
    tokens: Tensor
    stats: GenerationStats

    def save(self, path: str | Path) -> list[Path]:
        """Write the image to ``path``, or several as ``name-0.png``, ``name-1.png``, ..."""
        return save_images(self.images, path)


def save_images(images: list[Image], path: str | Path) -> list[Path]:
    """Write an image to ``path``, or several as ``name-0.png``, ``name-1.png``, ...; return the files."""
    from lantern_accel.files import write_whole

    path = Path(path)
    kind = (path.suffix.lstrip(".") or "png").lower()
    kind = {"jpg": "jpeg"}.get(kind, kind)
    written = []
    for i, image in enumerate(images):
        many = len(images) > 1
        out = path.with_name(f"{path.stem}-{i}{path.suffix or '.png'}") if many else path
        picture: Any = image
        # The default binds this picture; mypy cannot type a lambda with one.
        write_whole(out, lambda stream, p=picture: p.save(stream, format=kind))  # type: ignore[misc]
        written.append(out)
    return written
