"""The forty prompts that the bundled model is judged by, and a grid of them: every strategy side by side.

They were fixed before any image of them was seen; the grid is of one seed, with nothing left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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
#: Columns of rows, pixels between images, and pixels above them for the strategies' names.
BLOCKS, GAP, HEAD = 2, 2, 16


def save_grid(
    pipeline: Pipeline,
    prompts: Sequence[str],
    path: Path,
    *,
    seed: int = 0,
    strategies: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Generate each prompt with each strategy, image i always from the same seed, as one PNG."""
    made = []
    for name in strategies:
        made.append(pipeline.generate(list(prompts), strategy=name, seed=seed).images)
        say(f"{name}: {len(made[-1])} images")
    side = made[0][0].width
    label, rows = 3 * max(side, 64), -(-len(prompts) // BLOCKS)
    block = label + len(strategies) * (side + GAP)
    sheet = Image.new("RGB", (BLOCKS * block, HEAD + rows * (side + GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for b in range(BLOCKS):
        for s, name in enumerate(strategies):
            pen.text((b * block + label + s * (side + GAP), 2), name, fill="black", font=font)
    for i, prompt in enumerate(prompts):
        x, y = i // rows * block, HEAD + i % rows * (side + GAP)
        pen.text((x + 4, y + side // 2 - 6), prompt, fill="black", font=font)
        for s, images in enumerate(made):
            sheet.paste(images[i], (x + label + s * (side + GAP), y))
    save_image(sheet, path)
