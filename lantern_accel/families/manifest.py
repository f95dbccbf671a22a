"""The manifest of a model folder: sizes of every part, and what a request gets by default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, model_validator
from typing_extensions import Self, TypeVar

from lantern_accel.errors import RequestError
from lantern_accel.nn.draft_head import DraftHeadConfig
from lantern_accel.nn.drafter import EagleSizes
from lantern_accel.nn.sizes import Sizes
from lantern_accel.records import Frozen
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import NeighbourSpace

#: A family's own manifest; any where none is named.
ManifestT = TypeVar("ManifestT", bound="Manifest", default=Any)


class Manifest(Frozen):
    """What every family's ``model.json`` has; a family adds the configurations of its parts.

    Decoding reads of ``target``: ``num_tokens``, ``vocab_size``, ``prefix_length``, ``dim``,
    ``n_layer``, ``n_head`` and ``head_dim``.
    """

    format: Literal[1] = 1
    name: str
    family: str
    variant: str | None = Field(None, description="of a family that has several kinds of models")
    summary: str = ""
    licence: str = ""
    target: Any
    drafter: Any = None
    draft_head: DraftHeadConfig | None = None
    vq: Any
    text: SerializeAsAny[Sizes] | None = Field(None, description="a text encoder of our own")
    neighbour_space: NeighbourSpace = Field(
        "decoder", description="measure neighbours where the decoder looks codes up, or on raw rows"
    )
    defaults: ModelDefaults = ModelDefaults()

    @model_validator(mode="after")
    def _drafts_fit(self) -> Self:
        head, drafter, t = self.draft_head, self.drafter, self.target
        if head is not None and (wrong := head.misfit(t.dim, t.vocab_size)) is not None:
            raise ValueError(f"the draft head is not of this target: {wrong}")
        if isinstance(drafter, EagleSizes) and (wrong := drafter.misfit(t)) is not None:
            raise ValueError(f"the drafter is not of this target: {wrong}")
        return self

    @property
    def conditioning(self) -> Literal["class", "text"]:
        """What an image is conditioned on."""
        return "text"

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


def check_codes(codebook: int, codes: int) -> None:
    """Raise ValueError where a codebook is not of a target, for a manifest's validator."""
    if codebook != codes:
        raise ValueError(f"the codebook has {codebook} codes, the target {codes}")


class TokenIds(Frozen):
    """Ids of the tokens that mean something; ``pad`` pads prompts."""

    pad: int = Field(ge=0)


class TokenManifest(Manifest):
    """The manifest of a model whose prompts are token ids."""

    ids: TokenIds

    @model_validator(mode="after")
    def _codebook_fits(self) -> Self:
        # One of the target's codes may end the rows of an image.
        t = self.target
        check_codes(self.vq.codebook_size, t.vocab_size - (t.newline is not None))
        return self


TokenManifestT = TypeVar("TokenManifestT", bound=TokenManifest, default=Any)
