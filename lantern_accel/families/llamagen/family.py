"""LlamaGen as a family: class- or text-conditional, 2D positions, its own VQ tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from lantern_accel.bounds import whole
from lantern_accel.checkpoints.layouts import read_json
from lantern_accel.checkpoints.loading import without_data
from lantern_accel.errors import ModelError, RequestError, show
from lantern_accel.families.base import (
    Adapt,
    Conditions,
    Found,
    Model,
    Prompt,
    Rows,
    Size,
    TextSource,
    check_two_way,
)
from lantern_accel.families.image_tokenizer import VQFamily
from lantern_accel.families.keys import load_float
from lantern_accel.families.llamagen import official
from lantern_accel.families.llamagen.features import FeatureFile
from lantern_accel.families.llamagen.model import (
    DrafterConfig,
    LlamaGenConfig,
    LlamaGenDrafter,
    LlamaGenGPT,
    LlamaGenManifest,
    llamagen_config,
)
from lantern_accel.families.llamagen.t5 import T5Text, encoder_parameters
from lantern_accel.families.llamagen.taught import Taught
from lantern_accel.families.llamagen.text import TextEncoder, WordText
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.tokenizer import check_texts, check_vocabulary, read_tokenizer
from lantern_accel.nn.draft_head import DraftHeadConfig
from lantern_accel.nn.vq import VQConfig, VQModel, pixels_to_uint8
from lantern_accel.strategy.values import Sampling

#: Things that the bundled model knows.
CAPTIONS = (
    "red heart",
    "grinning face",
    "dog face",
    "pizza",
    "rocket",
    "sunflower",
    "fish",
    "star",
)
_SIZED = re.compile(r"llamagen-(b|l|xl|xxl|3b)-(\d+)")


class LlamaGenFamily(VQFamily[LlamaGenManifest]):
    """LlamaGen's published models, and the bundled one, which has the same architecture."""

    name: ClassVar[str] = "llamagen"
    manifest_type: ClassVar[type[Manifest]] = LlamaGenManifest
    target_type, drafter_type, vq_type = LlamaGenGPT, LlamaGenDrafter, VQModel
    detect = staticmethod(official.detect)
    from_entry = staticmethod(official.published_manifest)
    rules = official.RULES
    drafters_near = staticmethod(official.drafters_near)
    published_drafter = staticmethod(official.published_drafter)
    #: One of 128 x 128 or larger, four of 64 x 64. More took the same time, and memory in proportion.
    pixels_at_once: ClassVar[int] = 128 * 128
    to_uint8 = staticmethod(pixels_to_uint8)

    def manifest_of_size(
        self, name: str, values: Mapping[str, object] | None = None
    ) -> LlamaGenManifest | None:
        """Return ``llamagen-SIZE-PIXELS``, or a target's configuration from a file."""
        match = _SIZED.fullmatch(name)
        if values is not None:
            target = LlamaGenConfig.model_validate(values)
        elif match and int(match[2]) % 16 == 0 and int(match[2]) > 0:
            target = llamagen_config(match[1].upper(), int(match[2]))
        else:
            return None
        codes = {"codebook_size": target.vocab_size}
        vq = official.published_vq().model_copy(update=codes)
        return self.fitting_drafter(
            LlamaGenManifest(name=name, target=target, vq=vq, defaults=official.defaults_of(target))
        )

    def examples(self, manifest: LlamaGenManifest) -> Sequence[Prompt]:
        """Return captions that the bundled model knows, or classes from all over ImageNet."""
        target = manifest.target
        if target.conditioning == "class":
            return sorted({i * target.num_classes // 8 for i in range(8)})
        return CAPTIONS

    def tiny(self) -> LlamaGenManifest:
        """Return a captioned model with a draft head, and a drafter that reads a lower block."""
        target = LlamaGenConfig(
            dim=32, n_layer=2, n_head=4, ffn_dim=48, vocab_size=48, grid=5, prefix_length=4,
            caption_dim=16,
        )  # fmt: skip
        vq = VQConfig(ch=32, ch_mult=(1,), num_res_blocks=1, codebook_size=48, codebook_dim=4)
        drafter = DrafterConfig.fitting(target, taps=(1,))
        return LlamaGenManifest(
            name="tiny-llamagen",
            target=target,
            drafter=drafter,
            draft_head=DraftHeadConfig(dim=32, hidden=8, rank=6, vocab_size=48, grid=5),
            vq=vq,
            defaults=official.defaults_of(target),
        )

    def tiny_conditions(self, model: Model[LlamaGenManifest], count: int, seed: int) -> Conditions:
        target = model.manifest.target
        prefix = target.prefix_length
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(count, prefix, target.caption_dim, generator=generator)
        pads = torch.randint(0, prefix, (count, 1), generator=generator)
        mask = torch.arange(prefix) >= pads
        return Conditions(features * mask.unsqueeze(-1), mask)

    def text_bytes(self, found: Found[LlamaGenManifest]) -> int:
        if "t5" not in found.files:
            return 0
        try:
            return 4 * encoder_parameters(read_json(found.files["t5"] / "config.json"))
        except KeyError as error:
            raise ModelError(
                f"{found.files['t5']}/config.json lacks {error}; fetch the text encoder again"
            ) from None

    def text(
        self,
        found: Found[LlamaGenManifest],
        device: torch.device,
        dtype: torch.dtype,
        adapt: Adapt = None,
    ) -> TextSource | None:
        manifest, parts = found.manifest, found.parts
        config = manifest.target
        if config.conditioning == "class":
            for what, given in (("embeddings", parts.embeddings), ("text encoder", parts.text)):
                if given is not None:
                    raise RequestError(
                        f"the model {manifest.name!r} is class-conditional, so it takes no {what}; leave "
                        f"--{what.replace(' ', '-')} out"
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
                adapt=adapt if on_device else None,
            )
        if "text" not in found.files:
            return None
        assert manifest.text is not None
        with without_data():
            encoder = TextEncoder(manifest.text)
        load_float(encoder, found.files["text"])
        encoder.eval().requires_grad_(False)
        words = read_tokenizer(found.files["text_tokenizer"])
        check_vocabulary(words, manifest.text.vocab_size, found.files["text_tokenizer"])
        return WordText(encoder, words, Taught(found.files["text"].parent))

    def conditions(
        self,
        model: Model[LlamaGenManifest],
        prompts: Sequence[Prompt],
        device: torch.device,
        dtype: torch.dtype,
        size: Size | None = None,
    ) -> Conditions:
        """Return class ids ``[n]``, or caption features ``[n, prefix, caption_dim]``."""
        config, name = model.manifest.target, model.manifest.name
        model.manifest.grid(size)
        if config.conditioning == "class":
            ids = [_class_id(prompt, config.num_classes, name) for prompt in prompts]
            mask = torch.ones(len(ids), 1, dtype=torch.bool)
            return Conditions(torch.tensor(ids).to(device), mask.to(device))
        texts = check_texts(prompts, name)
        if model.text is None:
            lacks = model.missing.get("text", "a text encoder in its folder")
            raise RequestError(f"the model {name!r} lacks {lacks}")
        features, mask = model.text.encode(texts)
        return Conditions(features.to(device=device, dtype=dtype), mask.to(device))

    def rows(
        self, model: Model[LlamaGenManifest], conditions: Conditions, sampling: Sampling
    ) -> Rows:
        """Return ``[cond; uncond]`` with guidance, else ``[cond]``."""
        condition, mask = conditions.condition, conditions.mask
        if not sampling.guided:
            return Rows(condition, mask)
        check_two_way(model, sampling)
        free = model.target.unconditional(condition.shape[0]).to(condition.dtype)
        # LlamaGen hides the same positions in the unconditional row; a drafter that was trained seeing
        # them expects what they hold.
        hides = model.drafter is None or model.drafter.config.mask_padding
        if condition.dim() == 3 and hides:
            free = free * mask.unsqueeze(-1).to(free.dtype)
        return Rows(torch.cat((condition, free)), mask)


def _class_id(prompt: Prompt, classes: int, name: str) -> int:
    value = whole(prompt.strip()) if isinstance(prompt, str) else prompt
    if value is None or not 0 <= value < classes:
        raise RequestError(
            f"the model {name!r} takes class ids from 0 to {classes - 1}, not {show(prompt)}"
        )
    return value
