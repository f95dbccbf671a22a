"""Runs groups of checks in processes of their own: a crash or a hang of a driver costs its group.

The parent never opens the device, since some serve one process at a time. A child opens it, says which
checks there are, and runs those that are asked for. What a driver prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.cli.edge import INTERRUPTED
from lantern_accel.device.conformance import Outcome, Report
from lantern_accel.errors import BackendError, LanternError, LanternWarning, RequestError

if TYPE_CHECKING:
    from lantern_accel.testing.kit import Wait

#: Groups that measure time or memory: no other runs next to them.
ALONE = ("device",)
#: Seconds that a process may take to open the device.
OPENING = 300.0
#: Seconds between an interrupt and a kill.
PATIENCE = 10.0
CHILD = "from lantern_accel.cli.separate import serve; serve()"


# --- the parent -----------------------------------------------------------------------------------


class Child:
    """One process with the device open; it is ended where a check takes ``limit`` seconds."""

    def __init__(self, device: str, options: Mapping[str, Any], jobs: int, limit: float) -> None:
        #: The check that runs, and what it does.
        self.check = self.doing = ""
        self.limit, self.late = limit, False
        # It finds what this process finds, and nothing else in the folder it is started in.
        alone = ["-P"] if sys.version_info >= (3, 11) else []
        self._pipe, theirs = Pipe()
        #: Where Python was when the process crashed.
        self._crash = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        given = [theirs.fileno(), self._crash.fileno()]
        # Interrupts are held back from the process until it can take them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [sys.executable, *alone, "-c", CHILD, *map(str, given)],
                env=_environment(jobs),
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.tell({"device": device, "options": dict(options)})
        #: What the process says, until it has ended.
        self.messages = self._messages()

    def tell(self, message: object) -> None:
        """Send a message, None where nothing more is asked; a process that has ended gets none."""
        with contextlib.suppress(OSError):
            self._pipe.send(message)

    def _messages(self) -> Iterator[tuple[str, Any]]:
        """Go through what the process says and what of; end it where it does not answer."""
        deadline = time.monotonic() + OPENING
        while True:
            try:
                message = self._pipe.recv() if self._pipe.poll(0.5) else None
            except (EOFError, OSError):
                break
            if message is not None:
                kind, said = message
                if kind in ("began", "outcome"):
                    deadline = time.monotonic() + self.limit
                    self.check, self.doing = said if kind == "began" else "", ""
                elif kind == "done":
                    deadline = time.monotonic() + OPENING
                elif kind in ("waits", "error"):
                    self.doing = said[1] if kind == "waits" else str(said)
                yield kind, said
            elif self.process.poll() is not None:
                break
            elif time.monotonic() > deadline:
                self.process.send_signal(signal.SIGKILL if self.late else signal.SIGINT)
                self.late, deadline = True, time.monotonic() + PATIENCE
        self.process.wait()

    def close(self) -> None:
        """End the process at once, and close what connects it."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._pipe.close()
        self._crash.close()

    def why(self) -> str:
        """Say how it ended, and where, as the end of the sentence 'its process ...'."""
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if self.late:
            how = "did not answer and was killed"
        elif code < 0:
            known = [one.name for one in signal.Signals if one == -code]
            how = f"was ended by {known[0] if known else f'signal {-code}'}"
        self._crash.seek(0)
        text = self._crash.read()
        sys.stderr.write(text)
        of_thread = text.partition("Current thread")[2].splitlines()  # faulthandler's words
        lines = [" ".join(one.split()) for one in of_thread if one.lstrip().startswith("File ")]
        where = "; ".join(filter(None, (self.doing, *lines[:1])))
        return f"{how}{where and f' ({where})'}"


def _environment(jobs: int) -> dict[str, str]:
    """Return a child's environment: the modules of this process, and its share of the processors."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
    return found


@dataclass(kw_only=True)
class Run:
    """Runs the kit with a process for every group, which a thread follows.

    ``jobs``: groups that run at once. A check that takes ``limit`` seconds has failed; another process
    runs the rest of its group. ``on_group`` gets the report after each group; the callbacks are called
    by one thread at a time.
    """

    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    jobs: int = 1
    limit: float
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    on_wait: Wait = lambda check, doing, seconds: None
    on_group: Callable[[Report], None] = lambda report: None
    #: That of no check, once the device has been opened.
    fresh: Report = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        #: The checks that there are, those that are asked for, and groups whose checks run apart.
        self.known: list[str] = []
        self.names: list[str] = []
        self.apart: set[str] = set()
        self.counters: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._started: list[Child] = []
        #: Processes that wait for their checks.
        self._free: list[Child] = []
        self._warned: set[str] = set()
        self._over, self._hung, self._lock = False, False, threading.RLock()
        self._threads = ThreadPoolExecutor(self.jobs)

    def conform(
        self,
        only: Sequence[str] = (),
        *,
        resume: Path | None = None,
        certificate: Path | None = None,
        command: str = "",
    ) -> Report:
        """Run the checks, once.

        ``resume``: a report whose checks are not run again. Raises what opening the device raises; a
        process that ends by itself fails the checks that it did not come to.
        """
        from lantern_accel.testing import kit

        try:
            self._open()
            self.names = list(kit.select(list(only), dict.fromkeys(self.known)))  # type: ignore[arg-type]  # names
            if resume is not None and resume.is_file():
                self.outcomes = _kept(resume, self.fresh)
            self._run()
            if certificate is not None:
                self._certify(certificate, command)
            return self.now()
        finally:
            self._close()

    def _start(self) -> Child:
        """Return a process that waits, else another one."""
        with self._lock:
            if self._over:
                raise KeyboardInterrupt
            if not self._free:
                self._free.append(Child(self.device, self.options, self.jobs, self.limit))
                self._started += self._free
            return self._free.pop()

    def _messages(self, child: Child) -> Iterator[tuple[str, Any]]:
        """Go through what a process says, each of its warnings once; nothing once the run is over."""
        for kind, said in child.messages:
            with self._lock:
                if self._over:
                    return
                if kind != "warned":
                    yield kind, said
                elif said not in self._warned:
                    self._warned.add(said)
                    warnings.warn(said, LanternWarning, stacklevel=3)

    def _open(self) -> None:
        """Start the first process and learn which checks there are; raises what opening raises there."""
        child = self._start()
        for kind, said in self._messages(child):
            if kind == "error":
                raise said
            if kind == "ready":
                self.fresh, self.known, self.apart = said
                return self._free.append(child)
        raise BackendError(
            f"the process that opened the device {child.why()}; check its driver, or open it without "
            "another process: --in-process"
        )

    def _run(self) -> None:
        """Run the checks that have no outcome, a group a process and some at once."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            if name not in self.outcomes:
                group = name.partition(".")[0]
                groups.setdefault(name if group in self.apart else group, []).append(name)
        alone = [group for group in groups if group.partition(".")[0] in ALONE]
        others = [
            self._threads.submit(self._run_group, group, groups[group])
            for group in groups
            if group not in alone
        ]
        for one in wait(others, return_when=FIRST_EXCEPTION).done:
            one.result()
        for group in alone:
            self._run_group(group, groups[group])

    def _run_group(self, group: str, left: list[str]) -> None:
        """Run a group's checks; where one takes too long, another process goes on with the others."""
        while left:
            child = self._start()
            child.tell({"checks": left})
            for kind, said in self._messages(child):
                if kind == "outcome":
                    left.remove(said.name)
                    self._keep(said)
                elif kind == "waits":
                    self.on_wait(*said)
                elif kind == "done":
                    for kept, more in zip(self.counters, said, strict=True):
                        kept.update({name: kept.get(name, 0) + n for name, n in more.items()})
                    child.tell(None)
            with self._lock:
                if self._over:
                    return
                self._end(group, left, child)
                self.on_group(self.now())

    def _end(self, group: str, left: list[str], child: Child) -> None:
        """Report what a process that has ended did not come to as failed, for one cause."""
        self._hung |= child.late
        if child.late and child.check:
            where = child.doing and f" ({child.doing})"
            detail = f"took longer than its limit, {child.limit:g} s{where}; its process was ended"
            self._keep(Outcome(name=child.check, state="failed", detail=detail))
            left.remove(child.check)
        elif left:
            if child.process.returncode == INTERRUPTED and not child.late:
                raise KeyboardInterrupt  # a terminal's, which may come to this process later
            cause = f"the process of the group {group!r} {child.why()}"
            at = f", in {child.check}" if child.check else ""
            for name in left:
                detail = cause if name == child.check else f"not run: {cause}{at}"
                self._keep(Outcome(name=name, state="failed", detail=detail, cause=f"{cause}{at}"))
            left.clear()

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self.on_outcome(outcome)

    def now(self) -> Report:
        """Return the report of what has run."""
        return self.fresh.with_outcomes(self.outcomes.values(), self.names)

    def _certify(self, path: Path, command: str) -> None:
        """Let one more process make the certificate; raises BackendError where it does not."""
        given = {"report": self.now(), "known": self.known, "counters": self.counters}
        given["watch"] = not self._hung
        child, done = self._start(), False
        child.tell({"certify": (path, {**given, "command": command})})
        for kind, said in self._messages(child):
            if kind == "error":
                raise said
            if kind == "done":
                done = True
                child.tell(None)
        if not done:
            raise BackendError(
                f"no certificate was written: the process that makes it {child.why()}"
            )

    def _close(self) -> None:
        """End what still runs, and report what has run; a second interrupt kills it at once."""
        with self._lock:
            self._over = True
        try:
            for child in self._started:
                child.process.send_signal(signal.SIGINT)
            for child in self._started:
                child.process.wait(PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            for child in self._started:
                child.process.kill()
            self._threads.shutdown(cancel_futures=True)
            for child in self._started:
                child.close()
            if self.names:
                self.on_group(self.now())


def _kept(path: Path, fresh: Report) -> dict[str, Outcome]:
    """Return the outcomes of an earlier run of the same backend, torch and device."""
    from lantern_accel.store import check_same, read_json, validated

    stored = validated(Report, path, read_json(path, "lantern-accel conform"))
    parts = ("backend", "backend_version", "device", "device_name", "simulated", "torch")
    theirs, ours = ({name: getattr(one, name) for name in parts} for one in (stored, fresh))
    check_same(path, theirs, ours, "file with -o")
    return {one.name: one for one in stored.outcomes}


# --- the child ------------------------------------------------------------------------------------


def serve() -> None:
    """Open the device that the parent asks for, say which checks there are, and do what it asks then."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    faulthandler.enable(int(sys.argv[2]))
    lock = threading.Lock()

    def send(kind: str, said: object) -> None:
        with lock:
            pipe.send((kind, said))

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, LanternWarning):
            send("warned", str(message))

    warnings.simplefilter("always", LanternWarning)
    warnings.showwarning = show
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _serve(pipe, send)
    except LanternError as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, to a process that ends already
        # Of another class the parent might have to import a plug-in.
        ours = type(error).__module__ == LanternError.__module__
        plain = ours and isinstance(error, BackendError | RequestError)
        send("error", error if plain else BackendError(str(error)))
        raise SystemExit(error.exit_code) from None
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        os._exit(INTERRUPTED)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        send("error", BackendError(text))
        raise


def _serve(pipe: Connection[Any, Any], send: Callable[[str, object], None]) -> None:
    from lantern_accel.device.plugins import choose_device

    asked = pipe.recv()
    # Before torch is imported: some vendors read the environment then.
    chosen = choose_device(asked["device"], asked["options"])
    from lantern_accel.testing import certificate, kit

    with chosen.open() as backend:
        for text in kit.near_misses(backend):
            warnings.warn(text, LanternWarning, stacklevel=2)
        checks = kit.checks_of(backend)
        send("ready", (kit.report_of(backend), list(checks), set(backend.conformance().apart)))
        before = backend.counters()
        while (message := pipe.recv()) is not None:
            for name in message.get("checks", ()):
                send("began", name)
                check, on_wait = checks[name], lambda *waits: send("waits", waits)
                send("outcome", kit.run_check(backend, name, check, on_wait=on_wait))
            if more := message.get("certify"):
                path, given = more
                given |= {"spec": chosen.spec, "options": chosen.options}
                certificate.write(certificate.certify(backend, **given), path)
            send("done", (before, backend.counters()))
