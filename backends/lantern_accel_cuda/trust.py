"""Lets Triton kernels serve on a card once they have agreed with the reference there.

Before its first use a kernel is compared with torch's operators on small data. What came of it is kept
in the cache folder for this card, driver, torch, Triton and source; a kernel that failed is named in one
line and left out, the others stay. A note lies in the cache while a check runs. Where it is found and its
process is gone, the kernel took that process with it, or somebody killed it: the check runs once more. A
second time it is left out, and tried again a day later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lantern_accel.errors import LanternWarning
from lantern_accel.files import kept_dir, read_record, write_record

Check = Callable[[], object]
PASSED = "agrees with the reference"
#: Checks that may end with their process before the kernel is left out, and for how many seconds it is.
TRIES, LEFT_OUT = 2, 86400.0


class Trust:
    """What is known of the kernels of one card; ``key`` says what it holds for."""

    def __init__(
        self, key: Mapping[str, Any], checks: Mapping[str, Check], folder: Path | None = None
    ) -> None:
        self._checks = checks
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
        folder = folder or kept_dir("kernels")
        self._path = None if folder is None else folder / f"{digest}.json"
        self._known: dict[str, bool] = {}

    def __call__(self, kernel: str) -> bool:
        """Return whether a kernel serves; its check runs where nothing is kept of it."""
        if kernel not in self._known:
            said = self._kept().get(kernel) or self._unfinished(kernel) or self._checked(kernel)
            self._known[kernel] = said == PASSED
            if said != PASSED:
                warnings.warn(
                    f"the Triton kernel {kernel!r} is left out on this card, and torch's operators "
                    f"serve in its place: {said}",
                    LanternWarning,
                    stacklevel=3,
                )
        return self._known[kernel]

    def _kept(self) -> dict[str, str]:
        found = None if self._path is None else read_record(self._path)
        kernels = (found or {}).get("kernels")
        return kernels if isinstance(kernels, dict) else {}

    def _keep(self, kernel: str, said: str) -> None:
        if self._path is not None:
            # Another process may have checked others meanwhile. What it writes between the two halves of
            # the next line is lost, and checked once more.
            with contextlib.suppress(OSError):
                write_record(self._path, {"kernels": {**self._kept(), kernel: said}})

    def _checked(self, kernel: str) -> str:
        lasting = True
        with self._noted(kernel):
            try:
                self._checks[kernel]()
                said = PASSED
            except Exception as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                # Memory that others hold now says nothing about the kernel.
                lasting = "memory" not in said.lower()
        if lasting:
            self._keep(kernel, said)
        return said

    # --- checks that take their process with them ----------------------------------------------

    def _note(self, kernel: str) -> Path | None:
        return None if self._path is None else self._path.with_suffix(f".{kernel}.running")

    @contextlib.contextmanager
    def _noted(self, kernel: str) -> Iterator[None]:
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

    def _unfinished(self, kernel: str) -> str:
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
