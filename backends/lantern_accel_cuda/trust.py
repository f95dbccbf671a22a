"""Lets Triton kernels serve on a card once they have agreed with the reference there.

Before its first use a kernel is compared with torch's operators on small data. What the kernel did is
kept in the cache folder for this card, driver, torch, Triton and source: it agreed, differed, could not
be compiled, or broke the GPU. One that did not agree is named in one line and left out, others stay.
What the machine lacks, such as a compiler, is said once for all kernels and kept nowhere.

A note lies in the cache while a check runs. Where it is found and its process is gone, the kernel took
that process with it, or somebody killed it: the check runs once more. A second time it is left out, and
tried again a day later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from lantern_accel.device.waiting import waiting
from lantern_accel.errors import DeviceLostError, LanternWarning
from lantern_accel.files import persistent_dir, read_record, write_record

Check = Callable[[], object]
#: Runs checks by name in other processes; asks, for each, whether its verdict is there.
Elsewhere = Callable[[list[str], Callable[[str], bool]], None]
PASSED = "agrees with the reference"
#: Checks that may end with their process before the kernel is left out, and for how many seconds it is.
TRIES, LEFT_OUT = 2, 86400.0
_LOG = logging.getLogger("lantern_accel")


class Trust:
    """What is known of the kernels of one card; ``key`` says what it holds for.

    ``ready`` runs before every check, and before a kept verdict serves: it raises what Triton lacks here,
    or how the GPU was lost before. ``together``: the checks that run with one; ``elsewhere`` runs them in
    processes of their own.
    """

    def __init__(
        self,
        key: Mapping[str, str],
        checks: Mapping[str, Check],
        folder: Path | None = None,
        ready: Check = lambda: None,
        together: Callable[[str], Sequence[str]] = lambda kernel: [kernel],
        elsewhere: Elsewhere = lambda names, settled: None,
    ) -> None:
        self._checks, self._ready = checks, ready
        self._together, self._elsewhere = together, elsewhere
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
        folder = folder or persistent_dir("kernels")
        self.path = None if folder is None else folder / f"{digest}.json"
        self._known: dict[str, bool] = {}
        self._passing: dict[str, str] = {}
        self._able: bool | None = None

    def __call__(self, kernel: str) -> bool:
        """Return whether a kernel serves; its check runs where nothing is kept of it.

        Raises DeviceLostError where the GPU is lost, with the kernel that lost it.
        """
        if kernel not in self._known:
            serves = self._is_able() and self._get_verdict(kernel) == PASSED
            self._known[kernel] = serves
            if self._able and not serves:
                warnings.warn(
                    f"the Triton kernel {kernel!r} is left out on this card, and torch's operators "
                    f"serve in its place: {self._get_verdict(kernel)}",
                    LanternWarning,
                    stacklevel=3,
                )
        return self._known[kernel]

    def known_verdict(self, kernel: str) -> str:
        """Return what is kept of a kernel, or why it is not checked now; "" where it is to be checked."""
        return self.list_verdicts().get(kernel) or self._find_unfinished(kernel)

    def check_here(self, kernels: Sequence[str]) -> None:
        """Check the kernels without a verdict, in this process."""
        for kernel in kernels:
            if self._able is not False and not (
                self.known_verdict(kernel) or kernel in self._passing
            ):
                self._check_kernel(kernel)

    def _get_verdict(self, kernel: str) -> str:
        """Return what is known of a kernel; it is checked first where that is nothing."""
        if not (said := self.known_verdict(kernel) or self._passing.get(kernel, "")):
            new = [one for one in self._together(kernel) if not self.known_verdict(one)]
            names = list(dict.fromkeys([kernel, *(one for one in new if one not in self._passing)]))
            what = (
                f"{len(names)} of the GPU's kernels" if len(names) > 1 else f"the kernel {kernel!r}"
            )
            with waiting(f"checking {what} on this card, once", _LOG, logging.WARNING):
                if len(names) > 1:
                    self._elsewhere(names, lambda one: bool(self.known_verdict(one)))
                self.check_here(names)
            said = self._passing.get(kernel) or self.known_verdict(kernel)
        return said

    def _is_able(self) -> bool:
        """Return whether Triton works here; where not, say once what it lacks."""
        if self._able is None:
            try:
                self._run_ready()
            except Exception as error:
                if isinstance(error, DeviceLostError):
                    raise
                self._lacks(error)
            else:
                self._able = True
        return bool(self._able)

    def _run_ready(self) -> None:
        """Try Triton, and let an earlier error of the GPU come out: no later kernel is blamed for it."""
        try:
            self._ready()
        except Exception as error:
            from lantern_accel_cuda import faults

            if faults.is_lost(error):
                raise DeviceLostError(
                    f"the GPU stopped working before its kernels were checked ({_line(error)}); start a "
                    "new process, and look at nvidia-smi and at the kernel's log (dmesg, Xid)"
                ) from error
            raise

    def _lacks(self, error: Exception) -> None:
        from lantern_accel_cuda import faults

        self._able = False
        warnings.warn(
            "Triton does not work here, and torch's operators serve in place of all its kernels: "
            f"{faults.lacking(error) or _line(error)}; or give --option preset=safe",
            LanternWarning,
            stacklevel=5,
        )

    def list_verdicts(self) -> dict[str, str]:
        """Return what is kept of kernels, by the names of their checks."""
        found = None if self.path is None else read_record(self.path)
        kernels = (found or {}).get("kernels")
        return kernels if isinstance(kernels, dict) else {}

    def _keep(self, kernel: str, said: str) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError), alone(self.path.with_suffix(".lock")):
                write_record(self.path, {"kernels": {**self.list_verdicts(), kernel: said}})

    def _check_kernel(self, kernel: str) -> None:
        """Check a kernel, and keep what it did."""
        with self._mark_running(kernel):
            try:
                self._run_ready()
                self._checks[kernel]()
            except DeviceLostError:
                raise
            except Exception as error:
                self._record_failure(kernel, error)
            else:
                self._passing[kernel] = PASSED
                self._keep(kernel, PASSED)

    def _record_failure(self, kernel: str, error: Exception) -> None:
        from lantern_accel_cuda import faults

        lost, by_kernel = faults.is_lost(error), faults.by_kernel(error)
        if by_kernel:
            self._keep(kernel, _line(error))
        if lost:
            again = "start again, and if it happens again give --option preset=safe"
            if by_kernel and self.list_verdicts().get(kernel):
                again = f"start again: the kernel {kernel!r} is left out from now on"
            raise DeviceLostError(
                f"the GPU stopped working while its kernel {kernel!r} was checked ({_line(error)}); "
                f"{again}"
            ) from error
        if not by_kernel and faults.lacking(error):
            self._lacks(error)
        self._passing[kernel] = _line(error)

    # --- checks that take their process with them ----------------------------------------------

    def _note(self, kernel: str) -> Path | None:
        return None if self.path is None else self.path.with_suffix(f".{kernel}.running")

    @contextlib.contextmanager
    def _mark_running(self, kernel: str) -> Iterator[None]:
        note = self._note(kernel)
        if note is not None:
            tries = self._tries(kernel) + 1
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(f"{socket.gethostname()} {os.getpid()} {tries}", encoding="utf-8")
        try:
            yield
        finally:
            if note is not None:
                with contextlib.suppress(OSError):
                    note.unlink(missing_ok=True)

    def _tries(self, kernel: str) -> int:
        """Return how many checks ended with their process; 0 too while one is under way elsewhere."""
        note = self._note(kernel)
        try:
            host, pid, tries = ("" if note is None else note.read_text(encoding="utf-8")).split()
            number, count = int(pid), int(tries)
        except (OSError, ValueError):
            return 0
        elsewhere = host != socket.gethostname() or number == os.getpid() or _runs(number)
        return 0 if elsewhere else count

    def _find_unfinished(self, kernel: str) -> str:
        """Say that earlier checks ended with their processes; "" where the check may run."""
        note = self._note(kernel)
        if note is None or self._tries(kernel) < TRIES:
            return ""
        try:
            since = time.time() - note.stat().st_mtime
        except OSError:
            return ""
        if since > LEFT_OUT:
            return ""
        return f"its check ended the process that ran it {TRIES} times; it is tried again in a day"


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes, and threads, from the block; a file system without locks keeps none."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(FileLock(path))
        yield


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def source_digest() -> str:
    """Return a digest of the kernels' source, of what launches them and of what checks them."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    others = [here / name for name in ("agreement.py", "layers.py", "steps.py", "choosing.py")]
    for path in [*sorted((here / "kernels").glob("*.py")), *others]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
