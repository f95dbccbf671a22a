"""Draw thousands of images in one process and watch its memory: python tests/soak.py --images 5000.

Prompts, strategies, batch sizes and settings change from request to request, on a tiny model with random
weights. Memory is what the process holds (RSS); after a warm-up it may grow by at most one percent.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern", "lantern++", "sjd", "scd")
WORDS = ("red", "blue", "heart", "dog", "fish", "face", "sea", "in", "the", "a")


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say what a process holds (/proc/self/status)")


def main() -> None:
    """Draw, and print memory at the end of the warm-up and over the last tenth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of the images")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from support.models import write_tiny_model

    import lantern_accel

    rng = random.Random(0)
    drawn, readings, began = 0, [], time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        lantern_accel.load(
            write_tiny_model(Path(folder, "tiny")), device="cpu", dtype=given.dtype
        ) as pipeline,
    ):
        while drawn < given.images:
            strategy = rng.choice(STRATEGIES)
            prompts = [
                " ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
            ]
            done = pipeline.generate(
                prompts,
                strategy=strategy,
                k=3 if strategy.startswith("lantern") else None,
                num_images=rng.randint(1, 3),
                batch_size=rng.randint(1, 4),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                cfg_scale=rng.choice([1.0, 2.0, 7.5]),
                top_k=rng.choice([0, 10]),
                seed=drawn,
            )
            drawn += len(done.images)
            readings.append((drawn, resident()))
    gc.collect()
    first = [held for at, held in readings if at >= given.warm_up * given.images]
    tenth = max(len(first) // 9, 1)
    before, after = statistics.median(first[:tenth]), statistics.median(first[-tenth:])
    figures = {
        "images": drawn,
        "requests": len(readings),
        "seconds": round(time.monotonic() - began, 1),
        "MiB after the warm-up": round(before / 2**20, 1),
        "MiB at the end": round(after / 2**20, 1),
        "growth": f"{after / before - 1:+.2%}",
        "MiB every tenth": [
            round(r[1] / 2**20, 1) for r in readings[:: max(len(readings) // 10, 1)]
        ],
    }
    print(json.dumps(figures, indent=2))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(after > 1.01 * before)


if __name__ == "__main__":
    main()
