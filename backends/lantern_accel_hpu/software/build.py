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
from lantern_accel_hpu.software import host

SOURCE = Path(__file__).with_name("device.cpp")
HEADERS = [Path(__file__).with_name(name) for name in ("card.h", "streams.h")]
#: Seconds after which a compiler is taken to hang; it needs about 10 on one core.
PATIENCE = 900


def library() -> Path:
    """Return the compiled library, compiling it where the cache does not hold it.

    Raises BackendError where there is no compiler, or with its first error where it fails.
    """
    if reason := host.missing():
        raise BackendError(f"{reason}; install one (Debian: apt-get install g++) or set CXX")
    compiler = host.compiler()
    assert compiler is not None
    command = [compiler, *_flags()]
    digest = hashlib.sha256()
    given = (torch.__version__, " ".join(command))
    files = [one.read_bytes() for one in (SOURCE, *HEADERS)]
    for part in (*files, *(one.encode() for one in given)):
        digest.update(part)
    target = (
        cache_dir() / "software_hpu" / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}.so"
    )
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    except OSError as error:
        raise BackendError(
            f"the software HPU cannot be compiled into {target.parent} ({error.strerror}); name "
            "another cache folder with LANTERN_ACCEL_CACHE"
        ) from None
    os.close(handle)
    part = Path(name)
    # The source stands before the libraries that it needs.
    call = [command[0], str(SOURCE), *command[1:], "-o", str(part)]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if done.returncode:
            raise BackendError(
                f"the software HPU does not compile with {command[0]} and torch "
                f"{torch.__version__}: {_first_error(done.stderr)}; try another compiler with CXX"
            )
        part.chmod(0o755)
        os.replace(part, target)
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"{command[0]} did not compile the software HPU within {PATIENCE} seconds; try another "
            "compiler with CXX"
        ) from None
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be run ({error}); set CXX to another") from None
    finally:
        part.unlink(missing_ok=True)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
