"""The service that is loaded, as a process: started, ended, and what it uses of the host."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from lantern_accel.errors import LanternError
from lantern_accel_profiles.measure.environment import LoadWatch

#: Seconds that a service has to load its model, and to finish what clients left.
STARTS, ENDS = 900.0, 60.0


@contextmanager
def run_service(words: str, queue: int) -> Iterator[tuple[str, int, float]]:
    """Start ``lantern-accel serve`` in its own process: its address, number and seconds to start.

    Raises LanternError where it ends before it serves.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "lantern_accel", "serve", "--queue", str(queue)]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *shlex.split(words), "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise LanternError(f"the service ended with {process.returncode} before it served")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                if time.perf_counter() - began > STARTS:
                    raise LanternError(f"the service did not start within {STARTS:g} s") from None
            time.sleep(0.1)
        yield url, process.pid, time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ServiceLoad(LoadWatch):
    """What others use of the host, next to this client and the service, whose number is ``pid``."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        super().__init__()

    def ours(self) -> float:
        """Return the seconds that both have used."""
        return super().ours() + (0.0 if self.pid is None else seconds_of(self.pid))


def seconds_of(pid: int) -> float:
    """Return the seconds that a process has used; 0 where it is gone, and where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
