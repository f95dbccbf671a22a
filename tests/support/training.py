"""Made-up images and tiny configurations for every training stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lantern_accel.files import write_json
from lantern_emoji.data import SIZE, Record

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (30, 60, 220),
    "gold": (230, 180, 30),
}
TINY: dict[str, dict[str, Any]] = {
    "tokenizer": {
        "steps": 4,
        "batch_size": 4,
        "precision": "float32",
        "vq": {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "z_channels": 32,
               "codebook_size": 32, "codebook_dim": 4},
    },
    "target": {"steps": 4, "batch_size": 4, "dim": 32, "n_layer": 1, "n_head": 2, "ffn_dim": 32,
               "text_dim": 16, "text_layers": 1, "text_heads": 2, "prefix_length": 6,
               "concept_weights": {"red square": 2.0}, "scenes": 0,
               "compile": False, "evaluate_every": 2, "checkpoint_every": 2},
    "drafter": {"steps": 4, "batch_size": 4, "compile": False, "evaluate_every": 2,
                "checkpoint_every": 2},
}  # fmt: skip


def write_images(cache: Path) -> None:
    """Put 16 made-up images where `train data` would put its own."""
    folder = cache / "data" / f"emoji-{SIZE}"
    images, records = [], []
    for i in range(16):
        name = list(COLOURS)[i % 4]
        image = np.full((SIZE, SIZE, 3), 255, dtype=np.uint8)
        image[8 + i : 40, 8:40] = COLOURS[name]
        images.append(image)
        records.append(
            Record(
                index=i, style="noto", concept=f"{name} square", tags=("shape",), group="symbols",
                subgroup="geometric", hexcode=str(i), weight=1.0, flippable=True,
                split="heldout" if name == "gold" else "train",
            )
        )  # fmt: skip
    folder.mkdir(parents=True)
    np.save(folder / "images.npy", np.stack(images))
    (folder / "records.jsonl").write_text("".join(r.model_dump_json() + "\n" for r in records))
    write_json(folder / "manifest.json", {"images": 16})


def write_tiny_training(base: Path) -> None:
    """Write ``STAGE.json`` for every stage, and ``start``, a folder with a cache of images.

    Every step is kept, and there are some: a run can be killed between two of them.
    """
    write_images(base / "start" / "cache")
    for name, values in TINY.items():
        steps = {"steps": 20, "checkpoint_every": 1}
        write_json(base / f"{name}.json", {**values, **steps})
