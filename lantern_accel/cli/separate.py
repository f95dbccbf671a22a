"""Runs groups of checks in processes of their own: a crash or a hang of a driver costs its group.

The parent never opens the device, since some serve one process at a time. A child is this module, run by
``python -m``. Lines of JSON say what it is to do and what it finds; a driver prints to standard error.
A child ends itself where a check takes too long, and writes where it was, as after a crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from lantern_accel import errors
from lantern_accel.cli.edge import INTERRUPTED
from lantern_accel.device.conformance import Outcome, Report
from lantern_accel.errors import BackendError, LanternError, LanternWarning, RequestError

if TYPE_CHECKING:
    from lantern_accel.testing.kit import Wait

#: Groups that measure time or memory: no other runs next to them.
ALONE = ("device",)
#: Seconds that a process may take to open the device, and to close it.
OPENING = 300.0
#: Seconds between the signal that ends a process and the one that kills it.
PATIENCE = 5.0


# --- the parent -----------------------------------------------------------------------------------


class Child:
    """One process with the device open, in a session of its own: a terminal's Ctrl-C is the parent's."""

    def __init__(self, environ: Mapping[str, str], lines: SimpleQueue[tuple[Child, str]]) -> None:
        #: Checks of the group that it has not come to, the one that runs, and what that does.
        self.group, self.left, self.check, self.doing = "", list[str](), "", ""
        #: What it wrote of a crash, and whether something took too long.
        self.crash, self.late = "", False
        # It finds what this process finds, and nothing else in the folder it is started in.
        alone = ["-P"] if sys.version_info >= (3, 11) else []
        self.process = subprocess.Popen(
            [sys.executable, *alone, "-m", __name__],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: SimpleQueue[tuple[Child, str]]) -> None:
        assert self.process.stdout is not None and self.process.stdin is not None
        with self.process.stdout as said, contextlib.suppress(OSError), self.process.stdin:
            for line in said:
                lines.put((self, line))
                if line.startswith('["done"'):
                    break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(OPENING)
            self.end(signal.SIGKILL)  # what it started may hold the device
        lines.put((self, ""))

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; a process that has ended gets none."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def why(self) -> str:
        """Say how it ended, and where, as the end of the sentence 'its process ...'."""
        code = self.process.wait()
        how = "took too long" if self.late else f"ended with exit code {code}"
        if code < 0:
            known = [one.name for one in signal.Signals if one == -code]
            how = f"was ended by {known[0] if known else f'signal {-code}'}"
        # Of a crash the thread is named, of a delay the main one comes last.
        text = self.crash.partition("Current thread")[2] or self.crash.rpartition("Thread 0x")[2]
        lines = [" ".join(one.split()) for one in text.splitlines() if one.lstrip()[:5] == "File "]
        where = "; ".join(filter(None, (self.doing, *lines[:1])))
        return f"{how}{where and f' ({where})'}"


@dataclass(kw_only=True)
class KitRun:
    """Runs the kit with a process for every group.

    ``places``: the environment of each process that runs at one time. A check that takes ``limit``
    seconds has failed; another process runs the rest of its group. ``on_report`` gets the report before
    the first check and after each.
    """

    device: str
    options: Mapping[str, object] = field(default_factory=dict)
    places: Sequence[Mapping[str, str]] = ({},)
    limit: float
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    on_wait: Wait = lambda check, doing, seconds: None
    on_report: Callable[[Report], None] = lambda report: None

    def __post_init__(self) -> None:
        self.fresh: Report  # that of no check, once the device has been opened
        self.outcomes: dict[str, Outcome] = {}
        #: The checks that there are, those that are asked for, and groups whose checks run apart.
        self.known, self.names, self.apart = list[str](), list[str](), list[str]()
        self.counters: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self.late, self._warned = False, set[str]()
        #: Places without a process, and the place of each process.
        self._free, self._running = [*self.places], dict[Child, Mapping[str, str]]()
        self._lines: SimpleQueue[tuple[Child, str]] = SimpleQueue()

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
            first = self._start()
            fresh, self.known, self.apart = self._until("ready", first, "opens the device")
            self.fresh = Report(**fresh)
            self.names = list(kit.select(list(only), dict.fromkeys(self.known)))  # type: ignore[arg-type]  # names
            if resume is not None and resume.is_file():
                self.outcomes = _load_outcomes(resume, self.fresh)
            self.on_report(self.now())
            idle = self._run(first)
            if certificate is not None:
                self._certify(certificate, command, idle)
            return self.now()
        finally:
            self._close()

    def now(self) -> Report:
        """Return the report of what has run."""
        return self.fresh.with_outcomes(self.outcomes.values(), self.names)

    def _start(self) -> Child:
        place = self._free.pop(0)
        environ = {**os.environ, **place}
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        if len(self.places) > 1:
            threads = max((os.cpu_count() or 1) // len(self.places), 1)
            environ.setdefault("OMP_NUM_THREADS", str(threads))
        child = Child(environ, self._lines)
        self._running[child] = place
        child.send({"device": self.device, "options": dict(self.options), "limit": self.limit})
        return child

    def _next(self) -> tuple[Child, str, Any]:
        """Wait for a process to say something, and return it and of what; "ended" comes last."""
        while True:
            child, line = self._lines.get()
            if not line:
                self._free.append(self._running.pop(child))
                self.late |= child.late
                return child, "ended", None
            if not line.startswith("["):
                sys.stderr.write(line)
                child.crash += line
                child.late |= line.startswith("Timeout (")
                continue
            kind, what = json.loads(line)
            if kind == "warned":
                if what not in self._warned:
                    self._warned.add(what)
                    warnings.warn(what, LanternWarning, stacklevel=2)
                continue
            if kind in ("began", "outcome"):
                child.check, child.doing = what if kind == "began" else "", ""
            elif kind in ("waits", "error"):
                child.doing = what[1]
            return child, kind, what

    def _until(self, word: str, child: Child, task: str) -> Any:
        """Wait for a word of a process; raises what it raised, and BackendError where it ends before."""
        while True:
            _, kind, what = self._next()
            if kind == word:
                return what
            if kind == "error":
                raise getattr(errors, what[0], BackendError)(what[1])
            if kind == "ended":
                raise BackendError(
                    f"the process that {task} {child.why()}; check its driver, or use no other process: "
                    "--in-process"
                )

    def _run(self, idle: Child | None) -> Child | None:
        """Run the checks that have no outcome, a group a process; returns one that got none."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            if name not in self.outcomes:
                group = name.partition(".")[0]
                groups.setdefault(name if group in self.apart else group, []).append(name)
        wait = sorted(groups, key=lambda group: group.partition(".")[0] in ALONE)
        while wait or any(child.group for child in self._running):
            busy = any(child.group for child in self._running)
            if wait and (self._free or idle) and not (busy and wait[0].partition(".")[0] in ALONE):
                child, idle = idle or self._start(), None
                child.group = wait.pop(0)
                child.left = groups[child.group]
                child.send({"checks": child.left})
                continue
            child, kind, what = self._next()
            if kind == "outcome":
                child.left.remove(what["name"])
                self._keep(Outcome(**what))
            elif kind == "waits":
                self.on_wait(*what)
            elif kind == "done":
                for kept, more in zip(self.counters, what, strict=True):
                    kept.update({name: kept.get(name, 0) + n for name, n in more.items()})
            elif kind == "ended" and child.left:
                self._blame(child)
                wait[:0] = [child.group] if child.left else []
        return idle

    def _blame(self, child: Child) -> None:
        """Report what a process did not come to as failed; the one check alone where that was late."""
        why = child.why()
        if child.late and child.check:
            child.left.remove(child.check)
            detail = f"took longer than its limit, {self.limit:g} s; its process {why}"
            return self._keep(Outcome(name=child.check, state="failed", detail=detail))
        cause = f"the process of the group {child.group!r} {why}"
        at = f", in {child.check}" if child.check else ""
        for name in child.left:
            detail = cause if name == child.check else f"not run: {cause}{at}"
            self._keep(Outcome(name=name, state="failed", detail=detail, cause=f"{cause}{at}"))
        child.left.clear()

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self.on_outcome(outcome)
        self.on_report(self.now())

    def _certify(self, path: Path, command: str, idle: Child | None) -> None:
        """Let a process of its own make the certificate; raises BackendError where it does not."""
        report = self.now().model_dump(mode="json")
        given: dict[str, object] = {"report": report, "known": self.known}
        given |= {"counters": self.counters, "watch": not self.late, "command": command}
        child = idle or self._start()
        child.send({"certify": [str(path), given]})
        for word in ("done", "ended"):
            self._until(word, child, "makes the certificate")

    def _close(self) -> None:
        """End what still runs; a second interrupt kills it at once."""
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in self._running:
                    child.end(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    for child in self._running:
                        child.process.wait(PATIENCE)
        finally:
            for child in self._running:
                child.end(signal.SIGKILL)


def _load_outcomes(path: Path, fresh: Report) -> dict[str, Outcome]:
    """Return the outcomes of an earlier run of the same backend, torch and device."""
    from lantern_accel.store import check_same, read_json, validate_file

    stored = validate_file(Report, path, read_json(path, "lantern-accel conform"))
    parts = ("backend", "backend_version", "device", "device_name", "simulated", "torch")
    theirs, ours = ({name: getattr(one, name) for name in parts} for one in (stored, fresh))
    check_same(path, theirs, ours, "file with -o")
    return {one.name: one for one in stored.outcomes}


# --- the child ------------------------------------------------------------------------------------


def serve() -> None:
    """Open the device, list its checks, and run the ones that the next line of standard input names."""
    answers, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)
    faulthandler.enable(answers)

    def send(kind: str, what: object) -> None:
        with lock:
            print(json.dumps([kind, what]), file=answers, flush=True)

    def show(
        message: Warning | str, category: type[Warning], *where: object, **more: object
    ) -> None:
        if issubclass(category, LanternWarning):
            send("warned", str(message))

    warnings.simplefilter("always", LanternWarning)
    warnings.showwarning = show
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _serve(send, partial(faulthandler.dump_traceback_later, exit=True, file=answers))
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(INTERRUPTED)
    except Exception as error:
        # Of a class of its own the parent might have to import a plug-in.
        kind, text = type(error).__name__, str(error)
        known = isinstance(error, BackendError | RequestError) and hasattr(errors, kind)
        if not isinstance(error, LanternError):
            text = f"{kind}: {' '.join(text.split())}"
        send("error", [kind if known else "BackendError", text])
        if isinstance(error, LanternError):
            raise SystemExit(error.exit_code) from None
        raise


def _serve(send: Callable[[str, object], None], within: Callable[[float], None]) -> None:
    from lantern_accel.device.plugins import choose_device

    within(OPENING)
    asked = json.loads(sys.stdin.readline())
    # Before torch is imported: some vendors read the environment then.
    chosen = choose_device(asked["device"], asked["options"])
    from lantern_accel.testing import certificate, kit

    with chosen.open() as backend:
        kit.warn_of_near_misses(backend)
        checks, before = kit.checks_of(backend), backend.counters()
        fresh = kit.report_of(backend).model_dump(mode="json")
        send("ready", [fresh, list(checks), list(backend.conformance().apart)])
        task = json.loads(sys.stdin.readline() or "{}")
        for name in task.get("checks", ()):
            within(asked["limit"])
            send("began", name)
            check, on_wait = checks[name], lambda *waits: send("waits", waits)
            outcome = kit.run_check(backend, name, check, on_wait=on_wait)
            send("outcome", outcome.model_dump(mode="json"))
        within(OPENING)
        if "certify" in task:
            path, given = task["certify"]
            given["report"] = Report(**given["report"])
            given |= {"spec": chosen.spec, "options": chosen.options}
            certificate.write(certificate.certify(backend, **given), Path(path))
        send("done", [before, backend.counters()])


if __name__ == "__main__":
    serve()
