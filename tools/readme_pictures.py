"""Make the image of relaxed strategies in the documentation: ``python tools/readme_pictures.py docs``.

``strategies.png`` has eight seeds of plain decoding, LANTERN and LANTERN++ for each of three prompts, in
float32. The trees are named, since default trees differ by machine. The README names its own command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lantern_accel
from lantern_accel.files import write_whole

#: Rows of each prompt: a label, and the strategy's settings.
SHOWN = {
    "plain decoding": {"strategy": "vanilla"},
    "LANTERN, k = 10, delta = 0.4": {
        "strategy": "lantern", "k": 10, "delta": 0.4, "tree": "dynamic:4,3,8",
    },
    "LANTERN++, k = 10, lambda = 2": {
        "strategy": "lantern++", "k": 10, "lam": 2.0, "tree": "0,1,00,01,10,000,001,100",
    },
}  # fmt: skip
#: Two concepts that the model knows, and one that it does not (its card).
PROMPTS = ("dog face", "fish", "rocket")
SEEDS = tuple(range(8))
#: The side of one image, the left margin, and the height above a prompt's rows, in pixels.
SIDE, MARGIN, HEAD = 80, 230, 26


def strategies_sheet(pipeline: lantern_accel.Pipeline) -> Image.Image:
    """Return a labelled grid: a column per seed, a row per prompt and strategy."""
    block = HEAD + SIDE * len(SHOWN)
    sheet = Image.new("RGB", (MARGIN + SIDE * len(SEEDS), block * len(PROMPTS)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for part, prompt in enumerate(PROMPTS):
        pen.text((6, part * block + 5), prompt, fill="black", font=font)
        for column, seed in enumerate(SEEDS):
            where = (MARGIN + column * SIDE + 4, part * block + 5)
            pen.text(where, f"seed {seed}", fill="gray", font=font)
        for line, (label, settings) in enumerate(SHOWN.items()):
            top = part * block + HEAD + line * SIDE
            made = [
                pipeline.generate(prompt, seed=seed, **settings)  # type: ignore[arg-type]
                for seed in SEEDS
            ]
            moved = sum(one.stats.total_variation_per_token for one in made) / len(made)
            tokens = sum(one.stats.step_compression for one in made) / len(made)
            pen.text((6, top + SIDE // 2 - 26), label, fill="black", font=font)
            pen.text((6, top + SIDE // 2 - 8), f"TV {moved:.3f} per token", fill="gray", font=font)
            pen.text((6, top + SIDE // 2 + 10), f"{tokens:.2f} tokens/step", fill="gray", font=font)
            print(f"{prompt}, {label}: TV {moved:.4f}, {tokens:.2f} tokens per step")
            for column, one in enumerate(made):
                large = one.images[0].resize((SIDE, SIDE), Image.Resampling.LANCZOS)
                sheet.paste(large, (MARGIN + column * SIDE, top))
    return sheet


def main() -> None:
    """Write the image into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the image")
    parser.add_argument("--model", default="lantern-emoji", help="a bundled model or a folder")
    given = parser.parse_args()
    with lantern_accel.load(given.model, device="cpu", dtype="float32") as pipeline:
        sheet = strategies_sheet(pipeline).quantize(256)
    path = given.folder / "strategies.png"
    write_whole(path, lambda stream: sheet.save(stream, format="png", optimize=True))
    print(path)


if __name__ == "__main__":
    main()
