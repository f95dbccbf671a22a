"""The native library's C interface, as ``native.h`` declares it."""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from lantern_accel.errors import BackendError
from lantern_accel_cpu.native import build
from lantern_accel_cpu.native.structures import list_functions

PANEL = 32
#: What units multiply with; those of tests have no words.
MULTIPLY = {
    "amx": "tiles of bfloat16 and int8",
    "avx512bf16": "dot products of bfloat16",
    "avx512": "vectors of 16 numbers",
    "avx2": "vectors of 8 numbers",
    "neon": "vectors of 4 numbers",
    "plain": "vectors of 4 numbers",
}


class Library:
    """The loaded library: its functions as attributes, without their prefix ``lantern_``."""

    def __init__(self, path: Path, unit: str = "") -> None:
        try:
            loaded = ctypes.CDLL(str(path))
            for name, (result, arguments) in list_functions().items():
                function = getattr(loaded, f"lantern_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise BackendError(f"native kernels: {path} cannot be loaded ({error})") from None
        if self.sources().decode() != build.digest():
            raise BackendError(f"native kernels: {path} is of other sources; delete it")
        if not self.select(unit.encode()):
            raise BackendError(
                f"native kernels: this processor does not run {unit or 'any unit'} of {path}"
            )
        self.unit: str = self.selected().decode()

    @property
    def note(self) -> str:
        """Why a unit is used that is not this processor's best; empty where it is."""
        asked = os.environ.get(build.UNIT_VARIABLE)
        if asked == self.unit:
            return f"the unit that {build.UNIT_VARIABLE} names"
        return build.refused_tiles()

    # What setattr above fills in.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def _load(unit: str) -> Library:
    path = build.library()
    try:
        return Library(path, unit)
    except BackendError:
        if path != build.PREBUILT or build.compiler() is None:
            raise
    return Library(build.build_library(build.chosen_units()), unit)


def load() -> Library:
    """Return the library, compiled if need be; raises BackendError where there can be none."""
    return _load(os.environ.get(build.UNIT_VARIABLE, ""))


def load_or_warn() -> Library | None:
    """Return the library, or None after one warning where it could not be compiled or loaded.

    A machine that has no compiler gets no warning: ``lantern-accel devices`` says what it lacks.
    """
    if build.missing():
        return None
    try:
        return load()
    except BackendError as error:
        warnings.warn(f"{error}; decoding goes on without native kernels", stacklevel=2)
        return None


def describe_unit(unit: str) -> str:
    """Return a unit's name, and what it multiplies with."""
    return f"{unit}: {MULTIPLY[unit]}" if unit in MULTIPLY else unit


def describe() -> str:
    """Say which unit multiplies in native kernels, if there are any, without compiling them."""
    if reason := build.missing():
        return f"no native kernels: {reason}"
    units = build.chosen_units()
    ready = build.PREBUILT.is_file() or build.target(units).is_file()
    # Of several the library takes the best that runs.
    said = [describe_unit(units[0])] * (len(units) == 1) + ["compiled on first use"] * (not ready)
    said += list(filter(None, [build.refused_tiles()]))
    return f"native kernels ({'; '.join(said)})" if said else "native kernels"
