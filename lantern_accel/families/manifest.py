"""The manifest of a model folder: sizes of every part, and what a request gets by default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self, TypeVar

from lantern_accel.errors import RequestError
from lantern_accel.nn.draft_head import DraftHeadConfig
from lantern_accel.records import Frozen
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import NeighbourSpace

FORMAT: Literal[1] = 1


#: A family's own manifest; any where none is named.
ManifestT = TypeVar("ManifestT", bound="Manifest", default=Any)


class Manifest(Frozen):
    """What every family's ``model.json`` has; a family adds the configurations of its parts.

    Decoding reads of ``target``: ``num_tokens``, ``vocab_size``, ``prefix_length``, ``dim``,
    ``n_layer``, ``n_head`` and ``head_dim``.
    """

    format: Literal[1] = FORMAT
    name: str
    family: str
    summary: str = ""
    licence: str = ""
    target: Any
    drafter: Any = None
    draft_head: DraftHeadConfig | None = None
    vq: Any
    neighbour_space: NeighbourSpace = Field(
        "decoder", description="measure neighbours where the decoder looks codes up, or on raw rows"
    )
    defaults: ModelDefaults = ModelDefaults()

    @model_validator(mode="after")
    def _head_fits(self) -> Self:
        head, t = self.draft_head, self.target
        if head is not None and (wrong := head.misfit(t.dim, t.vocab_size)) is not None:
            raise ValueError(f"the draft head is not of this target: {wrong}")
        return self

    @property
    def token_pixels(self) -> int:
        """Pixels along the side of a token."""
        return int(self.vq.downsample)

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of tokens of an image ``(width, height)`` in pixels; None: its own.

        Raises :class:`RequestError` for a size that the model cannot generate: here, any other one.
        """
        own = self.target.height, self.target.width
        pixels = own[1] * self.token_pixels, own[0] * self.token_pixels
        if size is not None and size != pixels:
            raise RequestError(
                f"the model {self.name!r} generates {pixels[0]}x{pixels[1]} pixels only, not "
                f"{size[0]}x{size[1]}; leave the size out",
                field="size",
            )
        return own


class TokenManifest(Manifest):
    """The manifest of a model whose prompts are token ids; ``ids``: those that mean something."""

    ids: Any

    @property
    def pad(self) -> int:
        """The id that pads prompts."""
        return int(self.ids.pad)


TokenManifestT = TypeVar("TokenManifestT", bound=TokenManifest, default=Any)


def check_codes(codebook: int, codes: int) -> None:
    """Raise ValueError where a codebook is not of a target, for a manifest's validator."""
    if codebook != codes:
        raise ValueError(f"the codebook has {codebook} codes, the target {codes}")
