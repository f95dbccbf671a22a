"""A kernel serves after it agreed with the reference on this card, once; one that did not is left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.cuda_double import doubled_backend
from support.interpreter import compiles

from lantern_accel.errors import DeviceLostError
from lantern_accel.testing.result import Failed
from lantern_accel_cuda import agreement, trust
from lantern_accel_cuda.trust import Trust

KEY = {"card": "Double of a GPU", "driver": "550", "triton": "3.9"}


class Checks:
    """Two kernels: one is right, the other raises ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ran: list[str] = []
        self.error = error

    def __call__(self) -> dict[str, Callable[[], object]]:
        def right() -> None:
            self.ran.append("right")

        def wrong() -> None:
            self.ran.append("wrong")
            if self.error is not None:
                raise self.error

        return {"right": right, "wrong": wrong}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        warnings.showwarning = lambda message, *rest, **more: found.append(str(message))
        yield found
        warnings.showwarning = before


def test_a_kernel_is_checked_once_for_a_card_driver_and_version(tmp_path: Path) -> None:
    checks = Checks()
    first = Trust(KEY, checks(), tmp_path)
    assert first("right") and first("right")
    assert Trust(KEY, checks(), tmp_path)("right")  # another process
    assert checks.ran == ["right"]
    for name in KEY:
        assert Trust({**KEY, name: "another"}, checks(), tmp_path)("right")
    assert checks.ran == ["right"] * 4
    assert not [*tmp_path.glob("*.running")]


def no_compiler() -> Exception:
    """Return what Triton raises where it finds no compiler."""
    from triton.runtime.build import compile_module_from_src

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC", raising=False)
        patch.setenv("PATH", "")
        with pytest.raises(RuntimeError) as found:
            compile_module_from_src("int a_source_that_no_cache_has;", "main")
    return found.value


def shared_memory() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(120_000, 101_376, "shared memory")


def not_compiled() -> Exception:
    from triton.compiler.errors import CompilationError

    return CompilationError("tl.nothing()", None, "no such function")  # type: ignore[arg-type]


def cuda(text: str) -> Callable[[], Exception]:
    return lambda: RuntimeError(f"CUDA error: {text}\nCUDA kernel errors might be asynchronous")


NO_DRIVER = "libcuda.so cannot found!\nPlease make sure GPU is set up"
GCC = ["/usr/bin/gcc", "main.c", "-l:libcuda.so.1"]
ALL, LEFT_OUT = "serve in place of all its kernels: .*", "the Triton kernel 'wrong' is left out.*"
#: What a check may raise, a fragment of the line about it, and whether other kernels serve.
DRIVER_TEXTS = [
    (no_compiler, ALL + "apt-get install gcc", False),
    (lambda: subprocess.CalledProcessError(1, GCC), ALL + "python3-dev", False),
    (lambda: AssertionError(NO_DRIVER), ALL + "libcuda.so.1", False),
    (lambda: OSError(28, "No space left on device"), ALL + "the disk is full", False),
    (lambda: PermissionError(13, "Permission denied"), ALL + "TRITON_CACHE_DIR", False),
    (lambda: torch.OutOfMemoryError("CUDA out of memory"), LEFT_OUT + "out of memory", True),
    (cuda("out of memory"), LEFT_OUT + "out of memory", True),
]
#: What a kernel is on this card: the next process, where the fault is gone, leaves it out unseen.
KEPT = [
    (shared_memory, LEFT_OUT + "shared memory", True),
    (not_compiled, LEFT_OUT + "CompilationError", True),
    (lambda: Failed("off by 0.3"), LEFT_OUT + "off by 0.3", True),
]


@compiles
@pytest.mark.parametrize(
    ("error", "says", "others", "kept"),
    [*((*one, False) for one in DRIVER_TEXTS), *((*one, True) for one in KEPT)],
)
def test_what_a_check_meets_is_said_once_a_process_and_kept_where_the_kernel_is_at_fault(
    error: Callable[[], Exception], says: str, others: bool, kept: bool, tmp_path: Path,
    lines: list[str],
) -> None:  # fmt: skip
    checks = Checks(error())
    trust = Trust(KEY, checks(), tmp_path)
    assert not trust("wrong") and trust("right") == others and not trust("wrong")
    assert len(lines) == 1 and re.search(says, lines[0])
    assert checks.ran == ["wrong", "right"][: 1 + others]
    checks.error = None
    for number in range(2):
        later = Trust(KEY, checks(), tmp_path)
        assert later("wrong") == (not kept) and later("right")
        assert len(lines) == 1 + kept * (1 + number)
    assert checks.ran.count("wrong") == 2 - kept and checks.ran.count("right") == 1
    assert not [*tmp_path.glob("*.running")]


@pytest.mark.parametrize(
    ("error", "says", "kept"),
    [
        (cuda("an illegal memory access was encountered"), "'wrong' is left out from now on", True),
        (cuda("misaligned address"), "'wrong' is left out from now on", True),
        (cuda("uncorrectable ECC error encountered"), "preset=safe", False),
    ],
)
def test_a_gpu_lost_in_a_check_ends_this_process_and_a_kernel_at_fault_serves_in_no_later_one(
    error: Callable[[], Exception], says: str, kept: bool, tmp_path: Path, lines: list[str]
) -> None:
    checks = Checks(error())
    with pytest.raises(DeviceLostError, match=f"start again.*{says}") as found:
        Trust(KEY, checks(), tmp_path)("wrong")
    assert found.value.__cause__ is checks.error
    checks.error = None
    later = Trust(KEY, checks(), tmp_path)
    assert later("wrong") == (not kept) and later("right")
    assert checks.ran == ["wrong"] * (2 - kept) + ["right"] and len(lines) == kept


def test_a_kernel_that_agreed_does_not_serve_where_the_compiler_is_gone(
    tmp_path: Path, lines: list[str]
) -> None:
    """What Triton compiled may be gone with it: a launch would end a request."""
    checks = Checks()
    assert Trust(KEY, checks(), tmp_path)("right")

    def ready() -> None:
        raise RuntimeError("Failed to find C compiler.")

    trust = Trust(KEY, checks(), tmp_path, ready)
    assert not trust("right") and not trust("wrong") and checks.ran == ["right"]
    assert len(lines) == 1 and "apt-get install gcc" in lines[0]
    assert Trust(KEY, checks(), tmp_path)("right") and len(lines) == 1


def test_what_was_lost_before_a_check_is_no_kernel_s_fault(tmp_path: Path) -> None:
    """An earlier kernel's error comes out at the next call, whichever it is."""
    gone: list[Exception] = []
    checks = Checks()

    def ready() -> None:
        for one in gone:
            raise one

    trust = Trust(KEY, checks(), tmp_path, ready)
    assert trust("right")
    gone.append(cuda("misaligned address")())
    with pytest.raises(DeviceLostError, match="before its kernels were checked"):
        trust("wrong")
    assert Trust(KEY, checks(), tmp_path)("wrong") and checks.ran == ["right", "wrong"]


def test_a_folder_that_cannot_be_written_costs_a_check_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("lantern_accel_cuda.trust.write_record", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    checks = Checks()
    assert Trust(KEY, checks(), tmp_path)("right")
    assert Trust(KEY, checks(), tmp_path)("right")
    assert checks.ran == ["right", "right"]
    monkeypatch.setattr("lantern_accel_cuda.trust.persistent_dir", lambda name: None)
    assert Trust(KEY, checks())("right")


def test_of_two_that_check_at_once_one_waits_for_the_other_s_verdict(
    tmp_path: Path, lines: list[str]
) -> None:
    started, ends = threading.Event(), threading.Event()
    ran: list[str] = []
    found: list[bool] = []

    def check() -> None:
        ran.append("check")
        started.set()
        ends.wait(30)

    def process() -> None:
        found.append(Trust(KEY, {"right": check}, tmp_path)("right"))

    threads = [threading.Thread(target=process) for _ in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    ends.set()
    for one in threads:
        one.join(60)
    assert (found, ran, lines) == ([True, True], ["check"], [])


DIES = """
import os, sys
from pathlib import Path
from lantern_accel_cuda.trust import Trust
Trust({"card": "x"}, {"attend": lambda: os._exit(9)}, Path(sys.argv[1]))("attend")
"""


def test_a_kernel_that_took_two_processes_with_it_is_left_out_for_a_day(
    tmp_path: Path, lines: list[str]
) -> None:
    """One that ended once may have been killed: its check runs again."""

    def die() -> None:
        run = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], timeout=120, check=False)
        assert run.returncode == 9

    def serves(check: Callable[[], object] = lambda: None) -> bool:
        return Trust({"card": "x"}, {"attend": check}, tmp_path)("attend")

    die()
    (note,) = tmp_path.glob("*.running")
    once = note.read_text()
    assert serves() and lines == [] and not note.exists()
    for kept in tmp_path.glob("*.json"):
        kept.unlink()
    note.write_text(once)
    die()
    assert not serves(lambda: pytest.fail("it ran again"))
    assert "its check ended 2 processes" in lines[0]
    os.utime(note, (0, 0))
    assert serves() and not note.exists()


def test_a_note_that_says_no_number_is_no_fault(tmp_path: Path) -> None:
    checks = Checks()
    first = Trust(KEY, checks(), tmp_path)
    assert first.kept.path is not None
    for said in ("nonsense", ""):
        first.kept.path.with_suffix(".right.running").write_text(said)
        first.kept.path.unlink(missing_ok=True)
        assert Trust(KEY, checks(), tmp_path)("right")


@compiles
def test_triton_that_cannot_run_here_leaves_torch_s_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str]
) -> None:
    """Host memory has no Triton outside its interpreter: one line for all kernels, at the first."""
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    backend, _ = doubled_backend(monkeypatch, trusted=False, preset="fast")
    x, weight = torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16()
    assert torch.equal(backend.rms_norm(x, weight, 0.0), x)
    assert not backend.preferences.skips_hidden
    assert not any(backend.uses(name) for name in agreement.KERNELS)
    assert len(lines) == 1 and "in place of all its kernels" in lines[0]
    assert not [*tmp_path.rglob("*.json")]


@compiles
def test_kernels_of_tensor_cores_serve_from_compute_capability_8_0_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str]
) -> None:
    """Below it Triton multiplies without them and spills registers: right, and many times slower."""
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    backend, double = doubled_backend(monkeypatch, preset="fast")
    double.capability = (7, 5)
    refused = {name for name in agreement.KERNELS if not backend.uses(name)}
    assert refused == {"attend", "rounded", "tiles", "few"}
    assert not backend.serves_few(torch.zeros(1, 2, 32, dtype=torch.bfloat16))
    assert not backend.preferences.skips_hidden and "few in float16" not in backend.together(
        "guide"
    )
    assert len(lines) == 1 and "compute capability 7.5" in lines[0]
    other, double = doubled_backend(monkeypatch, preset="fast")
    double.capability = (8, 0)
    assert all(other.uses(name) for name in agreement.KERNELS) and len(lines) == 1


@compiles
def test_what_is_kept_is_among_the_readings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    backend, _ = doubled_backend(monkeypatch, trusted=False, preset="fast")
    assert backend.facts().readings == ()
    checks = {"guide": trust.PASSED, "few in bfloat16": "Failed: off by 0.3"}
    for name, said in checks.items():
        backend.trust.kept.keep(name, said)
    times = {"16": {"0": 0.010, "torch": 0.020}}
    backend.choices.kept.keep("gate 5120x1280 bfloat16", times)
    assert backend.facts().readings == (
        "kernels: 1 agree, left out: few in bfloat16 (Failed: off by 0.3)",
        f"ms of gate 5120x1280 bfloat16: {times}",
    )
