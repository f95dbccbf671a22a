"""Compiling the software HPU, once for a torch build and a source, into the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from lantern_accel.errors import BackendError
from lantern_accel.files import cache_dir
from lantern_accel_hpu import software

SOURCE = Path(__file__).with_name("device.cpp")
HEADERS = [Path(__file__).with_name(name) for name in ("card.h", "streams.h")]
#: Seconds after which a compiler is taken to hang; it needs about 10 on one core.
PATIENCE = 900


def library() -> Path:
    """Return the compiled library, compiling it where the cache does not hold it.

    Raises BackendError where there is no compiler, or with its first error where it fails.
    """
    compiler = software.compiler()
    if compiler is None:
        raise BackendError(f"{software.missing()}; install one (Debian: apt-get install g++)")
    # The source stands before the libraries that it needs.
    command = [compiler, str(SOURCE), *_flags()]
    digest = hashlib.sha256(f"{torch.__version__} {command}".encode())
    for one in (SOURCE, *HEADERS):
        digest.update(one.read_bytes())
    name = f"torch-{torch.__version__}-{digest.hexdigest()[:16]}.so"
    target = cache_dir() / "software_hpu" / name
    if not target.is_file():
        _compile(command, target)
    return target


def _flags() -> list[str]:
    """Return what torch's own extensions are built with; only headers of ATen are needed."""
    from torch.utils.cpp_extension import include_paths, library_paths

    standard = "c++20" if torch.__version__ >= torch.torch_version.TorchVersion("2.12") else "c++17"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = [f"-std={standard}", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    for path in include_paths():
        flags += ["-isystem", path]
    for path in library_paths():
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    return [*flags, "-lc10", "-ltorch_cpu", "-ltorch"]


def _compile(command: list[str], target: Path) -> None:
    """Compile next to the target and move there, since other processes may do the same."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            call = [*command, "-o", str(made)]
            subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE, check=True)
            os.replace(made, target)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        reason = next(
            (line for line in lines if "error" in line), lines[-1] if lines else "no output"
        )
        raise BackendError(
            f"the software HPU does not compile with {command[0]} and torch {torch.__version__}: "
            f"{reason}; try another compiler with CXX, or another folder with LANTERN_ACCEL_CACHE"
        ) from None
