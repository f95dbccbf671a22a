"""Make the pictures that the README shows: ``python tools/readme_pictures.py docs``.

``strategies.png``: fixed prompts and seeds, a row a strategy, nothing picked by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lantern_accel
from lantern_accel.files import write_whole
from lantern_accel.strategy.values import STRATEGIES

PROMPTS = (
    "red heart",
    "grinning face",
    "dog face",
    "pizza",
    "sunflower",
    "fish",
    "rocket",
    "red apple",
)
SEED = 7
SCALE = 2
MARGIN = 110
HEAD = 26


def strategies_sheet(model: str) -> Image.Image:
    """Return a labelled grid: a column a prompt, a row a strategy, all with the same seed."""
    rows = []
    with lantern_accel.load(model, device="cpu") as pipeline:
        for name in STRATEGIES:
            result = pipeline.generate(list(PROMPTS), strategy=name, seed=SEED, batch_size=1)
            rows.append((name, result.stats.step_compression, result.images))
    cell = rows[0][2][0].width * SCALE
    sheet = Image.new("RGB", (MARGIN + cell * len(PROMPTS), HEAD + cell * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column, prompt in enumerate(PROMPTS):
        pen.text((MARGIN + column * cell + 4, 6), prompt, fill="black", font=font)
    for line, (name, compression, images) in enumerate(rows):
        top = HEAD + line * cell
        pen.text((6, top + cell // 2 - 18), name, fill="black", font=font)
        pen.text((6, top + cell // 2), f"{compression:.2f} a step", fill="gray", font=font)
        for column, image in enumerate(images):
            large = image.resize((cell, cell), Image.Resampling.LANCZOS)
            sheet.paste(large, (MARGIN + column * cell, top))
    return sheet


def main() -> None:
    """Write the pictures into the folder named on the command line."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    model = sys.argv[2] if len(sys.argv) > 2 else "lantern-emoji"
    sheet = strategies_sheet(model)
    write_whole(out / "strategies.png", lambda stream: sheet.save(stream, format="png"))
    print(out / "strategies.png")


if __name__ == "__main__":
    main()
