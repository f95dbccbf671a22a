"""Checks before the first engine: announced, together, and in processes of their own."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda_double import doubled_backend
from support.interpreter import compiles

from lantern_accel.errors import DeviceLostError
from lantern_accel_cuda import agreement, first_use
from lantern_accel_cuda.meters import Card
from lantern_accel_cuda.options import EVERY_STEP
from lantern_accel_cuda.trust import PASSED, Trust

KEY = {"card": "x"}
#: A process that checks as the backend's does: "dies" ends it, "loses" loses its GPU.
CHILD = """
import os, sys
from pathlib import Path
from lantern_accel_cuda.trust import Trust

def loses():
    raise RuntimeError("CUDA error: misaligned address")

checks = {"dies": lambda: os._exit(9), "loses": loses, **dict.fromkeys("abc", lambda: None)}
Trust({"card": "x"}, checks, Path(sys.argv[1])).check_here(sys.argv[2:])
"""


class Ended:
    """A process that has ended, with what it came to."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self, seconds: float | None = None) -> int:
        return self.code

    poll = wait


def test_those_that_a_process_took_with_it_run_again_one_a_process() -> None:
    known: set[str] = set()
    started: list[list[str]] = []

    def start(share: list[str]) -> Ended:
        started.append(share)
        for name in share:
            if name in ("dies", "loses"):
                known.update({name} & {"loses"})
                return Ended(9)
            known.add(name)
        return Ended(0)

    first_use.run(["dies", "a", "b", "loses", "c"], known.__contains__, 2, start, None)  # type: ignore[arg-type]  # doubles
    assert started[:2] == [["dies", "b", "c"], ["a", "loses"]]
    assert started[2:5] == [["dies"], ["b"], ["c"]]
    assert known == {"a", "b", "c", "loses"}
    assert started[5:] == [["dies"]]  # the third round is the last
    # What has no verdict after a process that ended well is left to this process.
    started.clear()
    first_use.run(
        ["y"], known.__contains__, 2, lambda share: started.append(share) or Ended(0), None
    )  # type: ignore[arg-type, func-returns-value, return-value]  # doubles
    assert started == [["y"]]
    # A GPU that serves one process alone opens in no other.
    opened: list[list[str]] = []
    cannot = lambda share: opened.append(share) or Ended(first_use.NOT_OPENED)  # noqa: E731
    first_use.run(["x", "y"], known.__contains__, 2, cannot, None)  # type: ignore[arg-type]  # doubles
    assert opened == [["x"], ["y"]]
    # A system may start no more processes, the second time too; those that it started are ended.
    ended: list[int] = []

    class Running(Ended):
        def poll(self) -> None:  # type: ignore[override]  # it runs
            return None

        def kill(self) -> None:
            ended.append(self.code)

    def refused(share: list[str]) -> Ended:
        if share == ["y"]:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Running(0)

    first_use.run(["x", "y"], known.__contains__, 2, refused, None)  # type: ignore[arg-type]  # doubles
    assert ended == [0]


def test_processes_are_bounded_by_cores_and_by_the_gpu_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_use.os, "sched_getaffinity", lambda pid: range(64))
    assert first_use.processes(80 * 10**9) == first_use.MOST
    assert first_use.processes(3 * 10**9) == 3
    assert first_use.processes(10**9) == 0
    monkeypatch.setattr(first_use.os, "sched_getaffinity", lambda pid: range(2))
    assert first_use.processes(80 * 10**9) == 2
    monkeypatch.setenv(first_use.ONE_OF, "1")
    assert first_use.processes(80 * 10**9) == 0


@pytest.mark.long
def test_this_process_goes_on_where_a_kernel_ends_another_one(tmp_path: Path) -> None:
    def start(share: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), *share])

    names = ["a", "dies", "loses", "b", "c"]
    here: list[str] = []
    trust = Trust(
        KEY, {name: lambda name=name: here.append(name) for name in names}, tmp_path,
        together=lambda kernel: names,
        elsewhere=lambda names, settled: first_use.run(names, settled, 2, start, tmp_path / "one"),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="left out"):
        assert [trust(name) for name in names] == [True, False, False, True, True]
    assert here == []
    assert "misaligned" in trust.known_verdict("loses") and "2 processes" in trust.known_verdict(
        "dies"
    )


def test_checks_say_how_many_there_are_before_they_start(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING, "lantern_accel")
    said: list[int] = []
    checks = dict.fromkeys("abc", lambda: said.append(len(caplog.records)))
    trust = Trust(KEY, checks, tmp_path, together=lambda kernel: ["a", "b"])
    assert trust("b") and trust("a")
    assert said == [1, 1] and "checking 2 of the GPU's kernels" in caplog.messages[0]
    assert trust("c")
    assert "checking 1 of" in caplog.messages[2]
    caplog.clear()
    assert Trust(KEY, checks, tmp_path)("a") and not caplog.messages


@compiles
def test_one_preference_checks_no_other_s_kernel_and_a_first_step_s_run_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr("lantern_accel_cuda.kernels.trivial.run", lambda device: None)
    ran: list[str] = []
    monkeypatch.setattr(
        agreement,
        "KERNELS",
        {name: lambda site, name=name: ran.append(name) for name in agreement.KERNELS},
    )
    shares: list[list[str]] = []

    def start(index: int, share: list[str], folder: Path, program: str) -> Ended:
        shares.append(share)
        return Ended(0)

    monkeypatch.setattr(first_use, "processes", lambda free: 4)
    monkeypatch.setattr(first_use, "start", start)
    backend, _ = doubled_backend(monkeypatch, trusted=False, preset="fast")
    # A GPU in exclusive mode, which this process holds, opens in no other.
    with monkeypatch.context() as patch:
        patch.setattr(Card, "exclusive", lambda self: True)
        (elsewhere := backend.trusting()._elsewhere)(["guide"], lambda name: False)
        assert shares == []
    elsewhere(["guide"], lambda name: False)
    assert [*map(len, shares)] == [1]
    shares.clear()
    assert backend.preferences.noise_bytes == 0 and backend.preferences.sums_in_place
    assert backend.preferences.free_rows == 64 and backend.preferences.default_batch == 8
    assert ran == [] and shares == []
    assert backend.preferences.reads_fewer_bits
    assert ran == ["rounded"] and shares == []  # one alone needs no process
    assert backend.preferences.skips_hidden
    assert {name.split(" in ")[0] for share in shares for name in share} == set(EVERY_STEP)
    # The processes of this test keep nothing, so that this one checks what they were given.
    assert set(ran[1:]) == set(EVERY_STEP)
    assert backend.trust.known_verdict("guide") == PASSED


@compiles
def test_a_gpu_lost_in_a_check_of_the_backend_s_is_told_from_the_next_process_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the whole backend, on a double that stays lost."""
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(first_use, "processes", lambda free: 0)
    kernels = dict.fromkeys(agreement.KERNELS, lambda site: None)
    monkeypatch.setattr(agreement, "walks", lambda site, forms: None)
    monkeypatch.setattr(agreement, "KERNELS", kernels)
    backend, double = doubled_backend(monkeypatch, trusted=False, preset="fast")
    monkeypatch.setattr("lantern_accel_cuda.kernels.trivial.run", lambda device: double.alive())

    def breaks(site: agreement.Site) -> None:
        double.lost = "CUDA error: an illegal memory access was encountered"
        double.synchronize()

    kernels["rotate_write"] = breaks
    with pytest.raises(DeviceLostError, match="'rotate_write in bfloat16' is left out from now on"):
        backend.uses("attend")
    with pytest.raises(DeviceLostError, match="before its kernels were checked"):
        backend.uses("accept")
    backend.close()
    again, _ = doubled_backend(monkeypatch, trusted=False, preset="fast")
    monkeypatch.setattr("lantern_accel_cuda.kernels.trivial.run", lambda device: None)
    with pytest.warns(UserWarning, match="'rotate_write in bfloat16' is left out"):
        assert [again.uses(name) for name in ("attend", "rotate_write", "accept")] == [
            True,
            False,
            True,
        ]
