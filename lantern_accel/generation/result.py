"""The result of a call: images, tokens, and figures of their generation."""

from __future__ import annotations

import base64
import hashlib
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from lantern_accel._version import __version__
from lantern_accel.errors import RequestError
from lantern_accel.files import check_name, write_whole
from lantern_accel.generation.decision import Decision
from lantern_accel.records import Frozen
from lantern_accel.strategy.values import Sampling, Strategy

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lantern_accel.decoding.decoded import Decoded
    from lantern_accel.generation.request import GenerationRequest, ImageJob

#: Version of the JSON that ``--stats`` writes.
STATS_SCHEMA = 2
#: What people read for ``total_variation_per_token``.
LOSS = "total variation per token"


class QuantizationLoss(Frozen):
    """The quality loss of quantized weights per token, and the images that it was measured on."""

    weights: str = Field(description="int8, int6 or int4")
    bits_per_weight: float
    by_image: tuple[float, ...] = Field(
        min_length=1, description="total variation per token of each image, from the full weights"
    )
    tokens: int = Field(ge=1, description="tokens per image")
    sampling: Sampling = Field(description="what both models were sampled with")

    @property
    def total_variation_per_token(self) -> float:
        """The mean over images."""
        return sum(self.by_image) / len(self.by_image)

    def text(self) -> str:
        """Return one line of text."""
        return (
            f"{self.weights} weights: TV {self.total_variation_per_token:.4f} per token from the full "
            f"ones, a mean ({min(self.by_image):.4f} to {max(self.by_image):.4f} by image, "
            f"{len(self.by_image)} images at the model's own sampling)"
        )


def loss_of(rounding: QuantizationLoss | None) -> float:
    """Return the total variation per token of quantized weights; 0 for full ones."""
    return 0.0 if rounding is None else rounding.total_variation_per_token


class PhaseSeconds(Frozen):
    """Wall time by phase in seconds, with the device's pending work. ``decode`` includes drafting."""

    text: float
    prefill: float
    decode: float
    pixels: float
    total: float
    measuring: float = Field(0.0, description="timing of auto's candidates, before the first image")


class GenerationStats(Frozen):
    """Figures of one call. ``step_compression`` is tokens per target forward after prefill."""

    schema_version: int = STATS_SCHEMA
    tokens: int = Field(description="image tokens, all images")
    tokens_sha256: str = Field(
        description="of the tokens as int64: equal for two runs with the same tokens"
    )
    resumed: int = Field(0, description="of these, tokens that an interrupted call had sampled")
    steps: int = Field(description="target forwards after prefill, summed over images")
    step_compression: float
    accepted_histogram: list[int] = Field(description="steps by number of accepted drafts")
    total_variation_per_token: float = Field(
        description="upper bound: of relaxation and of quantized weights, summed"
    )
    rounding: QuantizationLoss | None = Field(
        None, description="quality loss of quantized weights; None: full weights"
    )
    seconds: PhaseSeconds
    tokens_per_second: float | None = Field(
        description="tokens over prefill and decode seconds; None on a simulated device"
    )
    seconds_per_image: float | None = Field(
        description="of the whole call, text to pixels; None on a simulated device"
    )
    images: int
    prompts: list[str | int]
    device: str
    device_name: str
    simulated: bool = Field(description="a device in software, whose seconds are not the device's")
    backend: str
    backend_version: str
    dtype: str
    model: str
    weights_hash: str
    strategy: Strategy
    auto: str | None = Field(None, description="what auto chose; None: the strategy was named")
    decision: Decision = Field(description="the decision made before the first image")
    sampling: Sampling
    seed: int
    seeds: list[int] | None = Field(None, description="of each image; None: one for all")
    negative_prompt: str | None = None
    batch_size: int
    buffers_bytes: int = Field(description="static caches and state of the decoding engine")
    lantern_accel: str
    torch: str

    @property
    def quality_loss(self) -> str:
        """The quality loss in words; "0: exact" if decoding keeps the target's distribution."""
        if not self.strategy.acceptance.relaxed and self.rounding is None:
            return "0: exact"
        given = self.rounding
        relaxed = self.total_variation_per_token - loss_of(given)
        bound = [f"{relaxed:.4f} (upper bound)"] * self.strategy.acceptance.relaxed
        return "; ".join(bound if given is None else [*bound, given.text()])


@dataclass(frozen=True)
class GenerationResult:
    """Images, their tokens (int64 ``[n, tokens]``, on the host) and the figures of the call.

    Images are in the order of prompts, with ``columns`` images per prompt (0: not all were generated).
    """

    images: list[Image]
    tokens: Tensor
    stats: GenerationStats
    columns: int = 0

    def __repr__(self) -> str:
        stats = self.stats
        many = f"{len(self.images)} image{'' if len(self.images) == 1 else 's'}"
        return (
            f"<GenerationResult: {many}, {stats.model}, {stats.strategy.name}, seed {stats.seed}, "
            f"{stats.step_compression:.2f} tokens per step>"
        )

    def _repr_png_(self) -> bytes | None:
        """Return a PNG for notebooks: the image, or all of them in a grid; None without any."""
        return png_bytes(self.grid()) if self.images else None

    def figures(self) -> dict[str, str]:
        """Return what a reader wants to know of the call, by name."""
        stats = self.stats
        speed = stats.tokens_per_second
        return {
            "prompts": ", ".join(str(one) for one in stats.prompts[:8])
            + (", ..." if len(stats.prompts) > 8 else ""),
            "strategy": stats.strategy.name + (f": {stats.auto}" if stats.auto else ""),
            "tokens per step": f"{stats.step_compression:.2f}",
            LOSS: stats.quality_loss,
            "tokens per second": "not measured: a device in software"
            if speed is None
            else f"{speed:.0f}",
            "seconds": f"{stats.seconds.total:.2f}",
            "device": f"{stats.device} ({stats.device_name}, {stats.dtype})",
            "model": stats.model,
            "seed": str(stats.seed),
        }

    def _repr_html_(self) -> str:
        """Return the images over a table of figures, for notebooks."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.figures().items()
        )
        if not self.images:
            return f"<table>{cells}</table>"
        encoded = base64.b64encode(png_bytes(self.grid())).decode("ascii")
        return (
            f"<img alt='the images' style='image-rendering:pixelated;min-width:192px' "
            f"src='data:image/png;base64,{encoded}'><table>{cells}</table>"
        )

    def grid(self, columns: int | None = None) -> Image:
        """Return one image of all images, with ``columns`` per row. Default: a row per prompt."""
        return image_grid(self.images, columns or self.columns or len(self.images))

    def save(self, path: str | Path, *, metadata: bool = True) -> list[Path]:
        """Write the image to ``path``, or several as ``name-0.png``, ``name-1.png``, ...

        With ``metadata``, the ``text`` of a PNG has the settings and the total variation per token.
        ``lantern-accel generate --like`` generates it again from these.
        """
        if not self.images:
            raise RequestError(
                f"there are no images to write to {path}: the result is tokens (result.tokens), which "
                "another program paints from"
            )
        count = len(self.images)
        written = [number_path(Path(path), index, count) for index in range(count)]
        for image, out in zip(self.images, written, strict=True):
            save_image(image, out, metadata)
        return written


def png_bytes(image: Image) -> bytes:
    """Return an image as PNG."""
    stream = io.BytesIO()
    image.save(stream, format="png")
    return stream.getvalue()


def tokens_sha256(tokens: Tensor) -> str:
    """Return the SHA-256 of tokens as int64."""
    return hashlib.sha256(tokens.long().contiguous().numpy().tobytes()).hexdigest()


def describe(
    images: Sequence[Image],
    request: GenerationRequest,
    jobs: Sequence[ImageJob],
    decoded: Decoded,
    decision: Decision,
    rounding: QuantizationLoss | None,
) -> None:
    """Note in ``info`` what :mod:`~.like` makes images again from; ``decision``: of their part alone."""
    added = loss_of(rounding)
    for row, (image, job) in enumerate(zip(images, jobs, strict=True)):
        tokens = decoded.tokens[row]
        about = {
            "prompt": job.prompt,
            "seed": job.seed,
            "image": job.number,
            "model": decision.model,
            "weights": "" if rounding is None else rounding.weights,
            "strategy": request.strategy.name,
            "negative_prompt": request.negative_prompt or "",
            "sampling": request.sampling.model_dump_json(exclude_none=True),
            "total_variation_per_token": float(decoded.quality_loss[row]) / len(tokens) + added,
            "tokens_sha256": tokens_sha256(tokens),
            "decision": decision.model_dump_json(),
            "lantern_accel": __version__,
        }
        image.info.update({name: str(value) for name, value in about.items() if value != ""})


#: Pixels above a row of a grid for its label.
LABEL = 14
#: What :func:`describe` notes.
DESCRIBED = (
    "prompt", "negative_prompt", "seed", "image", "model", "weights", "strategy", "sampling",
    "total_variation_per_token", "tokens_sha256", "decision", "lantern_accel",
)  # fmt: skip


def to_images(pixels: Tensor) -> list[Image]:
    """Turn pixels, uint8 ``[n, H, W, 3]``, into images."""
    from PIL import Image as pillow

    return [pillow.fromarray(one.numpy()) for one in pixels]


def image_grid(images: Sequence[Image], columns: int, labels: Sequence[str] = ()) -> Image:
    """Return images of one size side by side, ``columns`` in a row, on white.

    ``labels``: a line of text above each row.
    """
    from PIL import Image as pillow
    from PIL import ImageDraw

    width, height = images[0].size
    columns = max(1, min(columns, len(images)))
    head = LABEL if labels else 0
    rows = -(-len(images) // columns)
    sheet = pillow.new("RGB", (columns * width, rows * (head + height)), "white")
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * (head + height) + head))
    for row, text in enumerate(labels):
        line = " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")  # font's own
        ImageDraw.Draw(sheet).text((2, row * (head + height) + 2), line, fill="black")
    for name in DESCRIBED:  # a line for each image where they differ
        lines = [one.info[name] for one in images if name in one.info]
        if lines:
            sheet.info[name] = "\n".join(lines if len(set(lines)) > 1 else lines[:1])
    return sheet


def image_format(path: Path) -> str:
    """Return Pillow's name of the format that a suffix stands for; ``.png`` where there is none.

    An image of one pixel is written first: Pillow lists formats that cannot take a photograph, or
    whose libraries are absent. Raises :class:`RequestError`.
    """
    check_name(path.name)
    from PIL import Image as pillow

    suffix = path.suffix.lower() or ".png"
    name = pillow.registered_extensions().get(suffix)
    if name in pillow.SAVE:
        try:
            pillow.new("RGB", (1, 1)).save(io.BytesIO(), format=name)
            return str(name)
        except Exception:  # every codec raises its own
            name = None
    raise RequestError(
        f"{path} has no image format that can be written; name it .png, .jpg or .webp"
    )


def number_path(path: Path, index: int, count: int) -> Path:
    """Return the file of one of ``count`` images: ``path``, or ``name-0.png``, ``name-1.png``, ..."""
    if count == 1:
        return path
    return path.with_name(f"{path.stem}-{index}{path.suffix or '.png'}")


def save_image(image: Image, path: Path, metadata: bool = True) -> None:
    """Write one image, whole or not at all; a PNG with ``metadata`` has what :func:`describe` noted."""
    from PIL.PngImagePlugin import PngInfo

    kind = image_format(path)
    more: dict[str, object] = {}
    if metadata and kind == "PNG":
        more["pnginfo"] = chunks = PngInfo()
        for name in DESCRIBED:
            if name in image.info:
                chunks.add_text(name, image.info[name])
    write_whole(path, lambda stream: image.save(stream, format=kind, **more))
