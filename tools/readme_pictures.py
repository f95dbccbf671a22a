"""Draw the picture of strategies in the documentation: ``python tools/readme_pictures.py docs``.

``strategies.png`` shows eight prompts, one row per strategy, all with one seed, in float32; no picture is
chosen by its look. Exact strategies draw the same pictures. The README names the command of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import lantern_accel
from lantern_accel.files import write_whole

#: Rows of the picture: exact strategies, then relaxed ones.
SHOWN = ("vanilla", "eagle", "eagle2", "scd", "self", "lantern", "lantern++")
COMPARED = (
    "red heart", "grinning face", "dog face", "pizza", "sunflower", "fish", "rocket", "red apple",
)  # fmt: skip
SEED = 7
#: The side of one picture on the sheet, its left margin and its head, in pixels.
SMALL, MARGIN, HEAD = 128, 130, 26


def strategies_sheet(pipeline: lantern_accel.Pipeline) -> Image.Image:
    """Return a labelled grid: one column per prompt, one row per strategy, one seed."""
    sheet = Image.new("RGB", (MARGIN + SMALL * len(COMPARED), HEAD + SMALL * len(SHOWN)), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column, prompt in enumerate(COMPARED):
        pen.text((MARGIN + column * SMALL + 4, 6), prompt, fill="black", font=font)
    for line, name in enumerate(SHOWN):
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
    """Write the picture into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the picture")
    parser.add_argument("--model", default="lantern-emoji", help="a bundled model or a folder")
    given = parser.parse_args()
    with lantern_accel.load(given.model, device="cpu", dtype="float32") as pipeline:
        sheet = strategies_sheet(pipeline).quantize(256)
    path = given.folder / "strategies.png"
    write_whole(path, lambda stream: sheet.save(stream, format="png", optimize=True))
    print(path)


if __name__ == "__main__":
    main()
