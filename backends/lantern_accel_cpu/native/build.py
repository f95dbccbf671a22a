"""Finding the native library, or compiling it once into the cache folder."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lantern_accel.device.waiting import waiting
from lantern_accel.errors import BackendError
from lantern_accel.files import alone, cache_dir

HERE = Path(__file__).parent
#: Where a wheel has the library, with every unit of its processor family.
PREBUILT = HERE / "lantern_native.so"
#: Names the one instruction set to use, for tests and for telling faults apart.
FOLDER_VARIABLE = "LANTERN_ACCEL_CPU_LIBRARIES"
UNIT_VARIABLE = "LANTERN_ACCEL_CPU_UNIT"
#: Seconds after which a compiler is taken to hang; a unit needs about 8 on one core.
PATIENCE = 600


@dataclass(frozen=True)
class Unit:
    """One instruction set: its compiler flags, and what Linux calls what it needs.

    ``test``: stands for another one on processors without it, for tests alone.
    """

    flags: tuple[str, ...]
    needs: frozenset[str]
    test: bool = False


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
_WIDE = ("-mprefer-vector-width=512", "-DWIDTH=16")
#: Tiles themselves are written as bytes: no compiler has to know them.
_AMX = ("-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
_EMULATED = ("-mavx2", "-mfma", "-DWIDTH=16", "-DDOT_PRODUCTS", "-DLANTERN_EMULATED")
_AVX512_NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"})

#: Of x86_64's Linux: a call's number, and what it is asked.
_ARCH_PRCTL, _ASK_FOR_STATE, _TILES = 158, 0x1023, 18

#: By processor family, the best first.
UNITS: dict[str, dict[str, Unit]] = {
    "x86_64": {
        "amx": Unit(
            (*_AVX512, *_WIDE, *_AMX, "-DDOT_PRODUCTS", "-DTILES"),
            _AVX512_NEEDS
            | {"avx512_bf16", "avx512vbmi", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
        ),
        "avx512bf16": Unit(
            (*_AVX512, *_WIDE, "-mavx512bf16", "-DDOT_PRODUCTS"), _AVX512_NEEDS | {"avx512_bf16"}
        ),
        "avx512": Unit((*_AVX512, *_WIDE), _AVX512_NEEDS),
        "avx2": Unit(("-mavx2", "-mfma", "-DWIDTH=8"), frozenset({"avx2", "fma"})),
        "plain": Unit(("-DWIDTH=4",), frozenset()),
        # The two with bfloat16, their instructions computed in C++.
        "amxemulated": Unit((*_EMULATED, "-DTILES"), frozenset({"avx2", "fma"}), test=True),
        "avx512emulated": Unit(_EMULATED, _AVX512_NEEDS, test=True),
    },
    "aarch64": {"neon": Unit(("-DWIDTH=4",), frozenset())},
}
_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast")
_QUIET = ("-Wno-psabi",)
#: What a unit is compiled from, and further flags: some have the reference's bits, so that no product and
#: sum may be contracted there.
_SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("unit", ()),
    ("race", ("-ffp-contract=off",)),
    ("copy", ("-ffp-contract=off",)),
)

_LOG = logging.getLogger("lantern_accel")


def family() -> str | None:
    """Return the processor family, None for one without a unit."""
    name = platform.machine().lower()
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)
    return name if name in UNITS and os.name == "posix" else None


@cache
def compiler() -> str | None:
    """Return the C++ compiler: ``$CXX``, else the system's; None where there is none."""
    given = os.environ.get("CXX")
    names = (given,) if given else ("c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def sources() -> list[Path]:
    """Return the C++ sources and headers."""
    return sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])


def digest() -> str:
    """Return what the sources are known by."""
    hashed = hashlib.sha256()
    for path in sources():
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]


def _features() -> frozenset[str] | None:
    """Return what Linux says that the processor has; None where nothing says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return None


def chosen_units() -> list[str]:
    """Return the units to compile for this machine: the best one, or the one that is asked for.

    Raises BackendError where the variable ``LANTERN_ACCEL_CPU_UNIT`` names none.
    """
    machine = family()
    assert machine is not None
    known = UNITS[machine]
    asked = os.environ.get(UNIT_VARIABLE)
    if asked:
        if asked not in known:
            raise BackendError(
                f"{UNIT_VARIABLE} is {asked!r}, not an instruction set of {machine}; give one of "
                f"{', '.join(known)}"
            )
        return [asked]
    features = _features()
    if machine == "aarch64" or features is None:
        return wheel_units()
    fit = (name for name, unit in known.items() if unit.needs <= features)
    return [next(name for name in fit if name != "amx" or not refused_tiles())]


def has_tiles() -> bool:
    """Return whether the processor has tiles (AMX), as far as Linux says."""
    features = _features()
    return (
        family() == "x86_64" and features is not None and UNITS["x86_64"]["amx"].needs <= features
    )


@cache
def ask_for_tiles() -> int:
    """Ask Linux for the processor's tiles; return its error's number, 0 where it gives them.

    Linux saves tiles only of processes that asked for them (``arch_prctl``, ``ARCH_REQ_XCOMP_PERM``).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILES) else 0


def refused_tiles() -> str:
    """Say that the kernels go without this processor's tiles, and why; empty where they do not."""
    if not has_tiles() or not (error := ask_for_tiles()):
        return ""
    return (
        "the matrix unit (AMX) is not used: Linux gives this process none "
        f"({os.strerror(error)}); it does from 5.16 on, where signal stacks are large enough"
    )


def wheel_units() -> list[str]:
    """Return every unit of this processor family that decodes."""
    machine = family()
    assert machine is not None
    return [name for name, unit in UNITS[machine].items() if not unit.test]


def missing() -> str:
    """Say why there can be no native library here; empty where it lies ready or can be compiled."""
    if family() is None:
        return f"there are none for {platform.system()} on {platform.machine()}"
    if PREBUILT.is_file() or compiler() is not None or target(chosen_units()).is_file():
        return ""
    return "no C++ compiler was found; install g++ or clang++, or set CXX"


def target(units: list[str]) -> Path:
    """Return the path of a library of these units.

    It lies in the cache folder, or in the one that ``LANTERN_ACCEL_CPU_LIBRARIES`` names.
    """
    key = hashlib.sha256()
    machine = family()
    assert machine is not None
    flags = [flag for name in units for flag in (name, *UNITS[machine][name].flags)]
    for part in (digest(), compiler() or "", *_FLAGS, *flags):
        key.update(part.encode() + b"\0")
    folder = os.environ.get(FOLDER_VARIABLE)
    kept = Path(folder) if folder else cache_dir() / "native"
    return kept / f"{'-'.join(units)}-{key.hexdigest()[:16]}.so"


def library() -> Path:
    """Return the library, compiling it where the cache folder does not hold it.

    Raises BackendError where there is no compiler, or with its first error where it fails.
    """
    if reason := missing():
        raise BackendError(f"native kernels: {reason}")
    if PREBUILT.is_file() and not os.environ.get(UNIT_VARIABLE):
        return PREBUILT
    return build_library(chosen_units())


def build_library(units: list[str]) -> Path:
    """Return the library of these units in the cache folder, compiled if it is not there.

    Says so on standard error, as Python's logging is set up to: the first use takes its time. Of
    processes that find none at once, one compiles and the others wait for it.
    """
    path = target(units)
    if path.is_file():
        return path
    with (
        waiting("building native CPU kernels, once", _LOG, logging.WARNING),
        alone(path.with_suffix(".lock")),
    ):
        if not path.is_file():
            compile_library(units, path)
    return path


def compile_library(units: list[str], path: Path) -> None:
    """Compile these units into a library at ``path``, whole or not at all; raises BackendError."""
    tool, machine = compiler(), family()
    assert machine is not None
    if tool is None:
        raise BackendError("native kernels: no C++ compiler was found; install g++ or set CXX")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            objects, calls = [], []
            for name in units:
                unit = UNITS[machine][name]
                # Emulated instructions keep a compiler long with -O3.
                level = "-O1" if unit.test else "-O3"
                flags = (*_FLAGS, *_QUIET, level, *unit.flags, f"-DUNIT={name}")
                for source, more in _SOURCES:
                    objects.append(f"{folder}/{name}-{source}.o")
                    given = (*flags, *more, "-c", str(HERE / f"{source}.cpp"))
                    calls.append([tool, *given, "-o", objects[-1]])
            _run(calls)
            made = f"{folder}/library.so"
            listed = " ".join(f"ONE({name})" for name in units)
            define = (f"-DUNITS={listed}", f'-DSOURCES="{digest()}"')
            ours = (str(HERE / "api.cpp"), str(HERE / "pool.cpp"))
            parts = (*ours, *objects, "-pthread", "-o", made)
            _run([[tool, *_FLAGS, "-O2", *define, "-shared", *parts]])
            os.replace(made, path)
    except OSError as error:
        raise BackendError(
            f"native kernels cannot be compiled into {path.parent} ({error.strerror}); name another "
            "cache folder with LANTERN_ACCEL_CACHE"
        ) from None


def _run(calls: list[list[str]]) -> None:
    """Run compilers side by side; raises BackendError with the first error."""
    running = [
        subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for call in calls
    ]
    failed = ""
    for process in running:
        try:
            errors = process.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = f"error: nothing within {PATIENCE} seconds"
        except BaseException:  # an interrupt leaves no compiler behind
            for one in running:
                one.kill()
            raise
        if process.returncode and not failed:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            failed = next((line for line in lines if "error" in line), (lines or ["no output"])[-1])
    if failed:
        raise BackendError(
            f"native kernels do not compile with {calls[0][0]}: {failed}; try another compiler with CXX"
        )


def main() -> None:
    """Compile every unit of this processor family into a library, for a wheel."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PREBUILT)
    given = parser.parse_args()
    if family() is None:
        raise SystemExit(f"error: {missing()}")
    compile_library(wheel_units(), given.output)
    print(given.output)


if __name__ == "__main__":
    main()
