"""Lets Triton kernels serve on a card once they have agreed with the reference there.

Before its first use a kernel is compared with torch's operators on small data. What the kernel did is
kept in the cache folder for this card, driver, torch, Triton and source: it agreed, differed, could not
be compiled, or broke the GPU. One that did not agree is named in one line and left out, others stay.
What the machine lacks, such as a compiler, is said once for all kernels and kept nowhere.

A note lies in the cache while a check runs, and others that want the kernel wait. Where a note is found
then, its process has ended: the kernel took that process with it, or somebody killed it. The check runs
once more. A second time the kernel is left out, and tried again a day later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.device.waiting import waiting
from lantern_accel.errors import DeviceLostError, LanternWarning
from lantern_accel.files import alone, persistent_dir, read_record, write_record
from lantern_accel_cuda import faults

Check = Callable[[], object]
#: Runs checks by name in other processes; asks, for each, whether its verdict is there.
Elsewhere = Callable[[list[str], Callable[[str], bool]], None]
PASSED = "agrees with the reference"
#: Checks that may end with their process before the kernel is left out, and for how many seconds it is.
TRIES, LEFT_OUT = 2, 86400.0
_LOG = logging.getLogger("lantern_accel")


class Kept:
    """What is kept by name for one card, driver, torch, Triton and source; ``key`` says for which.

    ``folder``: None takes the cache's, and where there is none nothing is kept.
    """

    def __init__(self, key: Mapping[str, str], kind: str, folder: Path | None = None) -> None:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
        folder = folder or persistent_dir("kernels")
        self.path = None if folder is None else folder / f"{digest}.{kind}.json"

    def read(self) -> dict[str, Any]:
        """Return what is kept, by name."""
        return {} if self.path is None else read_record(self.path) or {}

    def keep(self, name: str, value: object) -> None:
        """Keep a value under a name, where the folder can be written."""
        if self.path is not None:
            with contextlib.suppress(OSError), alone(self.path.with_suffix(".lock")):
                write_record(self.path, {**self.read(), name: value})


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
        self.kept = Kept(key, "checks", folder)
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
        """Return what a kernel's check said; "" where it is to be checked."""
        return str(self.kept.read().get(kernel) or self._passing.get(kernel, ""))

    def check_here(self, kernels: Sequence[str]) -> None:
        """Check the kernels without a verdict, in this process."""
        for kernel in kernels:
            if self._able is not False and not self.known_verdict(kernel):
                self._check_kernel(kernel)

    def _get_verdict(self, kernel: str) -> str:
        """Return what is known of a kernel; it is checked first where that is nothing."""
        if not self.known_verdict(kernel):
            new = [one for one in self._together(kernel) if not self.known_verdict(one)]
            names = list(dict.fromkeys([kernel, *new]))
            what = f"checking {len(names)} of the GPU's kernels on this card, once"
            with waiting(what, _LOG, logging.WARNING):
                if len(names) > 1:
                    self._elsewhere(names, lambda one: bool(self.known_verdict(one)))
                self.check_here(names)
        return self.known_verdict(kernel)

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
            if faults.is_lost(error):
                raise DeviceLostError(
                    f"the GPU stopped working before its kernels were checked ({_line(error)}); start a "
                    "new process, and look at nvidia-smi and at the kernel's log (dmesg, Xid)"
                ) from error
            raise

    def _lacks(self, error: Exception) -> None:
        self._able = False
        warnings.warn(
            "Triton does not work here, and torch's operators serve in place of all its kernels: "
            f"{faults.lacking(error) or _line(error)}; or give --option preset=safe",
            LanternWarning,
            stacklevel=5,
        )

    def _check_kernel(self, kernel: str) -> None:
        """Check a kernel where no other process has, and keep what it did."""
        with self._noted(kernel) as unfinished:
            if unfinished:
                self._passing[kernel] = unfinished
            elif not self.known_verdict(kernel):
                try:
                    self._run_ready()
                    self._checks[kernel]()
                except DeviceLostError:
                    raise
                except Exception as error:
                    self._record_failure(kernel, error)
                else:
                    self._passing[kernel] = PASSED
                    self.kept.keep(kernel, PASSED)

    @contextlib.contextmanager
    def _noted(self, kernel: str) -> Iterator[str]:
        """Note that a check runs, while others wait; say why it may not run, if it may not."""
        if self.kept.path is None:
            yield ""
            return
        note = self.kept.path.with_suffix(f".{kernel}.running")
        with alone(note.with_suffix(".lock")):
            tries = 0
            with contextlib.suppress(OSError, ValueError):
                recent = time.time() - note.stat().st_mtime < LEFT_OUT
                tries = int(note.read_text(encoding="utf-8")) if recent else 0
            if tries >= TRIES:
                yield f"its check ended {tries} processes that ran it; it is tried again in a day"
                return
            with contextlib.suppress(OSError):
                note.write_text(str(tries + 1), encoding="utf-8")
            try:
                yield ""
            finally:
                with contextlib.suppress(OSError):
                    note.unlink(missing_ok=True)

    def _record_failure(self, kernel: str, error: Exception) -> None:
        lost, by_kernel = faults.is_lost(error), faults.by_kernel(error)
        if by_kernel:
            self.kept.keep(kernel, _line(error))
        if lost:
            again = "start again, and if it happens again give --option preset=safe"
            if by_kernel and kernel in self.kept.read():
                again = f"start again: the kernel {kernel!r} is left out from now on"
            raise DeviceLostError(
                f"the GPU stopped working while its kernel {kernel!r} was checked ({_line(error)}); "
                f"{again}"
            ) from error
        if not by_kernel and faults.lacking(error):
            self._lacks(error)
        self._passing[kernel] = _line(error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def source_digest() -> str:
    """Return a digest of the kernels' source, of what launches them and of what checks them."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    others = [here / name for name in ("agreement.py", "layers.py", "steps.py", "choosing.py")]
    for path in [*sorted((here / "kernels").glob("*.py")), *others]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
