"""Reads what is known of XLA before torch is imported: the packages, the PJRT client, and TPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, MutableMapping
from pathlib import Path

#: The client that torch_xla asks for a device: CPU, TPU or a plug-in's own name.
CLIENT = "PJRT_DEVICE"
#: How many compiled programs torch_xla keeps, and our default. Its own is 2,048; but what the CPU client
#: compiles stays mapped, and a process has 65,530 mappings on Linux, which a few hundred programs take.
KEPT_VARIABLE, KEPT = "XLA_COMPILATION_CACHE_SIZE", "256"
#: XLA's flags, and ours for the CPU client, on which programs are tried and not served: without LLVM's
#: optimizations it compiles a step in a quarter of the time.
FLAGS_VARIABLE, CPU_FLAGS = "XLA_FLAGS", "--xla_backend_optimization_level=0"
#: The pair of releases that this backend was written and checked with.
PAIR = "2.9.0"
INSTALL = f'pip install "lantern-accel[xla]" (torch {PAIR} and torch_xla {PAIR} go together)'


def version(package: str) -> str:
    """Return the installed version of a package without importing it; empty where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def release(text: str) -> tuple[str, ...]:
    """Return a version's first two numbers: torch and torch_xla must share them."""
    return tuple(text.partition("+")[0].split(".")[:2])


def tpu_chips(root: Path = Path("/dev")) -> int:
    """Count the TPU chips that the kernel shows: ``accel0`` up to v4, ``vfio/0`` from v5e on."""
    accel = len(list(root.glob("accel[0-9]*")))
    return accel or len([one for one in root.glob("vfio/*") if one.name.isdecimal()])


def client(environ: Mapping[str, str], chips: int) -> str:
    """Return the PJRT client that will serve: what is asked for, else TPU where there are chips."""
    asked = environ.get(CLIENT, "").strip().upper()
    return asked or ("TPU" if chips and is_installed("libtpu") else "")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Name the client that was found, before torch_xla looks; what the user set stays.

    Without one torch_xla guesses, and on a machine with a GPU's libraries guesses wrong. Also bounds how
    many compiled programs are kept, and how long the CPU client compiles.
    """
    environ.setdefault(KEPT_VARIABLE, KEPT)
    if not environ.get(CLIENT, "").strip():
        environ[CLIENT] = client(environ, tpu_chips()) or "CPU"
    if client(environ, 0) == "CPU":
        environ.setdefault(FLAGS_VARIABLE, CPU_FLAGS)


def mismatch() -> str:
    """Say which of the two packages does not go with the other; empty where they do."""
    torch, xla = version("torch"), version("torch_xla")
    if torch and xla and release(torch) != release(xla):
        return (
            f"torch_xla {xla} is for torch {'.'.join(release(xla))}, and torch {torch} is installed"
        )
    return ""
