"""Many pictures as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lantern_accel.files import write_whole


def save_grid(images: NDArray[np.uint8], path: Path, columns: int = 12) -> None:
    """Write images uint8 ``[n, H, W, 3]`` as one PNG, ``columns`` wide."""
    count, height, width, _ = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * height, columns * width, 3), 200, np.uint8)
    for i, image in enumerate(images):
        y, x = divmod(i, columns)
        sheet[y * height : (y + 1) * height, x * width : (x + 1) * width] = image
    write_whole(path, lambda stream: Image.fromarray(sheet).save(stream, format="PNG"))
