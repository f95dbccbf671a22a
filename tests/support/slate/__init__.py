"""A vendor's device as a torch plug-in makes one: PrivateUse1 under the name "slate", with graphs.

A process registers it once and for good, so that tests use it in processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import torch

from support.processes import FOLDER

SOURCE = Path(__file__).with_name("device.cpp")
#: Torch's release that has the header of registered graphs.
SINCE = "2.12"


def library() -> Path:
    """Return the compiled device, compiled once for all tests of this user."""
    from torch.utils.cpp_extension import include_paths, library_paths

    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = FOLDER.with_name("slate") / f"{digest}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        call = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE)]
        for path in include_paths():
            call += ["-isystem", path]
        for path in library_paths():
            call += [f"-L{path}", f"-Wl,-rpath,{path}"]
        call += ["-lc10", "-ltorch_cpu", "-ltorch", "-o", str(part)]
        subprocess.run(call, check=True, timeout=600)
        part.replace(target)
    return target


def register(built: Path, graphs: str) -> None:
    """Give this process the built device; ``graphs``: "none", "right", or replays that are "stale"."""
    torch.utils.rename_privateuse1_backend("slate")
    torch.ops.load_library(built)
    module = ModuleType("torch.slate")
    members = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda index=0: "Slate 1",
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
    }
    vars(module).update(members)
    torch._register_device_module("slate", module)
    if graphs != "none":
        torch.ops.slate.with_graphs(graphs == "stale")


def replays() -> int:
    """Return how often a graph was replayed."""
    return int(torch.ops.slate.replays())
