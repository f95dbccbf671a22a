"""LlamaGen as a family: class- or text-conditional, 2D positions, its own VQ tokenizer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.loading import Recipe, fill, without_data
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import CheckpointError, ModelError, RequestError
from lantern_accel.families.base import (
    Conditions,
    DrafterFiles,
    Family,
    Found,
    Model,
    Parts,
    Prompt,
    Rows,
    Size,
    TextSource,
)
from lantern_accel.families.llamagen.drafter import DrafterConfig, EagleDrafter, start_drafter
from lantern_accel.families.llamagen.features import FeatureFile
from lantern_accel.families.llamagen.keys import (
    drafter_name,
    llamagen_name,
    named_once,
    stacked_names,
)
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.parts import OWN_CONFIG
from lantern_accel.families.llamagen.t5 import T5Text
from lantern_accel.families.llamagen.text import TextEncoder, WordText
from lantern_accel.families.llamagen.vq import VQModel, pixels_to_uint8
from lantern_accel.families.manifest import Manifest, ModelManifest
from lantern_accel.strategy.values import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lantern_accel.families.published import ModelEntry

#: Pixels of the images that are decoded together: one of 128 x 128 or larger, four of 64 x 64. More at
#: once took the same time, and memory in proportion.
PIXELS_AT_ONCE = 128 * 128


class LlamaGenFamily(Family):
    """LlamaGen's published models, and the bundled one, which has the same architecture."""

    name: ClassVar[str] = "llamagen"
    manifest_type: ClassVar[type[Manifest]] = ModelManifest

    def detect(self, path: Path, parts: Parts) -> Found | None:
        """Recognise LlamaGen's and LANTERN's layouts."""
        from lantern_accel.families.llamagen.official import detect

        return detect(path, parts)

    def from_entry(self, entry: ModelEntry) -> ModelManifest:
        """Return the manifest of a published LlamaGen."""
        from lantern_accel.families.llamagen.official import published_manifest

        return published_manifest(entry)

    def with_drafter(self, manifest: ModelManifest, path: Path) -> tuple[ModelManifest, Path]:
        """Take LANTERN's drafter, or one that was trained here."""
        from lantern_accel.families.llamagen.official import classify
        from lantern_accel.families.llamagen.parts import join_drafter

        config, weights = join_drafter(manifest.target, manifest.name, path, classify)
        return manifest.model_copy(update={"drafter": config}), weights

    def build(self, manifest: ModelManifest, part: str, ops: TensorOps) -> nn.Module:
        """Build the GPT, its drafter or its VQ tokenizer."""
        if part == "target":
            return LlamaGenGPT(manifest.target, ops=ops)
        if part == "drafter":
            assert manifest.drafter is not None
            return EagleDrafter(manifest.drafter, ops=ops)
        return VQModel(manifest.vq)

    def place_tables(self, module: nn.Module, device: torch.device) -> None:
        """Make the rotary tables of target and drafter."""
        if isinstance(module, LlamaGenGPT | EagleDrafter):
            module.place_tables(device)

    def recipes(
        self, part: str, checkpoint: Checkpoint, manifest: ModelManifest
    ) -> Mapping[str, Recipe]:
        """Rename and stack; the VQ tokenizer has the official names already."""
        if part == "vq":
            return {key: Recipe((key,)) for key in checkpoint}
        rename = llamagen_name if part == "target" else drafter_name
        named = stacked_names(named_once(checkpoint, rename))
        return {name: Recipe(keys) for name, keys in named.items()}

    def text(self, found: Found, device: torch.device, dtype: torch.dtype) -> TextSource | None:
        """Return a file of features, the bundled encoder, or flan-t5."""
        manifest, parts = found.manifest, found.parts
        config: LlamaGenConfig = manifest.target
        if config.conditioning == "class":
            if parts.embeddings is not None:
                raise RequestError(
                    f"the model {manifest.name!r} draws classes, so it takes no embeddings; leave "
                    "--embeddings out"
                )
            return None
        if parts.embeddings is not None:
            return FeatureFile(parts.embeddings, config.prefix_length, config.caption_dim)
        if "t5" in found.files:
            on_device = parts.text_device == "device"
            return T5Text(
                found.files["t5"],
                config.prefix_length,
                device=device if on_device else torch.device("cpu"),
                dtype=dtype,
                keep=not on_device,
            )
        if "text" not in found.files:
            return None
        assert isinstance(manifest, ModelManifest) and manifest.text is not None
        with without_data():
            encoder = TextEncoder(manifest.text)
        checkpoint = open_checkpoint(found.files["text"])
        fill(
            encoder,
            checkpoint,
            {key: Recipe((key,)) for key in checkpoint},
            dtype=torch.float32,
            device=torch.device("cpu"),
            what=found.files["text"].name,
        )
        encoder.eval().requires_grad_(False)
        return WordText(encoder, _read_tokenizer(found.files["text_tokenizer"]))

    def picture(self, manifest: ModelManifest, size: Size | None = None) -> Size:
        """Return the one size that the model draws."""
        own = manifest.image_size
        if size is not None and size != (own, own):
            raise RequestError(
                f"the model {manifest.name!r} draws {own}x{own} pixels only, not {size[0]}x{size[1]}; "
                "leave the size out"
            )
        return own, own

    def fresh_drafter(
        self, target: LlamaGenGPT, layers: int = 1, taps: Sequence[int] = ()
    ) -> EagleDrafter:
        """Return blocks of the target's size that hide the caption's pads."""
        config = target.config
        if max(taps, default=0) > config.n_layer:
            raise ModelError(
                f"the drafter cannot read the states after block {max(taps)} of {config.n_layer}; "
                "name lower taps"
            )
        drafter = EagleDrafter(
            DrafterConfig(
                dim=config.dim,
                n_layer=layers,
                taps=tuple(taps),
                n_head=config.n_head,
                ffn_dim=config.hidden_dim,
                vocab_size=config.vocab_size,
                grid=config.grid,
                prefix_length=config.prefix_length - 1,
                norm_eps=config.norm_eps,
                rope_base=config.rope_base,
                prefix_rotary=config.prefix_rotary,
            )
        )
        start_drafter(drafter, target.tok_embeddings.weight)
        return drafter.train()

    def drafter_files(self, drafter: EagleDrafter) -> DrafterFiles:
        """Return our own names and configuration."""
        config = drafter.config.model_dump(mode="json")
        return DrafterFiles(dict(drafter.state_dict()), OWN_CONFIG, config)

    def conditions(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Return class ids ``[n]``, or caption features ``[n, prefix, caption_dim]``."""
        config, name = model.manifest.target, model.manifest.name
        self.picture(model.manifest, size)
        if config.conditioning == "class":
            ids = [_class_id(prompt, config.num_classes, name) for prompt in prompts]
            mask = torch.ones(len(ids), 1, dtype=torch.bool)
            return Conditions(torch.tensor(ids).to(device), mask.to(device))
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise RequestError(f"the model {name!r} takes text, not the class {prompt!r}")
        if model.text is None:
            lacks = model.missing.get("text", "a text encoder in its folder")
            raise RequestError(f"the model {name!r} lacks {lacks}")
        features, mask = model.text.encode([str(prompt) for prompt in prompts])
        return Conditions(features.to(device=device, dtype=dtype), mask.to(device))

    def rows(self, model: Model, conditions: Conditions, sampling: Sampling) -> Rows:
        """Return ``[cond; uncond]`` with guidance, else ``[cond]``."""
        condition, mask = conditions.condition, conditions.mask
        if not sampling.guided:
            return Rows(condition, mask)
        if sampling.branches == 3:
            raise RequestError(
                f"the model {model.manifest.name!r} has two-way guidance; leave cfg_scale_image out"
            )
        free = model.target.unconditional(condition.shape[0]).to(condition.dtype)
        if condition.dim() == 3:
            # LlamaGen hides the same positions in the unconditional row.
            free = free * mask.unsqueeze(-1).to(free.dtype)
        return Rows(torch.cat((condition, free)), mask)

    def pixels(self, model: Model, tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode tokens in float32, whatever the target's dtype, a few images at a time."""
        grid = model.manifest.target.grid
        codes = tokens.view(-1, grid, grid)
        parts = torch.split(codes, self.pixels_together(model))
        return torch.cat([pixels_to_uint8(model.vq.decode_codes(part)) for part in parts])

    def pixels_together(self, model: Model) -> int:
        """Bound the decoder's activations, which would take more than decoding the tokens did."""
        side = int(model.manifest.target.grid * model.vq.config.downsample)
        return max(1, PIXELS_AT_ONCE // (side * side))

    def codebook(self, model: Model) -> tuple[Tensor, bool]:
        """Return the raw rows; LlamaGen's decoder normalises them."""
        vq: VQModel = model.vq
        return vq.quantize.embedding.weight, vq.config.l2_norm


def _class_id(prompt: Prompt, classes: int, name: str) -> int:
    try:
        value = int(prompt)
    except ValueError:
        value = -1
    if not 0 <= value < classes:
        raise RequestError(
            f"the model {name!r} takes class ids from 0 to {classes - 1}, not {prompt!r}"
        )
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None


FAMILY = LlamaGenFamily()
