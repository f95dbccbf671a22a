"""Lets Triton kernels serve on a card once they have agreed with the reference there.

Before its first use a kernel is compared with torch's operators on small data. What came of it is kept
in the cache folder for this card, driver, torch, Triton and source; a kernel that failed is named in one
line and left out, the others stay. A note lies in the cache while a check runs: where it is found and
its process is gone, the kernel took that process with it, and is left out too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lantern_accel.errors import LanternWarning
from lantern_accel.files import kept_dir, read_record, write_record

Check = Callable[[], object]
PASSED = "agrees with the reference"


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
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(f"{socket.gethostname()} {os.getpid()}", encoding="utf-8")
        try:
            yield
        finally:
            if note is not None:
                with contextlib.suppress(OSError):
                    note.unlink(missing_ok=True)

    def _unfinished(self, kernel: str) -> str:
        """Say that an earlier check ended with its process; "" where none did, or one is under way."""
        note = self._note(kernel)
        try:
            host, pid = ("" if note is None else note.read_text(encoding="utf-8")).split()
            number = int(pid)
        except (OSError, ValueError):
            return ""
        if host != socket.gethostname() or number == os.getpid() or _runs(number):
            return ""
        said = "its check ended the process that ran it"
        self._keep(kernel, said)
        with contextlib.suppress(OSError):
            assert note is not None
            note.unlink(missing_ok=True)
        return said


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def source_digest() -> str:
    """Return a digest of the kernels' source and of what checks them."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [*sorted((here / "kernels").glob("*.py")), here / "agreement.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
