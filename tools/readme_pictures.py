"""Draw the pictures of the README and the documentation: ``python tools/readme_pictures.py docs``.

``showcase.png`` shows ten prompts, drawn by ``lantern++``. They were chosen by name: all are among the
twenty common concepts of :data:`lantern_accel.evaluation.prompts.SEEN`, and all are ones that the model
draws recognisably. ``strategies.png`` shows eight prompts, one row per strategy; nothing in it was
chosen for how it came out. Both are first attempts with one seed, in float32, which every processor
computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lantern_accel
from lantern_accel.files import write_whole
from lantern_accel.strategy.values import STRATEGIES

SHOWCASE = (
    "red heart",
    "cat face",
    "sunflower",
    "evergreen tree",
    "panda",
    "ghost",
    "smiling face with sunglasses",
    "frog",
    "birthday cake",
    "pizza",
)
COMPARED = (
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
#: Sides of one picture on the sheets, in pixels.
LARGE, SMALL = 160, 128
GAP, CAPTION, MARGIN, HEAD = 12, 26, 130, 26


def showcase_sheet(pipeline: lantern_accel.Pipeline, columns: int = 5) -> Image.Image:
    """Return ten prompts drawn by ``lantern++``, each with its prompt underneath."""
    images = pipeline.generate(list(SHOWCASE), strategy="lantern++", seed=SEED, batch_size=1).images
    wide, high = LARGE + GAP, LARGE + CAPTION
    rows = -(-len(SHOWCASE) // columns)
    sheet = Image.new("RGB", (wide * columns, high * rows), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (prompt, image) in enumerate(zip(SHOWCASE, images, strict=True)):
        left, top = wide * (place % columns) + GAP // 2, high * (place // columns)
        sheet.paste(image.resize((LARGE, LARGE), Image.Resampling.LANCZOS), (left, top))
        middle = (left + LARGE // 2, top + LARGE + CAPTION // 2 - 3)
        size = 15 if len(prompt) < 20 else 12
        pen.text(middle, prompt, fill="#444", font=ImageFont.load_default(size=size), anchor="mm")
    return sheet


def strategies_sheet(pipeline: lantern_accel.Pipeline) -> Image.Image:
    """Return a labelled grid: one column per prompt, one row per strategy, one seed."""
    sheet = Image.new(
        "RGB", (MARGIN + SMALL * len(COMPARED), HEAD + SMALL * len(STRATEGIES)), "white"
    )
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column, prompt in enumerate(COMPARED):
        pen.text((MARGIN + column * SMALL + 4, 6), prompt, fill="black", font=font)
    for line, name in enumerate(STRATEGIES):
        result = pipeline.generate(list(COMPARED), strategy=name, seed=SEED, batch_size=1)
        top = HEAD + line * SMALL
        pen.text((6, top + SMALL // 2 - 18), name, fill="black", font=font)
        label = f"{result.stats.step_compression:.2f} tokens/step"
        pen.text((6, top + SMALL // 2), label, fill="gray", font=font)
        for column, image in enumerate(result.images):
            large = image.resize((SMALL, SMALL), Image.Resampling.LANCZOS)
            sheet.paste(large, (MARGIN + column * SMALL, top))
    return sheet


def main() -> None:
    """Write the pictures into the folder that the command line names."""
    sheets: dict[str, Callable[[lantern_accel.Pipeline], Image.Image]] = {
        "showcase": showcase_sheet,
        "strategies": strategies_sheet,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    parser.add_argument("--only", choices=sorted(sheets), help="draw this picture only")
    parser.add_argument("--model", default="lantern-emoji", help="a bundled model or a folder")
    given = parser.parse_args()
    with lantern_accel.load(given.model, device="cpu", dtype="float32") as pipeline:
        for name in [given.only] if given.only else list(sheets):
            sheet = sheets[name](pipeline)
            path = given.folder / f"{name}.png"
            write_whole(path, lambda stream, one=sheet: one.save(stream, format="png"))  # type: ignore[misc]
            print(path)


if __name__ == "__main__":
    main()
