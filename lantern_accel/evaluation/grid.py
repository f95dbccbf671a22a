"""The forty prompts that the bundled model is judged by, and a grid of them: every strategy side by side.

They were fixed before any picture of them was seen; the grid is of one seed, with nothing left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.result import save_image

SEEN = (
    "red heart", "grinning face", "dog face", "cat face", "pizza", "sunflower", "rocket",
    "red apple", "fish", "star", "house", "evergreen tree", "automobile", "panda", "strawberry",
    "birthday cake", "ghost", "smiling face with sunglasses", "blue heart", "frog",
)  # fmt: skip
"""Concepts that training shows often."""

HELD_OUT_CONCEPTS = (
    "green book", "tropical fish", "mouse face", "black bird", "kissing face with smiling eyes",
    "bus", "broccoli", "volcano", "balloon", "hedgehog",
)  # fmt: skip
"""Concepts that no training image shows (``tools/lantern-emoji: catalogue.split_of``)."""

HELD_OUT_COMPOSITIONS = (
    "rabbit face on yellow", "fish on yellow", "green apple on blue", "blue cat face",
    "purple house", "orange fish", "cat face left of house", "red apple left of evergreen tree",
    "star above umbrella", "red heart above ghost",
)  # fmt: skip
"""Pairings that no training scene shows (``tools/lantern-emoji: scenes.scene_split``)."""

FORTY = (*SEEN, *HELD_OUT_CONCEPTS, *HELD_OUT_COMPOSITIONS)


def draw_grid(
    pipeline: Pipeline,
    prompts: Sequence[str],
    path: Path,
    *,
    seed: int = 0,
    strategies: Sequence[str],
    blocks: int = 2,
    scale: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Draw each prompt with each strategy, image i always from the same seed, as one PNG.

    The prompts are laid out in ``blocks`` columns of rows; ``scale`` enlarges the pictures.
    """
    made: list[list[Any]] = []
    for name in strategies:
        images = pipeline.generate(list(prompts), strategy=name, seed=seed).images
        made.append([i.resize((i.width * scale, i.height * scale)) for i in images])
        say(f"{name}: {len(images)} pictures")
    side = made[0][0].width
    label, gap, head = 3 * max(side, 64), 2, 16
    rows = -(-len(prompts) // blocks)
    block = label + len(strategies) * (side + gap)
    size = (blocks * block, head + rows * (side + gap))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    for b in range(blocks):
        for s, name in enumerate(strategies):
            pen.text((b * block + label + s * (side + gap), 2), name, fill="black", font=font)
    for i, prompt in enumerate(prompts):
        column, row = divmod(i, rows)
        x, y = column * block, head + row * (side + gap)
        pen.text((x + 4, y + side // 2 - 6), prompt, fill="black", font=font)
        for s in range(len(strategies)):
            sheet.paste(made[s][i], (x + label + s * (side + gap), y))
    save_image(sheet, path)
