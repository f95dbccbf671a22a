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
#: What may follow a folder there: whether it is emptied, megabytes, and the fourth setting.
RECIPE_SETTINGS = r"(,\s*((true|false)\s*(,\s*\d+\s*(,\s*(true|false)\s*)?)?)?)?"
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
        software = options.get("software")
        return cls(
            mode=_mode("mode", str(options.get("mode", "auto"))),
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
        return _mode("LANTERN_HPU_MODE", environ.get("LANTERN_HPU_MODE", "auto"))


def _mode(name: str, mode: str) -> str:
    if mode not in MODES:
        raise DeviceRequestError(f"backend 'hpu' got {name}={mode!r}{did_you_mean(mode, MODES)}")
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
    if loaded_lazy() is None:
        mode = settings.get_mode(environ)
        _set(environ, LAZY, "1" if (usual() if mode == "auto" else mode) == "graph" else "0")
    first, _settled[:] = not _settled, [True]
    if cards.has_card():
        late = [name for name in (*WANTED, RECIPES) if first and name not in environ]
        if late:
            warnings.warn(
                f"this process used a Gaudi before lantern_accel could set {', '.join(late)}: images "
                "of a seed may differ from other devices', and graphs are compiled again in every "
                "process; import lantern_accel and load the model before anything uses the card",
                LanternWarning,
                stacklevel=4,
            )
        return
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


@functools.cache  # said once
def _local(folder: Path) -> Path | None:
    """Return a folder that recipes can lie in: ``folder``, a temporary one, or None.

    Not on another machine's disk, nor under a name that release 1.24 refuses, which ends the process.
    """
    if not (wrong := unfit(folder)):
        return folder
    other = Path(tempfile.gettempdir()) / f"lantern-accel-{os.getuid()}" / "recipes"
    usable = False
    with contextlib.suppress(OSError):
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = other.parent.stat().st_uid == os.getuid() and not unfit(other)
    instead = f"{other} is used in its place" if usable else "compiled recipes are not kept"
    warnings.warn(
        f"the cache for compiled recipes, {folder}, {wrong}: {instead}; name a folder on a local disk, "
        f"of letters, digits and .-_, with LANTERN_ACCEL_CACHE, or set {RECIPES} yourself",
        LanternWarning,
        stacklevel=5,
    )
    return other if usable else None


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
    folder, _, rest = given.partition(",")
    path = Path(folder.strip())
    if UNSAFE.search(folder.strip()) or not re.fullmatch(
        RECIPE_SETTINGS, f",{rest}", re.IGNORECASE
    ):
        return f"{given!r} is not of the form FOLDER,False,MEGABYTES,False"
    if folder and (path.is_symlink() or (path.exists() and not _writable(path))):
        return f"{folder} is a symbolic link, or not a folder that can be written"
    return ""


def _writable(folder: Path) -> bool:
    return folder.is_dir() and bool(folder.stat().st_mode & 0o200)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the kind of file system that a folder lies on, as the kernel names it; "" where unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        at = str(folder.resolve())
        for line in mounts.read_text(errors="replace").splitlines():
            _, point, found, *_ = line.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda one: chr(int(one[1], 8)), point)
            inside = at == point or at.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:  # of two on one place, the later one is seen
                best, kind = len(point), found
    return kind


def _set(environ: MutableMapping[str, str], name: str, value: str) -> None:
    if name not in environ or environ[name] == _ours.get(name):
        environ[name] = _ours[name] = value


def keeps_fallback(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants graphs to be left for operators that ``hpu_backend`` lacks."""
    return environ.get(FALLBACK, "0").lower() in ("1", "on", "yes", "true", "y", "t")


def loaded_lazy() -> bool | None:
    """Return whether the bridge in this process runs in lazy mode; None where it is not loaded."""
    internal = sys.modules.get("habana_frameworks.torch.utils.internal")
    return None if internal is None else bool(internal.is_lazy())


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
    loaded = loaded_lazy()
    if loaded is not None:
        return loaded
    return environ.get(LAZY, "1" if usual() == "graph" else "0") != "0"


def conflict(settings: Settings, environ: Mapping[str, str]) -> Probe | None:
    """Return why this process cannot have the mode that was asked for, or a graph; None where it can."""
    asked, torch_version = settings.get_mode(environ), installed_torch()
    lazy, needs_lazy = _is_lazy(environ), asked == "graph"
    if asked != "auto" and lazy != needs_lazy:
        loaded = f"{LAZY}={environ.get(LAZY)} selects"
        if loaded_lazy() is not None:
            loaded = "this process loaded habana_frameworks before lantern_accel in"
        return Probe.missing(
            f"{loaded} {'lazy' if lazy else 'eager'} mode, and the mode {asked!r} needs the other",
            f"set {LAZY}={int(needs_lazy)} before Python starts, or leave out the mode",
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
    kernels = environ.get(KERNELS, "")
    if not any(Path(one).is_file() for one in kernels.split(":") if one):
        return Probe.broken(
            f"{KERNELS}={kernels!r} names no file, so that no graph can be compiled",
            "set it to the library of Habana's kernels, as the Gaudi image does: "
            f"export {KERNELS}=/usr/lib/habanalabs/libtpc_kernels.so",
        )
    wrong = unfit_recipes(environ) if numbers(sdk_version()) >= FOUR_SETTINGS else ""
    if wrong:
        return Probe.broken(
            f"{RECIPES} would end this process: {wrong}",
            "unset it, or name a folder of letters, digits and ./-_",
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


def _version(package: str) -> str:
    """Return a package's version without importing it; "" where it is not installed as a package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def sdk_version() -> str:
    """Return the version of Gaudi's software, that of its torch plug-in; "" where it is not known."""
    return _version("habana-torch-plugin")


def installed_torch() -> str:
    """Return torch's version without importing torch; "" where it is not known."""
    return _version("torch")


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
    """List the Gaudis that the driver shows, as /dev/accel/accelN.

    Which node is which module :func:`module` says; see :mod:`lantern_accel_hpu.cards`.
    """
    found = []
    for node in sorted((root / "dev/accel").glob("accel[0-9]*")):
        vendor = root / "sys/class/accel" / node.name / "device/vendor"
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() != PCI_VENDOR:
                continue
        found.append(f"Gaudi at /dev/accel/{node.name}")
    return found
