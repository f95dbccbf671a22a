"""The family: a folder of ``beach.json`` and ``beach.safetensors``, which holds all parts together."""

import re
from typing import ClassVar, Literal

import torch

from lantern_accel.checkpoints.layouts import read_json
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.errors import RequestError
from lantern_accel.families.base import Conditions, Family, Found, Rows
from lantern_accel.families.manifest import Manifest
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import Sampling
from lantern_accel_pebbles.model import SIDE, Colours, Drafter, Painter, Sizes, Target

PREFIX = {"target": "sand.", "drafter": "wind.", "vq": "paint."}
NAMES = ["grey pebble", "white pebble", "red pebble", "wet pebble", "two pebbles"]


class Beach(Manifest):
    family: Literal["pebbles"] = "pebbles"
    target: Sizes
    drafter: Sizes | None = None
    vq: Colours
    defaults: ModelDefaults = ModelDefaults(sampling=Sampling(cfg_scale=2.0, top_k=0)).within(20)


class Pebbles(Family):
    name = "pebbles"
    manifest_type = Beach
    beside: ClassVar = {part: re.compile(rf"^(?!{re.escape(own)})") for part, own in PREFIX.items()}

    def detect(self, path, parts):
        if not (path / "beach.json").is_file():
            return None
        manifest = Beach(**read_json(path / "beach.json"))
        files = dict.fromkeys(PREFIX, path / "beach.safetensors")
        if manifest.drafter is None or parts.no_drafter:
            files.pop("drafter")
        return Found(manifest, files, parts)

    def build(self, manifest, part, ops):
        if part == "vq":
            return Painter(manifest.vq)
        return {"target": Target, "drafter": Drafter}[part](getattr(manifest, part), ops)

    def recipes(self, part, checkpoint, manifest):
        mine = [key for key in checkpoint if key.startswith(PREFIX[part])]
        return {key.removeprefix(PREFIX[part]): Recipe((key,)) for key in mine}

    def image_size(self, manifest, size=None):
        own = (manifest.target.columns * SIDE, manifest.target.rows * SIDE)
        if size not in (None, own):
            raise RequestError(f"{manifest.name} draws {own[0]}x{own[1]} pixels only")
        return own

    def examples(self, manifest):
        return NAMES[: manifest.target.prompts]

    def conditions(self, model, prompts, device, dtype, size=None):
        self.image_size(model.manifest, size)
        for prompt in prompts:
            if prompt not in NAMES:
                raise RequestError(f"{prompt!r} is not a pebble; choose from {', '.join(NAMES)}")
        ids = torch.tensor([NAMES.index(prompt) for prompt in prompts])
        return self._conditions(model, ids.to(device))

    def _conditions(self, model, ids):
        length = model.manifest.target.prefix_length
        places = torch.arange(length, device=ids.device)
        mask = torch.ones(len(ids), length, dtype=torch.bool, device=ids.device)
        return Conditions(ids[:, None] * length + places, mask)

    def rows(self, model, conditions, sampling):
        if not sampling.guided:
            return Rows(conditions.condition, conditions.mask)
        none = torch.full_like(conditions.condition[:, 0], model.manifest.target.prompts)
        free = self._conditions(model, none).condition
        return Rows(torch.cat((conditions.condition, free)), conditions.mask)

    def tokens(self, model, codes):
        ends = torch.full_like(codes[..., :1], model.manifest.target.colours)
        return torch.cat((codes, ends), dim=-1).flatten(1)

    def pixels(self, model, tokens, shape=None):
        c = model.manifest.target
        codes = tokens.view(len(tokens), c.rows, c.columns + 1)[:, :, : c.columns]
        colours = (model.vq.colour.clamp(0, 1) * 255).to(torch.uint8)[codes]
        return colours.repeat_interleave(SIDE, 1).repeat_interleave(SIDE, 2)

    def codebook(self, model):
        return model.vq.colour, False

    def tiny(self):
        drafter = Sizes(n_layer=1, prefix_length=1)
        return Beach(name="tiny-pebbles", target=Sizes(), drafter=drafter, vq=Colours())
