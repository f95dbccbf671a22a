"""Make the image of relaxed strategies in the documentation: ``python tools/readme_images.py docs``.

It has eight seeds of each strategy, in float32. Trees are named, since default trees differ by machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

import lantern_accel
from lantern_accel.files import write_whole

#: Rows of each prompt: a label, and the strategy's settings.
SHOWN: dict[str, dict[str, Any]] = {
    "plain decoding": {"strategy": "vanilla"},
    "LANTERN, k = 10, delta = 0.4": {
        "strategy": "lantern", "k": 10, "delta": 0.4, "drafts": "dynamic:4,3,8",
    },
    "LANTERN++, k = 10, lambda = 2": {
        "strategy": "lantern++", "k": 10, "lam": 2.0, "drafts": "0,1,00,01,10,000,001,100",
    },
}  # fmt: skip
#: Two concepts that the model knows, and one that it does not (its card).
PROMPTS, SEEDS = ("dog face", "fish", "rocket"), range(8)
#: The side of one image, the left margin, and the height above a prompt's rows, in pixels.
SIDE, MARGIN, HEAD = 80, 230, 26


def strategies_sheet(pipeline: lantern_accel.Pipeline) -> Image.Image:
    """Return a labelled grid: a column per seed, a row per prompt and strategy."""
    block = HEAD + SIDE * len(SHOWN)
    sheet = Image.new("RGB", (MARGIN + SIDE * len(SEEDS), block * len(PROMPTS)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for part, prompt in enumerate(PROMPTS):
        pen.text((6, part * block + 5), prompt, fill="black", font=font)
        for line, (label, settings) in enumerate(SHOWN.items()):
            top = part * block + HEAD + line * SIDE
            made = [pipeline.generate(prompt, seed=seed, **settings) for seed in SEEDS]
            moved = sum(one.stats.total_variation_per_token for one in made) / len(made)
            tokens = sum(one.stats.step_compression for one in made) / len(made)
            pen.text((6, top + 14), label, fill="black", font=font)
            about = f"TV {moved:.3f} per token\n{tokens:.2f} tokens/step"
            pen.text((6, top + 32), about, fill="gray", font=font)
            for seed, one in zip(SEEDS, made, strict=True):
                x = MARGIN + seed * SIDE
                pen.text((x + 4, part * block + 5), f"seed {seed}", fill="gray", font=font)
                sheet.paste(one.images[0].resize((SIDE, SIDE), Image.Resampling.LANCZOS), (x, top))
    return sheet


def main() -> None:
    """Write the image into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the image of relaxed strategies.")
    parser.add_argument("folder", type=Path, help="folder of the image")
    path = parser.parse_args().folder / "strategies.png"
    with lantern_accel.load("lantern-emoji", device="cpu", dtype="float32") as pipeline:
        sheet = strategies_sheet(pipeline).quantize(256)
    write_whole(path, lambda stream: sheet.save(stream, format="png", optimize=True))


if __name__ == "__main__":
    main()
