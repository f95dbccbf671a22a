"""Reads what is here before torch or the SDK is imported: the mode, the SDK, its torch, the cards.

Nothing in this module imports either. The bridge (``habana_frameworks``) reads its environment when it
is loaded, which with ``PT_HPU_LAZY_MODE=0`` happens while torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.device.compiled import keep
from lantern_accel.device.spec import Probe, check_options
from lantern_accel.errors import DeviceRequestError, LanternWarning, did_you_mean
from lantern_accel_hpu import cards

MODES = {
    "auto": "graph with Gaudi software up to 1.22 and Habana's own torch, else compile; "
    "PT_HPU_LAZY_MODE decides where it is set",
    "compile": "torch.compile with hpu_backend, in eager mode",
    "graph": "HPUGraph, in lazy mode (a Gaudi build of torch that still has it)",
    "eager": "operator by operator, in eager mode",
}
OPTIONS = {
    "mode": "how a step runs: " + ", ".join(f"{name} ({what})" for name, what in MODES.items()),
    "fused": "false computes with plain torch operators where Habana has fused kernels",
    "software": "true runs on the software HPU: no Gaudi, correct results, no meaning in its times",
}
LAZY = "PT_HPU_LAZY_MODE"
FALLBACK = "PT_HPU_USE_EAGER_FALLBACK"
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
#: Makes Gaudi 2 multiply float32 as IEEE says, one rounding a product and sum; by default its matrix
#: engine adds pairs of products aligned to 26 bits. Flags of this kind are read where the second is set.
IEEE, EXPERIMENTAL = "GAUDI2_FORCE_MME_FP32_IEEE", "ENABLE_EXPERIMENTAL_FLAGS"
#: Makes float32 division round correctly, as the host's does: the noise is a quotient.
PRECISE = "PT_HPU_ENABLE_DIV_PRECISE"
#: Keeps recipes of single operators, which Gaudi 2 compiles again for each call by default.
EAGER_CACHE = "PT_HPU_ENABLE_EAGER_CACHE"
#: The library of kernels that the graph compiler takes.
KERNELS = "GC_KERNEL_PATH"
#: What release 1.24 refuses in the folder of recipes, and the comma between its settings.
UNSAFE = re.compile(r"""[\s"'\\<>|&;$%*?\[\]{}^~`,]""")
#: From this release on the recipe cache has a fourth setting: whether it lies on a network file system.
FOUR_SETTINGS = (1, 24)
#: File systems that reach over a network, or may: their locks are none that the bridge can use.
NETWORK = re.compile("nfs|ceph|fuse|lustre|gpfs|beegfs|cifs|smb|glusterfs|9p|afs")
#: The last release whose public inference code decodes with HPU graphs; what came after compiles.
GRAPHS_UNTIL = (1, 22)
#: From this torch on gather and scatter take int32; before, indices are int64.
INT32_FROM = (2, 8)
PCI_VENDOR = "0x1da3"
"""Habana Labs; /sys/class/accel also lists other makers' accelerators."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

#: Variables that are set unless the user did.
WANTED = {
    # Without it the bridge does not count which recipes it finds and which it misses.
    "PT_HPU_ENABLE_CACHE_METRICS": "1",
    # An operator without a kernel shall be named; silently leaving the graph can reorder state.
    FALLBACK: "0",
    # Triangle sums are monotone, and float32 agrees with the host, only if products are IEEE.
    IEEE: "1",
    EXPERIMENTAL: "1",
    PRECISE: "1",
    EAGER_CACHE: "1",
}

#: Whether all was set before a card was acquired, or a warning named what was not.
_settled: list[bool] = []
#: What lantern_accel itself put into the environment, so that a later request may change it.
_ours: dict[str, str] = {}


@dataclass(frozen=True)
class Settings:
    """The options of one open: ``mode`` as asked, ``software`` None where it was not asked."""

    mode: str = "auto"
    fused: bool = True
    software: bool | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Settings:
        """Check options; raises DeviceRequestError naming the one that is wrong."""
        check_options("hpu", options, OPTIONS)
        mode = str(options.get("mode", "auto"))
        if mode not in MODES:
            raise DeviceRequestError(
                f"backend 'hpu' has no mode {mode!r}{did_you_mean(mode, MODES)}; "
                f"its modes are {', '.join(MODES)}"
            )
        software = options.get("software")
        return cls(
            mode=mode,
            fused=_flag("fused", options.get("fused", True)),
            software=None if software is None else _flag("software", software),
        )

    def is_software(self, environ: Mapping[str, str]) -> bool:
        """Return whether the software HPU was asked for, by option or by LANTERN_HPU_SOFTWARE."""
        if self.software is not None:
            return self.software
        return _flag("LANTERN_HPU_SOFTWARE", environ.get("LANTERN_HPU_SOFTWARE", "0"))

    def get_mode(self, environ: Mapping[str, str]) -> str:
        """Return the mode that was asked for, by option or by LANTERN_HPU_MODE; else ``auto``."""
        if self.mode != "auto":
            return self.mode
        mode = environ.get("LANTERN_HPU_MODE", "auto")
        if mode not in MODES:
            raise DeviceRequestError(
                f"LANTERN_HPU_MODE is {mode!r}{did_you_mean(mode, MODES)}; "
                f"unset it or choose one of {', '.join(MODES)}"
            )
        return mode


def _flag(name: str, value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUE + _FALSE:
        raise DeviceRequestError(f"backend 'hpu' got {name}={value!r}; it is true or false")
    return word in _TRUE


def prepare(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Set the variables that must be there before torch and the bridge are imported.

    What the user set stays. Where the bridge is loaded already the mode is fixed; all else is read when
    a card is acquired, and one warning names what comes too late for that.
    """
    if settings.is_software(environ):
        # A real bridge that loads itself while torch is imported would take the device's name.
        environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return
    if loaded_mode() is None:
        mode = settings.get_mode(environ)
        _set(environ, LAZY, "1" if (usual() if mode == "auto" else mode) == "graph" else "0")
    if cards.has_card():
        if not _settled:
            _warn_late(environ)
        _settled[:] = [True]
        return
    _settled[:] = [True]
    for name, value in WANTED.items():
        _set(environ, name, value)
    # A recipe takes long to compile: kept, not emptied at the start, up to 8 GB.
    parts = "False,8192,False" if numbers(sdk_version()) >= FOUR_SETTINGS else "False,8192"
    keep(
        environ,
        RECIPES,
        "recipes",
        f"{{}},{parts}",
        also=("PT_RECIPE_CACHE_PATH",),
        local=_local if sdk_folder() is not None else None,
    )


def _warn_late(environ: Mapping[str, str]) -> None:
    """Warn of settings that this process's card was acquired without."""
    late = [name for name, value in WANTED.items() if environ.get(name) is None and value != "0"]
    late += [] if environ.get(RECIPES) or environ.get("PT_RECIPE_CACHE_PATH") else [RECIPES]
    if late:
        warnings.warn(
            f"this process used a Gaudi before lantern_accel could set {', '.join(late)}: images of a "
            "seed may differ from other devices', and graphs are compiled again in every process; import "
            "lantern_accel and load the model before anything uses the card",
            LanternWarning,
            stacklevel=5,
        )


@functools.cache  # said once
def _local(folder: Path) -> Path | None:
    """Return a folder that recipes can lie in: ``folder``, a temporary one, or None.

    Not on another machine's disk, nor under a name that release 1.24 refuses, which ends the process.
    """
    if not (wrong := unfit(folder)):
        return folder
    other = Path(tempfile.gettempdir()) / f"lantern-accel-{os.getuid()}" / "recipes"
    try:
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = other.parent.stat().st_uid == os.getuid() and not unfit(other)
    except OSError:
        usable = False
    refused = "network" not in wrong
    where = f"{other} is used in its place" if usable else "its locks may fail there"
    if refused and not usable:
        where = "compiled recipes are not kept"
    warnings.warn(
        f"the cache for compiled recipes, {folder}, {wrong}: {where}; name a folder on a local disk, of "
        f"letters, digits and .-_, with LANTERN_ACCEL_CACHE, or set {RECIPES} yourself",
        LanternWarning,
        stacklevel=5,
    )
    return other if usable else None if refused else folder


def unfit(folder: Path) -> str:
    """Return why recipes cannot lie in a folder; "" where they can."""
    at = folder.resolve()  # what the bridge gets
    if found := UNSAFE.search(str(at)):
        return f"has a character in its name that Habana's bridge refuses ({found[0]!r})"
    kind = file_system(folder)
    return f"lies on a network file system ({kind})" if NETWORK.match(kind) else ""


def unfit_recipes(environ: Mapping[str, str]) -> str:
    """Return why release 1.24 would end the process for the user's PT_HPU_RECIPE_CACHE_CONFIG; else "".

    As its source has it: a folder, true or false, megabytes, true or false; a folder that is there must
    be one itself, and writable for its owner.
    """
    given = environ.get(RECIPES, "")
    folder, *rest = (one.strip() for one in given.split(","))
    forms = ("true|false", r"\d+", "true|false")
    wrong = [
        part
        for part, form in zip(rest, forms, strict=False)
        if not re.fullmatch(form, part, re.IGNORECASE)
    ]
    if len(rest) > len(forms) or wrong:
        return f"{given!r} is not of the form FOLDER,False,MEGABYTES,False"
    if found := UNSAFE.search(folder):
        return f"the folder's name has the character {found[0]!r}"
    path = Path(folder)
    if folder and path.is_symlink():
        return f"{folder} is a symbolic link"
    if folder and path.exists() and not (path.is_dir() and path.stat().st_mode & 0o200):
        return f"{folder} is not a folder that can be written"
    return ""


def unfit_kernels(environ: Mapping[str, str]) -> str:
    """Return what is wrong with the variable that names Habana's kernels; "" where nothing is."""
    given = environ.get(KERNELS, "")
    if not given:
        return f"{KERNELS} is not set, so that no graph can be compiled"
    if not any(Path(one).is_file() for one in given.split(":") if one):
        return f"{KERNELS}={given} names no file, so that no graph can be compiled"
    return ""


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the kind of file system that a folder lies on, as the kernel names it; "" where unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        at = str(folder.resolve())
        for line in mounts.read_text(errors="replace").splitlines():
            _, point, found, *_ = [*line.split(" "), "", "", ""]
            point = re.sub(r"\\([0-7]{3})", lambda one: chr(int(one[1], 8)), point)
            inside = at == point or at.startswith(point.rstrip("/") + "/")
            if (
                point and inside and len(point) >= best
            ):  # of two on one place, the later one is seen
                best, kind = len(point), found
    return kind


def _set(environ: MutableMapping[str, str], name: str, value: str) -> None:
    if name not in environ or environ[name] == _ours.get(name):
        environ[name] = _ours[name] = value


def keeps_fallback(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants graphs to be left for operators that ``hpu_backend`` lacks."""
    return environ.get(FALLBACK, "0").lower() in ("1", "on", "yes", "true", "y", "t")


def loaded_mode() -> str | None:
    """Return ``lazy`` or ``eager`` as the bridge in this process runs; None where it is not loaded."""
    if "habana_frameworks.torch" not in sys.modules:
        return None
    internal = sys.modules.get("habana_frameworks.torch.utils.internal")
    if internal is None:
        return None
    return "lazy" if internal.is_lazy() else "eager"


def runner(settings: Settings, environ: Mapping[str, str]) -> str:
    """Return ``compile``, ``graph`` or ``eager``: what :func:`conflict` found nothing against."""
    asked = settings.get_mode(environ)
    if asked != "auto":
        return asked
    if settings.is_software(environ):
        return "eager"
    return "graph" if _is_lazy(environ) else "compile"


def usual() -> str:
    """Return the mode that the vendor's public code decodes in with this software: graph or compile."""
    known = numbers(sdk_version())
    old = bool(known) and known <= GRAPHS_UNTIL
    return "graph" if old and own_build(installed_torch()) else "compile"


def own_build(torch_version: str) -> bool:
    """Return whether a torch is Habana's own build, which lazy mode needs."""
    return torch_version.partition("+")[2].startswith(("git", "hpu"))


def _is_lazy(environ: Mapping[str, str]) -> bool:
    if loaded := loaded_mode():
        return loaded == "lazy"
    return environ.get(LAZY, "1" if usual() == "graph" else "0") != "0"


def conflict(settings: Settings, environ: Mapping[str, str], torch_version: str) -> Probe | None:
    """Return why the mode that was asked for cannot be had in this process; None where it can."""
    asked = settings.get_mode(environ)
    lazy = _is_lazy(environ)
    if asked != "auto" and lazy != (asked == "graph"):
        needs = "lazy" if asked == "graph" else "eager"
        if loaded_mode():
            return Probe.missing(
                f"this process loaded habana_frameworks in {loaded_mode()} mode before lantern_accel, "
                f"and the mode {asked!r} needs {needs} mode",
                f"set {LAZY}={int(asked == 'graph')} before Python starts, or leave out the mode",
            )
        return Probe.missing(
            f"{LAZY}={environ.get(LAZY)} selects {'lazy' if lazy else 'eager'} mode, and the mode "
            f"{asked!r} needs {needs} mode",
            f"unset {LAZY}, or leave out the mode",
        )
    if lazy and torch_version and not own_build(torch_version):
        return Probe.missing(
            f"lazy mode needs Habana's own build of torch, and torch {torch_version} is not one",
            f"unset {LAZY} and choose the mode 'compile', which replaces it",
        )
    if not lazy and torch_version and numbers(torch_version) < INT32_FROM:
        return Probe.missing(
            f"torch {torch_version} takes int64 alone for indices, and which of Gaudi's kernels take it "
            "outside lazy mode is not known",
            "use Gaudi software 1.23 or newer, or an image with Habana's own torch, whose lazy mode "
            "computes them in 32 bits (LANTERN_HPU_MODE=graph)",
        )
    return None


def sdk_folder() -> Path | None:
    """Return the folder of ``habana_frameworks`` without importing it; None where it is not there."""
    spec = importlib.util.find_spec("habana_frameworks")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def required_torch(sdk: Path) -> str:
    """Return the torch version that the SDK was built for, as its own file says; "" if it does not."""
    with contextlib.suppress(OSError):
        return (sdk / "torch" / "required_version.txt").read_text().strip()
    return ""


def sdk_version() -> str:
    """Return the version of habana-torch-plugin; "" where it is not installed as a package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("habana-torch-plugin")
    return ""


def installed_torch() -> str:
    """Return torch's version without importing torch; "" where it cannot be read."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        found = re.search(r"__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text)
        return found[1] if found else ""
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a version as numbers: what the bridge compares."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:2])


def module(node: str, root: Path = Path("/")) -> int | None:
    """Return the module number of a device node; None where the driver does not say.

    The software HPU's nodes, which lie in a folder of their own, are numbered by module.
    """
    if not node.startswith("/dev/"):
        return int(re.findall(r"\d+", node)[-1])
    with contextlib.suppress(OSError, ValueError):
        return int((root / "sys/class/accel" / Path(node).name / "device/module_id").read_text())
    return None


def devices(root: Path = Path("/")) -> list[str]:
    """List the Gaudis the driver shows: /dev/accel/accelN, or /dev/hlN before driver 1.13.

    Which node is which module :func:`module` says; see :mod:`lantern_accel_hpu.cards`.
    """
    found = []
    for node in sorted((root / "dev/accel").glob("accel[0-9]*")):
        vendor = root / "sys/class/accel" / node.name / "device/vendor"
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() != PCI_VENDOR:
                continue
        found.append(f"Gaudi at /dev/accel/{node.name}")
    if found:
        return found
    return [f"Gaudi at /dev/{node.name}" for node in sorted((root / "dev").glob("hl[0-9]*"))]
