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
from multiprocessing.connection import Connection, Pipe, wait
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

#: What is said, and what of.
Message = tuple[str, Any]


def end(
    process: subprocess.Popen[bytes], patience: float | None = None, *, group: bool = False
) -> None:
    """Interrupt a process as Ctrl-C does, and kill it where it has not ended ``patience`` seconds later.

    ``patience``: 10 s unless given. ``group``: with all processes of the group that it leads.
    """
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            break
        try:
            if group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            process.wait(PATIENCE if patience is None else patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


# --- the parent -----------------------------------------------------------------------------------


class Child:
    """One process with the device open, and what is known of the check that it runs."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.group, self.left = "", list[str]()
        self.check = self.doing = ""
        self.deadline = time.monotonic() + OPENING
        self.late = self.done = False
        # It finds what this process finds, and nothing else in the folder it is started in.
        alone = ["-P"] if sys.version_info >= (3, 11) else []
        self.pipe, theirs = Pipe()
        #: Where Python was when the process crashed.
        self._crash = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        given = [theirs.fileno(), self._crash.fileno()]
        # Interrupts are held back from the process until it can take them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [sys.executable, *alone, "-c", CHILD, *map(str, given)],
                env=_environment(asked["jobs"]),
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.tell(asked)

    def tell(self, message: object) -> None:
        """Send a message; one that has ended gets none."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def let_go(self) -> None:
        """Say that nothing more is asked; it closes the device and ends."""
        self.done, self.deadline = True, time.monotonic() + OPENING
        self.tell(None)

    def receive(self) -> Message | None:
        """Return the next message, ``ended`` with the exit code last; None while there is none."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                message: Message = self.pipe.recv()
                return message
            if self.process.poll() is None:
                return None
        return "ended", self.process.wait()

    def close(self) -> None:
        """End the process at once, and close what connects it."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self.pipe.close()
        self._crash.close()

    def why(self, code: int) -> str:
        """Say how it ended, and where, as the end of the sentence 'its process ...'."""
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


def _alone(group: str) -> bool:
    return group.partition(".")[0] in ALONE


class Run:
    """All groups of one run; ``report`` is that of no check until :meth:`now` adds what has run."""

    def __init__(
        self,
        asked: Mapping[str, Any],
        *,
        on_outcome: Callable[[Outcome], None] | None,
        on_wait: Wait | None,
        on_group: Callable[[Report], None],
    ) -> None:
        self.asked = asked
        self.on_outcome, self.on_wait, self.on_group = on_outcome, on_wait, on_group
        self.children: list[Child] = []
        self._started: list[Child] = []
        self.outcomes: dict[str, Outcome] = {}
        self.report: Report | None = None
        self.known: list[str] = []
        self.apart: set[str] = set()
        self.names: list[str] = []
        self.waiting: dict[str, list[str]] = {}
        self.counters: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._warned: set[str] = set()

    def start(self) -> Child:
        child = Child(self.asked)
        self.children.append(child)
        self._started.append(child)
        return child

    def messages(self) -> Iterator[tuple[Child, str, Any]]:
        """Go through what the children say until all have ended; kill those that do not answer."""
        while self.children:
            wait([one.pipe for one in self.children], 0.5)
            for child in [*self.children]:
                if (message := child.receive()) is not None:
                    kind, said = message
                    if kind == "ended":
                        self.children.remove(child)
                    if kind == "warned" and said not in self._warned:
                        self._warned.add(said)
                        warnings.warn(said, LanternWarning, stacklevel=3)
                    yield child, kind, said
                elif time.monotonic() > child.deadline:
                    child.late, child.deadline = not child.done, float("inf")
                    threading.Thread(target=end, args=(child.process,), daemon=True).start()

    def open(self) -> Child:
        """Start the first process and learn which checks there are; raises what opening raises there."""
        self.start()
        for child, kind, said in self.messages():
            if kind == "ready":
                self.report, self.known, self.apart = said
                return child
            if kind == "error":
                raise said
            if kind == "ended":
                raise BackendError(
                    f"the process that opened the device {child.why(said)}; check its driver, or open it "
                    "without another process: --in-process"
                )
        raise AssertionError("a process says that it is ready, or ends")

    def groups(self, names: Sequence[str], jobs: int, first: Child, limit: float) -> None:
        """Run the checks, a group a process and ``jobs`` at once."""
        for name in names:
            group = name.partition(".")[0]
            self.waiting.setdefault(name if group in self.apart else group, []).append(name)
        self._give(first, self._next())
        while True:
            while self.waiting and self._may_start(self._next(), jobs):
                self._give(self.start(), self._next())
            for child, kind, said in self.messages():
                self._take(child, kind, said, limit)
                if kind == "ended":
                    break
            else:
                return

    def _may_start(self, group: str, jobs: int) -> bool:
        if any(_alone(one.group) for one in self.children) or _alone(group):
            return not self.children
        return len(self.children) < jobs

    def _next(self) -> str:
        return min(self.waiting, key=_alone)

    def _give(self, child: Child, group: str) -> None:
        child.group, child.left = group, self.waiting.pop(group)
        child.tell({"checks": child.left})

    def _take(self, child: Child, kind: str, said: Any, limit: float) -> None:
        """Take note of a message."""
        if kind == "began":
            child.check, child.doing = said, ""
            child.deadline = time.monotonic() + limit
        elif kind == "waits":
            name, child.doing, seconds = said
            if self.on_wait is not None:
                self.on_wait(name, child.doing, seconds)
        elif kind == "outcome":
            child.left.remove(child.check)
            child.check = child.doing = ""
            child.deadline = time.monotonic() + limit
            self._keep(said)
        elif kind == "done":
            for kept, more in zip(self.counters, said, strict=True):
                kept.update({name: kept.get(name, 0) + count for name, count in more.items()})
            child.let_go()
        elif kind == "error":
            child.doing = str(said)
        elif kind == "ended":
            if child.late and child.check:
                where = child.doing and f" ({child.doing})"
                detail = f"took longer than its limit, {limit:g} s{where}; its process was ended"
                self._keep(Outcome(name=child.check, state="failed", detail=detail))
                if left := [name for name in child.left if name != child.check]:
                    self.waiting[child.group] = left  # another process goes on with the group
            elif said == INTERRUPTED and not (child.done or child.late):
                raise KeyboardInterrupt  # a terminal's, which may come to this process later
            else:
                self._fail(child, child.why(said))
            self.on_group(self.now())

    def _fail(self, child: Child, how: str) -> None:
        """Report the checks that a process did not come to as failed, for one cause."""
        cause = f"the process of the group {child.group!r} {how}"
        at = f", in {child.check}" if child.check else ""
        for name in child.left:
            detail = cause if name == child.check else f"not run: {cause}{at}"
            self._keep(Outcome(name=name, state="failed", detail=detail, cause=f"{cause}{at}"))

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def now(self) -> Report:
        """Return the report of what has run."""
        assert self.report is not None
        return self.report.with_outcomes(self.outcomes.values(), self.names)

    def certify(self, path: Path, command: str) -> None:
        """Let one more process make the certificate; raises BackendError where it does not."""
        given = {"report": self.now(), "known": self.known, "counters": self.counters}
        self.start().tell({"certify": (path, {**given, "command": command})})
        for child, kind, said in self.messages():
            if kind == "error":
                raise said
            if kind == "done":
                child.let_go()
            if kind == "ended" and not child.done:
                raise BackendError(
                    f"there is no certificate: the process that makes it {child.why(said)}"
                )

    def close(self) -> None:
        """End what still runs; a second interrupt kills it at once."""
        try:
            for child in self.children:
                child.process.send_signal(signal.SIGINT)
            for child in self.children:
                child.process.wait(PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            for child in self._started:
                child.close()


def conform(
    device: str,
    options: Mapping[str, Any],
    *,
    only: Sequence[str] = (),
    jobs: int = 1,
    limit: float,
    resume: Path | None = None,
    certificate: Path | None = None,
    command: str = "",
    on_outcome: Callable[[Outcome], None] | None = None,
    on_wait: Wait | None = None,
    on_group: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the kit with a process for every group; ``on_group`` gets the report after each.

    A check that takes ``limit`` seconds has failed; another process runs the rest of its group.
    ``resume``: a report whose checks are not run again. Raises what opening the device raises; a process
    that ends by itself fails the checks that it did not come to.
    """
    from lantern_accel.testing import kit

    asked = {"device": device, "options": dict(options), "jobs": jobs}
    run = Run(asked, on_outcome=on_outcome, on_wait=on_wait, on_group=on_group)
    try:
        first = run.open()
        assert run.report is not None
        run.names = list(kit.select(list(only), dict.fromkeys(run.known)))  # type: ignore[arg-type]  # names
        if resume is not None and resume.is_file():
            run.outcomes = _kept(resume, run.report)
        names = [name for name in run.names if name not in run.outcomes]
        if names:
            run.groups(names, jobs, first, limit)
        else:
            first.let_go()
        run.on_group(run.now())
        if certificate is not None:
            run.certify(certificate, command)
        return run.now()
    finally:
        if run.report is not None and run.names:
            on_group(run.now())
        run.close()


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
