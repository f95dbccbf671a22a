"""Making a backend package from the template: the same files, under the name of a device.

The backend's file gets stubs of the whole interface, as it is in this version.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from lantern_accel.device.plugins import backend_specs, broken_plugins
from lantern_accel.errors import DeviceRequestError
from lantern_accel.porting.stubs import with_stubs

#: The name that the template has, as a word of its files and of their names.
TEMPLATE = "abacus"
PREFIX = "lantern_accel_"
#: What makes a device's name a name of modules and packages as well.
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST = 40


def check_name(name: str) -> None:
    """Raise DeviceRequestError where no backend can have the name: not an identifier, or taken."""
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:LONGEST].strip("_")
        near = f"; did you mean {plain}?" if _NAME.fullmatch(plain) else ""
        raise DeviceRequestError(
            f"{name[: 2 * LONGEST]!r} cannot name a device: use up to {LONGEST} lower-case letters, "
            f"digits and single '_', a letter first{near}"
        )
    specs = backend_specs()
    words = {word for spec in specs.values() for word in spec.aliases}
    if name in {"auto", *words, *specs, *broken_plugins()}:
        raise DeviceRequestError(
            f"{name!r} names a device already, or several; choose another name than those that "
            "`lantern-accel devices` lists"
        )


def scaffold(name: str, out: Path) -> Path:
    """Write the package ``lantern_accel_NAME`` into the folder ``out``; return the new folder.

    All of it or nothing. Raises DeviceRequestError for a name that cannot be taken, and where the folder
    is there already or cannot be made.
    """
    check_name(name)
    folder = out / f"{PREFIX}{name}"
    if folder.exists() or folder.is_symlink():
        raise DeviceRequestError(f"{folder} is there already; remove it, or choose another --out")
    if out.exists() and not out.is_dir():
        raise DeviceRequestError(f"{out} is not a folder; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".lantern-") as temporary:
        made = Path(temporary) / folder.name
        _copy(Path(__file__).with_name("template"), made, name)
        made.rename(folder)
    return folder


def _copy(source: Path, target: Path, name: str) -> None:
    """Copy a folder of the template with the device's name in the place of the template's."""
    target.mkdir()
    for one in source.iterdir():
        if one.name == "__pycache__":  # left by installers that compile
            continue
        path = target / _rename(one.name, name)
        if one.is_dir():
            _copy(one, path, name)
            continue
        text = one.read_text(encoding="utf-8")
        text = with_stubs(text) if one.name == "backend.py" else text
        path.write_text(_rename(text, name), encoding="utf-8")


def _rename(text: str, name: str) -> str:
    """Write the device's name wherever the template's is, in one go: a name may contain that word."""
    title = name.replace("_", " ").title()
    words = {
        # Distributions have "-" where modules have "_".
        f"lantern-accel-{TEMPLATE}": f"lantern-accel-{name.replace('_', '-')}",
        TEMPLATE: name,
        TEMPLATE.title(): title,
    }
    return re.sub("|".join(words), lambda found: words[found[0]], text)
