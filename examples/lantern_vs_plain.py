"""Compare strategies on your own prompts: images in one grid, a table of speed and quality loss.

python examples/lantern_vs_plain.py --model lantern-emoji prompts.txt -o compared.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

import lantern_accel

STRATEGIES = ("vanilla", "eagle", "lantern", "lantern++")


def main() -> None:
    """Generate the image of every prompt with every strategy and the same seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="a text file, one prompt per line")
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path, default=Path("compared.png"))
    options = parser.parse_args()
    prompts = options.prompts.read_text(encoding="utf-8").split("\n")
    prompts = [line.strip() for line in prompts if line.strip()]
    rows: list[list[Image.Image]] = []
    print("strategy    s/image  tokens/step  total variation per token")
    with lantern_accel.load(options.model, device=options.device) as pipeline:
        for strategy in STRATEGIES:
            settings = {"strategy": strategy, "seed": options.seed, "batch_size": 1}
            pipeline.generate(prompts[0], **settings)  # compiles what the strategy needs
            result = pipeline.generate(prompts, **settings)
            rows.append(result.images)
            stats = result.stats
            seconds = (stats.seconds.prefill + stats.seconds.decode) / len(prompts)
            loss = f"{stats.total_variation_per_token:.3f}"
            print(f"{strategy:10} {seconds:8.2f} {stats.step_compression:12.2f}  {loss}")
    width, height = rows[0][0].size
    grid = Image.new("RGB", (width * len(prompts), height * len(rows)))
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            grid.paste(image, (x * width, y * height))
    grid.save(options.output)
    print(f"wrote {options.output}: a row for each strategy, a column for each prompt")


if __name__ == "__main__":
    main()
