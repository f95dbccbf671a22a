"""Runs groups of checks in processes of their own: a crash or a hang of a driver costs its group.

The parent never opens the device, since some serve one process at a time. A child opens it, says which
checks there are, and runs those that are asked for. Both speak JSON, a line a message, over pipes; what a
driver prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel import errors
from lantern_accel.device.conformance import Outcome, Report
from lantern_accel.errors import BackendError, LanternError, LanternWarning

if TYPE_CHECKING:
    from lantern_accel.testing.kit import Wait

#: Groups that measure time or memory: no other runs next to them.
ALONE = ("device",)
#: Seconds that a process may take to open the device.
OPENING = 300.0
#: Seconds between an interrupt and a kill.
PATIENCE = 10.0
#: How a group's process ends where an interrupt came to it.
INTERRUPTED = 130
CHILD = "from lantern_accel.cli.separate import serve; serve()"

Message = dict[str, Any]


def end(
    process: subprocess.Popen[bytes], patience: float | None = None, *, group: bool = False
) -> None:
    """Interrupt a process as Ctrl-C does, and kill it where it has not ended ``patience`` seconds later.

    ``patience``: 10 s unless given. ``group``: with all processes of the group that it leads.
    """

    def send(number: int) -> None:
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            break
        try:
            send(number)
            process.wait(PATIENCE if patience is None else patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def ended_by(code: int) -> str:
    """Say how a process ended, as the end of the sentence 'its process ...'."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


# --- the parent -----------------------------------------------------------------------------------


class Child:
    """One process with the device open; its messages come into ``inbox`` with the child itself."""

    def __init__(self, asked: Message, inbox: queue.Queue[tuple[Child, Message]]) -> None:
        self.group = ""
        self.left: list[str] = []
        self.check, self.doing = "", ""
        self.deadline = time.monotonic() + OPENING
        self.late = self.done = False
        self.said = ""
        # It finds what this process finds, and nothing else in the folder it is started in.
        alone = ["-P"] if sys.version_info >= (3, 11) else []
        with _interrupts_held():
            self.process = subprocess.Popen(
                [sys.executable, *alone, "-X", "faulthandler", "-c", CHILD, json.dumps(asked)],
                env=_environment(asked["jobs"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        self._inbox = inbox
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._forward, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def _receive(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._inbox.put((self, json.loads(line)))
        self._inbox.put((self, {"ended": self.process.wait()}))

    def _forward(self) -> None:
        """Pass on what it says on standard error; keep where Python was when the process crashed."""
        assert self.process.stderr is not None
        inside = False
        with self.process.stderr as lines:
            for raw in lines:
                line = raw.decode("utf-8", "replace")
                sys.stderr.write(line)
                sys.stderr.flush()
                inside = inside or line.startswith("Current thread")  # faulthandler's words
                if inside and line.lstrip().startswith("File ") and not self.said:
                    self.said = " ".join(line.split())

    def tell(self, message: Message) -> None:
        """Send a message; one that has ended gets none."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def let_go(self) -> None:
        """Say that nothing more is asked; it closes the device and ends."""
        assert self.process.stdin is not None
        self.deadline = time.monotonic() + OPENING
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self) -> None:
        """End the process at once, and close what connects it."""
        self.process.kill()
        self.let_go()
        for thread in self._threads:
            thread.join(PATIENCE)

    def why(self, code: int) -> str:
        """Say how it ended, and where."""
        self._threads[0].join(1)
        how = "did not answer and was killed" if self.late else ended_by(code)
        where = "; ".join(filter(None, (self.doing, self.said)))
        return f"{how}{where and f' ({where})'}"


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold interrupts back from a process that the block starts, until it can take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(jobs: int) -> dict[str, str]:
    """Return a child's environment: the modules of this process, and its share of the processors."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // jobs, 1)))
    return found


def _alone(group: str) -> bool:
    return group.partition(".")[0] in ALONE


class Run:
    """All groups of one run; ``report`` grows with every check."""

    def __init__(
        self,
        asked: Message,
        *,
        on_outcome: Callable[[Outcome], None] | None,
        on_wait: Wait | None,
        on_group: Callable[[Report], None],
    ) -> None:
        self.asked = asked
        self.on_outcome, self.on_wait, self.on_group = on_outcome, on_wait, on_group
        self.inbox: queue.Queue[tuple[Child, Message]] = queue.Queue()
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
        child = Child(self.asked, self.inbox)
        self.children.append(child)
        self._started.append(child)
        return child

    def messages(self) -> Iterator[tuple[Child, Message]]:
        """Go through what the children say until all have ended; kill those that do not answer."""
        while self.children:
            try:
                child, message = self.inbox.get(timeout=0.5)
            except queue.Empty:
                now = time.monotonic()
                for one in self.children:
                    if now > one.deadline:
                        one.late, one.deadline = not one.done, float("inf")
                        threading.Thread(target=end, args=(one.process,), daemon=True).start()
                continue
            if "ended" in message:
                self.children.remove(child)
            if "warned" in message and message["warned"] not in self._warned:
                self._warned.add(message["warned"])
                warnings.warn(message["warned"], LanternWarning, stacklevel=3)
            yield child, message

    def open(self) -> Child:
        """Start the first process and learn which checks there are; raises what opening raises there."""
        first = self.start()
        for child, message in self.messages():
            if "ready" in message:
                self.report = Report.model_validate(message["ready"])
                self.known, self.apart = message["known"], set(message["apart"])
                return child
            if "error" in message:
                raise _again(message["error"])
            if "ended" in message:
                how = child.why(message["ended"])
                raise BackendError(
                    f"the process that opened the device {how}; check its driver, or open it without "
                    "another process: --in-process"
                )
        raise AssertionError(first)

    def groups(self, names: Sequence[str], jobs: int, first: Child, limit: float) -> None:
        """Run the checks, a group a process and ``jobs`` at once."""
        for name in names:
            group = name.partition(".")[0]
            self.waiting.setdefault(name if group in self.apart else group, []).append(name)
        self._give(first, self._next())
        while True:
            while self.waiting and self._room(self._next(), jobs):
                self._give(self.start(), self._next())
            for child, message in self.messages():
                if self._take(child, message, limit):
                    break  # a group has ended
            else:
                return

    def _room(self, group: str, jobs: int) -> bool:
        if any(_alone(one.group) for one in self.children) or _alone(group):
            return not self.children
        return len(self.children) < jobs

    def _next(self) -> str:
        return min(self.waiting, key=_alone)

    def _give(self, child: Child, group: str) -> None:
        child.group, child.left = group, self.waiting.pop(group)
        child.tell({"checks": child.left})

    def _take(self, child: Child, message: Message, limit: float) -> bool:
        """Take note of a message; return whether the child has ended."""
        if "began" in message:
            child.check, child.doing = message["began"], ""
            child.deadline = time.monotonic() + limit
        elif "waits" in message:
            name, child.doing, seconds = message["waits"]
            if self.on_wait is not None:
                self.on_wait(name, child.doing, seconds)
        elif "outcome" in message:
            child.left.remove(child.check)
            child.check = child.doing = ""
            child.deadline = time.monotonic() + limit
            self._keep(Outcome.model_validate(message["outcome"]))
        elif "done" in message:
            child.done = True
            for kept, more in zip(self.counters, message["done"], strict=True):
                kept.update({name: kept.get(name, 0) + count for name, count in more.items()})
            child.let_go()
        elif "error" in message:
            child.said = message["error"][1]
        elif "ended" in message:
            if child.late and child.check:
                where = child.doing and f" ({child.doing})"
                detail = f"took longer than its limit, {limit:g} s{where}; its process was ended"
                self._keep(Outcome(name=child.check, state="failed", detail=detail))
                if left := [name for name in child.left if name != child.check]:
                    self.waiting[child.group] = left  # another process goes on with the group
            elif message["ended"] == INTERRUPTED and not (child.done or child.late):
                raise KeyboardInterrupt  # a terminal's, which may come to this process later
            else:
                self._close(child, child.why(message["ended"]))
            self.on_group(self.now())
            return True
        return False

    def _close(self, child: Child, how: str) -> None:
        """Report the checks that a process did not come to as failed, for one cause."""
        at = child.check or "before its first check"
        cause = f"the process of the group {child.group!r} {how}"
        for name in child.left:
            detail = cause if name == child.check else f"not run: {cause}, in {at}"
            if not child.check:
                detail = f"not run: {cause}"
            self._keep(Outcome(name=name, state="failed", detail=detail, cause=f"{cause}, {at}"))

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
        child = self.start()
        asked = {
            "certificate": str(path),
            "report": self.now().model_dump(mode="json"),
            "known": self.known,
            "counters": self.counters,
            "command": command,
        }
        child.tell({"certify": asked})
        for one, message in self.messages():
            if "error" in message:
                raise _again(message["error"])
            if "done" in message:
                one.done = True
                one.let_go()
            if "ended" in message and not one.done:
                how = one.why(message["ended"])
                raise BackendError(f"there is no certificate: the process that makes it {how}")

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
            first.done = True
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


def _again(sent: Sequence[str]) -> LanternError:
    """Return an error of ours that a child raised."""
    kind = getattr(errors, sent[0], BackendError)
    try:
        made = kind(sent[1])
    except TypeError:
        made = BackendError(sent[1])
    return made if isinstance(made, LanternError) else BackendError(sent[1])


# --- the child ------------------------------------------------------------------------------------


def serve() -> None:
    """Open the device, say which checks there are, and do what standard input asks, line by line."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        lock = threading.Lock()

        def send(**message: Any) -> None:
            with lock:
                out.write(json.dumps(message) + "\n")
                out.flush()

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, LanternWarning):
                send(warned=str(message))

        warnings.simplefilter("always", LanternWarning)
        warnings.showwarning = show
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _serve(json.loads(sys.argv[1]), send, sys.stdin)
        except LanternError as error:
            send(error=[type(error).__name__, str(error)])
            raise SystemExit(error.exit_code) from None
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(INTERRUPTED)
        except Exception as error:
            send(error=["BackendError", f"{type(error).__name__}: {' '.join(str(error).split())}"])
            raise


def _serve(asked: Message, send: Callable[..., None], lines: Iterable[str]) -> None:
    from lantern_accel.device.plugins import choose_device

    # Before torch is imported: some vendors read the environment then.
    chosen = choose_device(asked["device"], asked["options"])
    from lantern_accel.testing import certificate, kit

    with chosen.open() as backend:
        for text in kit.near_misses(backend):
            warnings.warn(text, LanternWarning, stacklevel=2)
        checks = kit.checks_of(backend)
        apart = sorted(backend.conformance().apart)
        report = kit.report_of(backend).model_dump(mode="json")
        send(ready=report, known=list(checks), apart=apart)
        before = backend.counters()
        for line in lines:
            message = json.loads(line)
            for name in message.get("checks", ()):
                send(began=name)
                outcome = kit.run_check(
                    backend, name, checks[name], on_wait=lambda *waits: send(waits=waits)
                )
                send(outcome=outcome.model_dump(mode="json"))
            if more := message.get("certify"):
                card = certificate.certify(
                    backend,
                    Report.model_validate(more["report"]),
                    more["known"],
                    spec=chosen.spec,
                    options=chosen.options,
                    counters=more["counters"],
                    command=more["command"],
                )
                certificate.write(card, Path(more["certificate"]))
            send(done=[before, backend.counters()])
