"""Fetching, selecting and rendering the images, on a tiny made-up set."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_accel.errors import DataError
from lantern_emoji import catalogue, data, render, sources

META = {
    "groups": {"1": "people-body", "3": "animals-nature", "8": "symbols", "9": "flags"},
    "subgroups": {"24": "person-gesture", "34": "animal-mammal", "95": "alphanum",
                  "98": "country-flag"},
}  # fmt: skip
ENTRIES: list[dict[str, Any]] = [
    {"label": "regional indicator A", "hexcode": "1F1E6"},
    {"label": "dog face", "hexcode": "1F436", "group": 3, "subgroup": 34, "tags": ["pet"]},
    {"label": "cat face", "hexcode": "1F431", "group": 3, "subgroup": 34},
    {"label": "ID button", "hexcode": "1F194", "group": 8, "subgroup": 95},
    {"label": "flag: Japan", "hexcode": "1F1EF-1F1F5", "group": 9, "subgroup": 98},
    {"label": "man bowing", "hexcode": "1F647-200D-2642-FE0F", "group": 1, "subgroup": 24},
]


def png(colour: str = "red", size: int = 64, box: int = 60) -> bytes:
    picture = Image.new("RGBA", (size, size), (0, 0, 0, 0))
    picture.paste(colour, ((size - box) // 2,) * 2 + ((size + box) // 2,) * 2)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def pack(folder: Path, package: sources.Package, files: dict[str, bytes]) -> sources.Package:
    """Write ``files`` as the package's tarball and return the package with its checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / package.filename, "w:gz") as archive:
        for name, blob in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(blob)
            archive.addfile(member, io.BytesIO(blob))
    found = sources.integrity(folder / package.filename)
    return sources.Package(package.name, package.version, found, "MIT", "made up")


def square(colour: str) -> str:
    return f'<rect x="2" y="2" width="12" height="12" fill="{colour}"/>'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose downloads are a made-up raster set and a made-up SVG set."""
    downloads = tmp_path / "downloads"
    codes = ("cldr", "emojibase", "iamcal", "joypixels", "github")
    names = {f"package/en/shortcodes/{code}.json": b"{}" for code in codes}
    names["package/en/data.json"] = json.dumps(ENTRIES).encode()
    names["package/meta/groups.json"] = json.dumps(META).encode()
    emojibase = pack(downloads, sources.Package("made-names", "1.0.0", "", "", ""), names)
    rasters = {"img/1f436.png": png(), "img/1f431.png": b"broken", "img/1f436-1f3fb.png": png()}
    raster = pack(downloads, sources.Package("made-raster", "1.0.0", "", "", ""), rasters)
    icons = {
        "width": 16,
        "height": 16,
        "icons": {"dog-face": {"body": square("#00f")}, "flag-for-japan": {"body": square("red")}},
        "aliases": {"cat-face": {"parent": "dog-face"}},
    }
    iconify = pack(
        downloads,
        sources.Package("@made/svg", "1.0.0", "", "", ""),
        {"icons.json": json.dumps(icons).encode()},
    )
    monkeypatch.setattr(sources, "NAMES", emojibase)
    monkeypatch.setattr(sources, "PACKAGES", (emojibase, raster, iconify))
    sets = {"noto": (raster, "img/"), "fxemoji": (iconify, "icons.json")}
    monkeypatch.setattr(sources, "IMAGE_SETS", sets)
    monkeypatch.setattr(data, "STYLES", tuple(sets))
    monkeypatch.setattr(data, "_RASTER_PACKAGES", (raster,))
    return tmp_path


def test_prepare_then_load(cache: Path) -> None:
    made = data.prepare_data(cache)
    shown = [(r.style, r.concept) for r in made.records]
    assert shown == [
        ("noto", "dog face"),
        ("fxemoji", "dog face"),
        ("fxemoji", "cat face"),
        ("fxemoji", "flag of japan"),
    ]
    assert made.images.shape == (4, 64, 64, 3)
    assert list(made.manifest["skipped"]["noto"]) == ["1f431"]
    assert made.records[0].tags == ("pet",)
    assert made.sampling_weights().sum() == pytest.approx(1.0)
    again = data.load_data(cache)
    assert again.records == made.records
    assert np.array_equal(again.images, made.images)
    assert made.coverage is not None
    assert again.coverage is not None
    assert np.array_equal(again.coverage, made.coverage)
    assert made.coverage.shape == (4, 64, 64)
    assert again.manifest == made.manifest


def test_a_changed_tarball_is_refused(cache: Path) -> None:
    tarball = cache / "downloads" / sources.NAMES.filename
    tarball.write_bytes(tarball.read_bytes() + b"x")
    with pytest.raises(DataError, match="delete the file and try again"):
        data.prepare_data(cache)


def test_pictures_are_centred_on_white_with_a_margin() -> None:
    for size, box in ((64, 60), (256, 100), (32, 32), (64, 10)):
        drawn = render.compose(Image.open(io.BytesIO(png("red", size, box))))
        assert drawn.shape == (64, 64, 4)
        image, coverage = drawn[..., :3], drawn[..., 3]
        assert coverage[0].max() == 0
        assert coverage[32, 32] == 255
        assert (image[0] == 255).all()
        assert (image[:, -1] == 255).all()
        assert image[32, 32].tolist() == [255, 0, 0]
        assert image[4, 32].tolist() == image[59, 32].tolist() == [255, 0, 0]


def test_selection_weights_and_flips() -> None:
    concepts = {c.name: c for c in catalogue._concepts(ENTRIES, META, [])}
    assert set(concepts) == {"dog face", "cat face", "flag of japan", "man bowing"}
    assert concepts["dog face"].weight == 1.0
    assert concepts["dog face"].flippable
    assert concepts["flag of japan"].weight == 0.15
    assert not concepts["flag of japan"].flippable
    assert concepts["man bowing"].weight == 0.3
    assert not catalogue.flippable_of("people-body", "hands", "rightwards hand")


def test_the_split_is_stable_and_spares_common_things() -> None:
    assert all(catalogue.split_of(name) == "train" for name in catalogue.ALWAYS_TRAINED)
    assert catalogue.split_of("violin") == "heldout"
    share = sum(catalogue.split_of(f"thing {i}") == "heldout" for i in range(3000)) / 3000
    assert 0.02 < share < 0.06
