"""The EAGLE drafter: blocks on one feature, fused of a token and the target's states.

Source: EAGLE (arXiv 2401.15077), with states of several blocks of the target EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from typing_extensions import Self

from lantern_accel.device.plan import DraftStack
from lantern_accel.nn.rotary import RotaryNetwork
from lantern_accel.nn.sizes import Sizes
from lantern_accel.nn.transformer import Decoder, Pass, Projection, RMSNorm


class EagleSizes(Sizes):
    """Sizes of a drafter; those named here are its own, all others are its target's."""

    #: Those of its target's by which a drafter of another one is known.
    same: ClassVar[tuple[str, ...]] = ()
    n_layer: int = Field(1, ge=1, description="blocks; EAGLE's and the published drafters have one")
    taps: tuple[int, ...] = Field(
        (),
        description="blocks of the target, counted from 1, whose states are read next to its last ones "
        "(EAGLE-3, arXiv 2503.01840)",
    )
    bias: bool = Field(True, description="what joins token and feature has one")
    mask_padding: bool = Field(
        True,
        description="hide the prompt's pads, as the target does; LANTERN's drafters for LlamaGen were "
        "trained seeing them",
    )

    @field_validator("taps")
    @classmethod
    def _ascend(cls, taps: tuple[int, ...]) -> tuple[int, ...]:
        if list(taps) != sorted(set(taps)) or any(tap < 1 for tap in taps):
            raise ValueError(f"taps {list(taps)} must be numbers from 1 up, each once, ascending")
        return taps

    @classmethod
    def of_target(cls, target: Any) -> dict[str, Any]:
        """Return what a drafter takes from a target's configuration."""
        named = (name for name in cls.model_fields if name not in EagleSizes.model_fields)
        return {name: getattr(target, name) for name in named if hasattr(target, name)}

    @classmethod
    def fitting(cls, target: Any, layers: int = 1, taps: Sequence[int] = ()) -> Self:
        """Return the sizes of a drafter to train for a target of this configuration."""
        return cls(**cls.of_target(target), n_layer=layers, taps=tuple(taps))

    def misfit(self, target: Any) -> str | None:
        """Say in which sizes a drafter is not of a target of this configuration; None: in none."""
        own, fitting = (one.model_dump() for one in (self, self.fitting(target)))
        pairs = ((name, own[name], fitting[name]) for name in self.same)
        wrong = [f"its {name} is {a} and the model's {b}" for name, a, b in pairs if a != b]
        if max(self.taps, default=0) > target.n_layer:
            wrong.append(f"it reads block {max(self.taps)} of the model's {target.n_layer}")
        return ", ".join(wrong) or None


class EagleDrafter(RotaryNetwork, ABC):
    """Predicts the target's next feature from its last features and the token sampled from them.

    Drafter position ``p`` reads the target's feature at ``p`` and token ``p + 1``. ``config``: its
    :class:`EagleSizes`, with a ``decoder``.
    """

    sizes: ClassVar[type[EagleSizes]]
    tap_norms: nn.ModuleList
    fuse: Projection | None
    fc: Projection
    layers: nn.ModuleList

    def make_layers(self) -> None:
        """Make what fuses a token and the target's states, and the blocks."""
        c = self.config
        self.tap_norms = nn.ModuleList(RMSNorm(c.dim, c.norm_eps) for _ in c.taps)
        wide = (len(c.taps) + 1) * c.dim
        self.fuse = Projection(wide, c.dim, bias=False) if c.taps else None
        self.fc = Projection(2 * c.dim, c.dim, bias=c.bias)
        self.decoder: Decoder = c.decoder
        self.layers = self.decoder.blocks()

    @property
    def stack(self) -> DraftStack | None:
        """The whole drafter as a fused step takes it; None where it has other parts."""
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        """Blocks of the target whose states :meth:`fused` takes."""
        taps: tuple[int, ...] = self.config.taps
        return taps

    def fuse_states(self, features: Tensor) -> Tensor:
        """Return the target's states ``[R, T, (taps + 1) D]`` as one feature ``[R, T, D]``.

        What has the width of one already, such as the drafter's own predictions, stays as it is.
        """
        if self.fuse is None or features.shape[-1] == self.config.dim:
            return features
        *tapped, last = torch.split(features, self.config.dim, dim=-1)
        normed = [norm(x, self.ops) for norm, x in zip(self.tap_norms, tapped, strict=True)]
        out: Tensor = self.fuse(torch.cat((*normed, last), dim=-1), self.ops)
        return out

    def join_inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return what the blocks read, ``[R, T, D]``, of embedded tokens and the target's states."""
        out: Tensor = self.fc(torch.cat((embedded, self.fuse_states(features)), dim=-1), self.ops)
        return out

    @abstractmethod
    def embed(self, codes: Tensor) -> Tensor:
        """Embed codes, int ``[R, T]``, as ``[R, T, D]``."""

    @abstractmethod
    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed what the ``length`` positions of a prompt are fed, ``[R, length, D]``.

        ``condition``: the target's; ``features [R, T, D]`` are the target's of this pass.
        """

    def run(self, embedded: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Run the blocks on embedded tokens ``[R, T, D]`` and the target's states: ``[R, T, D]``."""
        x = self.join_inputs(embedded.to(features.dtype), features)
        return self.decoder.run(self.ops, self.layers, x, at)

    def forward(self, codes: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Predict features ``[R, T, D]`` from codes, int ``[R, T]``, and features ``[R, T, D]``.

        Of a drafter with taps, features of the target are ``[R, T, (taps + 1) D]``.
        """
        return self.run(self.embed(codes), features, at)

    def forward_prefix(self, condition: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Run the prompt with the target's features of all its positions but the last."""
        return self.run(self.embed_prompt(condition, features, features.shape[1]), features, at)

    def forward_image(
        self,
        condition: Tensor | None,
        codes: Tensor,
        features: Tensor,
        prefix_mask: Tensor | None = None,
    ) -> Tensor:
        """Run prompt and image as training does: codes ``[R, n]``, features ``[R, p - 1 + n, D]``.

        ``condition``: the target's, ``p`` positions; ``prefix_mask`` bool ``[R, p - 1]``, False at pads.
        """
        count = codes.shape[1]
        prefix = features.shape[1] - count
        prompt = self.embed_prompt(condition, features, prefix)
        at = self.dense_pass(prefix_mask, prefix, count, features)
        return self.run(torch.cat((prompt, self.embed(codes)), dim=1), features, at)

    @torch.no_grad()
    def start(self, target: Any) -> None:
        """Draw the first weights for a target: "the next feature resembles this one"."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and "norm" not in name:  # norms of heads have a row a head
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(weight, std=0.01)
        width = self.config.dim
        self.fc.weight[:, width:].add_(torch.eye(width))
        if self.fuse is not None:  # ... which is the last of the target's states
            self.fuse.weight[:, -width:] = torch.eye(width)
        self.adopt(target)

    def adopt(self, target: Any) -> None:
        """Take the target's table of codes, which stays as it is."""
        table = self.get_submodule("embed_tokens").get_parameter("weight")
        table.copy_(target.tok_embeddings.weight).requires_grad_(False)
