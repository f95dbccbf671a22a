"""Sample pictures from a target in training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import LanternWarning
from lantern_accel.families.llamagen.text import tokenize
from lantern_accel.generation.result import image_grid, save_image
from lantern_accel.nn.vq import VQModel, pixels_to_uint8
from lantern_accel.strategy.values import Sampling, Strategy
from lantern_emoji.target import TextTarget

PROMPTS = (
    "red heart", "grinning face", "dog face", "pizza", "sunflower", "rocket", "red apple", "fish",
    "dog face on blue", "red apple left of dog face", "star above house", "blue cat face",
)  # fmt: skip


class SampleSheet:
    """Draws the same prompts with the same random numbers each time it is called."""

    def __init__(self, vq: VQModel, text_tokenizer: Any, device: torch.device) -> None:
        self.vq, self.text_tokenizer, self.device = vq, text_tokenizer, device
        self.sampling = Sampling(cfg_scale=2.5, top_k=min(50, vq.config.codebook_size))

    @torch.no_grad()
    def __call__(self, model: TextTarget, path: Path) -> None:
        """Write the pictures of ``model`` as one PNG."""
        ops = TensorOps()
        ops.device = self.device
        count = len(PROMPTS)
        with warnings.catch_warnings():
            # A prompt that is cut to a short prefix is still a picture to look at.
            warnings.simplefilter("ignore", LanternWarning)
            ids, mask = tokenize(self.text_tokenizer, PROMPTS, model.text.config)
        ids, mask = ids.to(self.device), mask.to(self.device)
        condition = model.text(ids, mask)
        free = model.gpt.unconditional(count) * mask.unsqueeze(-1)
        engine = Engine(model.gpt, None, ops, Strategy(), self.sampling, batch=count)
        randomness = engine.randomness(0, list(range(count)))
        engine.start(torch.cat((condition, free)), mask, randomness)
        grid = model.gpt.config.grid
        codes = engine.run().tokens.to(self.device).view(-1, grid, grid)
        pixels = pixels_to_uint8(self.vq.decode(codes)).cpu().numpy()
        save_image(image_grid([*map(Image.fromarray, pixels)], 6), path)
