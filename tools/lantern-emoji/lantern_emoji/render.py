"""From packages to pixels: reading the image sets, drawing SVG, centring pictures on white."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lantern_emoji import catalogue

SIZE = 64
"""Side of a training image in pixels."""
CONTENT = 60
"""Side of the square that a picture fills; the rest is white margin."""
_RASTER = 4 * SIZE


def compose(picture: Image.Image) -> NDArray[np.uint8]:
    """Return a picture of any mode and size centred on white, uint8 ``[64, 64, 4]``.

    The fourth channel is the coverage, so that ``rgb - (255 - coverage)`` is the picture alone and
    another background can be put under it. Transparent borders are cut; the longer side becomes
    60 px, unless the picture already has 56 to 62 px and would only be blurred. Raises
    ``ValueError`` for an empty picture.
    """
    rgba = picture.convert("RGBA")
    box = rgba.getchannel("A").point(lambda a: 255 if a > 8 else 0).getbbox()
    if box is None:
        raise ValueError("the picture is fully transparent")
    # Premultiplied alpha, so that colours under transparent pixels do not bleed in.
    cut = rgba.crop(box).convert("RGBa")
    longest = max(cut.size)
    if not CONTENT - 4 <= longest <= CONTENT + 2:
        width, height = (max(1, round(side * CONTENT / longest)) for side in cut.size)
        cut = cut.resize((width, height), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (SIZE, SIZE), (255, 255, 255, 255))
    corner = ((SIZE - cut.width) // 2, (SIZE - cut.height) // 2)
    straight = cut.convert("RGBA")
    canvas.alpha_composite(straight, corner)
    coverage = Image.new("L", (SIZE, SIZE), 0)
    coverage.paste(straight.getchannel("A"), corner)
    canvas.putalpha(coverage)
    return np.asarray(canvas, dtype=np.uint8)


def render_svg(svg: str) -> Image.Image:
    """Return an SVG document drawn 256 px wide, RGBA."""
    import resvg_py

    drawn = resvg_py.svg_to_bytes(svg_string=svg, width=_RASTER, height=_RASTER)
    return Image.open(io.BytesIO(bytes(drawn)))


def decode(blob: bytes) -> Image.Image:
    """Open an encoded picture."""
    return Image.open(io.BytesIO(blob))


def raster_set(tarball: Path, folder: str, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield hexcode and encoded picture of the wanted files of a folder named by hexcode."""
    with tarfile.open(tarball) as archive:
        for member in archive:
            if member.name.startswith(folder) and member.isfile():
                hexcode = catalogue.bare(Path(member.name).stem)
                if hexcode in wanted:
                    stream = archive.extractfile(member)
                    assert stream is not None
                    yield hexcode, stream.read()


def svg_folder(tarball: Path, folder: str) -> dict[str, str]:
    """Return the SVG documents of a folder by file name."""
    with tarfile.open(tarball) as archive:
        found = {}
        for member in archive:
            if member.name.startswith(folder) and member.name.endswith(".svg"):
                stream = archive.extractfile(member)
                assert stream is not None
                found[Path(member.name).stem] = stream.read().decode("utf-8", "replace")
        return found


def iconify(tarball: Path, member: str) -> dict[str, str]:
    """Return the SVG documents of an Iconify set by icon name, plain aliases included."""
    with tarfile.open(tarball) as archive:
        stream = archive.extractfile(member)
        assert stream is not None
        icons = json.load(stream)
    sides = {
        "left": 0,
        "top": 0,
        "width": icons.get("width", 16),
        "height": icons.get("height", 16),
    }
    found = {}
    for name, icon in icons["icons"].items():
        box = {side: icon.get(side, default) for side, default in sides.items()}
        view = f"{box['left']} {box['top']} {box['width']} {box['height']}"
        found[name] = (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view}">{icon["body"]}</svg>'
        )
    for name, alias in icons.get("aliases", {}).items():
        if set(alias) == {"parent"} and alias["parent"] in found:
            found.setdefault(name, found[alias["parent"]])
    return found
