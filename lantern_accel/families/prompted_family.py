"""The bases of families whose prompts are token ids, and whose drafters have the target's blocks."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import RequestError
from lantern_accel.families.base import (
    Adapt,
    Conditions,
    Family,
    Found,
    Model,
    Prompt,
    Rows,
    Size,
    TextSource,
)
from lantern_accel.families.manifest import TokenManifestT
from lantern_accel.families.prompted_drafter import PromptedDrafter, PromptedManifestT
from lantern_accel.families.tokenizer import CAPTIONS, PromptText, bucket, check_texts, left_pad
from lantern_accel.nn.drafter import EagleDrafter


class TokenFamily(Family[TokenManifestT]):
    """A family whose prompts are token ids, left-padded to few lengths."""

    needs: ClassVar[tuple[str, ...]] = ("target", "vq", "text_tokenizer")
    #: What reads the tokenizer's file.
    text_type: ClassVar[type[PromptText]]
    #: The target's sizes that requests choose: the shape of conditions, one number alone where it is one.
    shape_names: ClassVar[tuple[str, ...]] = ("prefix_length", "height", "width")
    #: Tokens of a prompt that fit next to a model's own image, whatever its file says; 0: as it says.
    long_prompt: ClassVar[int] = 0

    def text(
        self,
        found: Found[TokenManifestT],
        device: torch.device,
        dtype: torch.dtype,
        adapt: Adapt = None,
    ) -> TextSource | None:
        path = found.files.get("text_tokenizer")
        return None if path is None else self.text_type(path, found.manifest)

    def examples(self, manifest: TokenManifestT) -> Sequence[Prompt]:
        return CAPTIONS

    @abstractmethod
    def tiny_prompt(self, manifest: TokenManifestT, rng: random.Random) -> list[int]:
        """Return a prompt of random words and length for the tiny model."""

    def tiny_conditions(self, model: Model[TokenManifestT], count: int, seed: int) -> Conditions:
        manifest, rng = model.manifest, random.Random(seed)
        prompts = [self.tiny_prompt(manifest, rng) for _ in range(count)]
        ids, mask = left_pad(prompts, manifest.target.prefix_length, manifest.ids.pad)
        return Conditions(ids, mask, self.usual_shape(model))

    def usual_shape(self, model: Model[TokenManifestT]) -> Hashable:
        target = model.manifest.target.model_dump()
        sizes = tuple(target[name] for name in self.shape_names)
        return sizes if len(sizes) > 1 else sizes[0]

    def shape_for(self, manifest: TokenManifestT, size: Size) -> Hashable:
        grid = manifest.grid(size)
        return (manifest.target.prefix_length, *grid) if len(self.shape_names) > 1 else None

    def conditions(
        self,
        model: Model[TokenManifestT],
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Return token ids ``[n, prefix]``, left-padded to a bucket's length."""
        manifest = model.manifest
        texts = check_texts(prompts, manifest.name)
        grid = manifest.grid(size)
        if not isinstance(model.text, PromptText):
            lacks = model.missing.get("text", "a text tokenizer in its folder")
            raise RequestError(f"the model {manifest.name!r} lacks {lacks}")
        return self.conditions_of(model, model.text.ids(texts, *grid), device, grid)

    def conditions_of(
        self,
        model: Model[TokenManifestT],
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        grid: tuple[int, int] | None = None,
    ) -> Conditions:
        """Return the conditions of prompts that are token ids already; ``grid``: rows and columns.

        Raises :class:`RequestError` for a grid that the model cannot generate, and for a prompt that is
        longer than it was trained on.
        """
        manifest, names = model.manifest, self.shape_names[1:]
        side = manifest.token_pixels
        grid = manifest.grid(None if grid is None else (grid[1] * side, grid[0] * side))
        sizes = dict(zip(names, grid, strict=True)) if names else {}
        tokens = manifest.target.model_copy(update=sizes).num_tokens
        longest, positions = max(len(ids) for ids in prompts), manifest.target.max_positions
        if self.long_prompt:
            positions = max(positions, manifest.target.num_tokens + self.long_prompt)
        most = positions - tokens
        if longest > most:
            ways = [f"shorten the prompt to {most} tokens"] * (most > 0)
            ways += ["ask for a smaller image"] * bool(names)
            raise RequestError(
                f"a prompt has {longest} tokens and the image {tokens}, but the model was trained on "
                f"{positions} in all; {' or '.join(ways) or 'use another model'}"
            )
        length = bucket(longest)
        ids, mask = left_pad(prompts, length, manifest.ids.pad)
        shape: Hashable = (length, *grid) if names else length
        return Conditions(ids.to(device), mask.to(device), shape)

    def tokens(self, model: Model[TokenManifestT], codes: Tensor) -> Tensor:
        """End every row with the newline's code, where the model writes one."""
        newline = model.manifest.target.newline
        return (codes if newline is None else F.pad(codes, (0, 1), value=newline)).flatten(1)

    def with_contexts(
        self,
        model: Model[TokenManifestT],
        conditions: Conditions,
        contexts: Sequence[Sequence[int]],
    ) -> Rows:
        """Return the rows of conditions, and behind them those of other branches' prompts of ids."""
        condition, mask = conditions.condition, conditions.mask
        ids, seen = left_pad(contexts, condition.shape[1], model.manifest.ids.pad)
        others = ids.to(condition.device), seen.to(mask.device)
        return Rows(torch.cat((condition, others[0])), torch.cat((mask, others[1])))

    def target_for_shape(
        self, model: Model[TokenManifestT], shape: Hashable
    ) -> tuple[object, object]:
        """Return target and drafter for a prompt length and an image size; weights are shared."""
        if shape is None:
            return model.target, model.drafter
        sizes = shape if isinstance(shape, tuple) else (shape,)
        target = model.target.resize(**dict(zip(self.shape_names, sizes, strict=True)))
        return target, None if model.drafter is None else model.drafter.for_target(target)

    def join(self, model: Model[TokenManifestT], conditions: Sequence[Conditions]) -> Conditions:
        """Pad prompts to the longest one's bucket."""
        longest = max(conditions, key=lambda one: one.mask.shape[1])
        ids, masks = [], []
        for one in conditions:
            extra = longest.mask.shape[1] - one.mask.shape[1]
            ids.append(F.pad(one.condition, (extra, 0), value=model.manifest.ids.pad))
            masks.append(F.pad(one.mask, (extra, 0), value=False))
        return Conditions(torch.cat(ids), torch.cat(masks), longest.shape)


class PromptedFamily(TokenFamily[PromptedManifestT]):
    """Trains, reads and pairs drafters of the target's own blocks; has ``manifest.drafter``."""

    drafter_type: ClassVar[type[EagleDrafter]] = PromptedDrafter

    def pair(self, model: Model[PromptedManifestT]) -> None:
        if model.drafter is not None:
            model.drafter.read(model.target)
