"""Wheels for a machine without a network: fetched here by ``on_device.py --pack``, used there by it.

Only the standard library: this runs before anything else can be imported. A wheel is a zip file of what
goes into site-packages, so that no pip is needed where it is used.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Next to the tree, ignored by git.
WHEELS = ROOT / ".wheels"
#: What a machine with the device has, in its vendor's version; never packed.
THERE = ("torch", "numpy", "triton")
#: Builds of Linux from which any newer one takes wheels.
BUILDS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")


def closure(names: Iterable[str], python: str) -> dict[str, str]:
    """Return packages and what they require for a Python, as installed here: versions by name."""
    from packaging.requirements import Requirement

    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: dict[str, str] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found or name in THERE:
            continue
        found[name] = importlib.metadata.version(name)
        for line in importlib.metadata.requires(name) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate(there):
                todo.append(need.name)
    return found


def fetch(names: Iterable[str], python: str, folder: Path = WHEELS) -> list[Path]:
    """Fetch the wheels of packages and of what they require for a Python of this kind of processor."""
    wanted = [f"{name}=={version}" for name, version in sorted(closure(names, python).items())]
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for build in BUILDS:
        command += ["--platform", f"{build}_{platform.machine()}"]
    subprocess.run([*command, *wanted], check=True)
    return sorted(folder.glob("*.whl"))


def travels(folder: Path = WHEELS) -> int:
    """Return the bytes of the tree as git lists it, with the wheels."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    paths = [ROOT / os.fsdecode(name) for name in set(listed) if name]
    return sum(path.lstat().st_size for path in [*paths, *folder.glob("*.whl")] if path.exists())


def unpack_wheels(folder: Path = WHEELS) -> list[str]:
    """Unpack the wheels of packages that are absent or older here; return what to put on the path."""
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, tags = wheel.stem.split("-", 2)
        fits = re.search(rf"py3|cp{sys.version_info[0]}{sys.version_info[1]}\b|abi3", tags)
        if not fits or _numbers(_installed_version(name)) >= _numbers(version):
            continue
        site = Path(tempfile.gettempdir()) / f"lantern-accel-wheels-{os.getuid()}" / wheel.stem
        if not site.is_dir():
            site.parent.mkdir(exist_ok=True)
            with (
                tempfile.TemporaryDirectory(dir=site.parent) as part,
                zipfile.ZipFile(wheel) as held,
            ):
                held.extractall(Path(part) / "site")
                (Path(part) / "site").rename(site)
        found.append(str(site))
    return found


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", version.partition("+")[0])]
