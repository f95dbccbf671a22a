"""A backend in a folder of its own, whose checks crash, hang, or pass; only new processes find it."""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import os, signal, time
from lantern_accel.device import BackendSpec, Probe, hookimpl
from lantern_accel.device.backend import Conformance


class Spec(BackendSpec):
    name, summary, api_version, priority = "glass", "breaks", 1, -1

    def probe(self):
        return Probe.of_devices("glass")

    def open(self, index, options):
        from support.faults import scaffold
        from lantern_accel.testing import Failed, Measured

        def crash(backend):
            os.kill(os.getpid(), signal.SIGSEGV)

        def hang(backend):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            time.sleep(600)

        def wait(backend):
            with open(os.environ["GLASS"], "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)

        def fail(backend):
            raise Failed("it leaks")

        def passes(backend):
            return Measured("whole")

        class Device(scaffold()):
            name, version = "glass", "1"

            def counters(self):
                return {"opened": 1}

            def conformance(self):
                return Conformance(checks={
                    "drop.first": passes, "drop.crash": crash, "drop.last": passes,
                    "stuck.hang": hang, "stuck.after": passes,
                    "whole.one": passes, "whole.leak": fail, "slow.wait": wait,
                    "single.crash": crash, "single.after": passes,
                }, apart=frozenset({"single"}))

        return Device(index)


@hookimpl
def lantern_accel_backends():
    return [Spec()]
"""


def write_crashing(folder: Path) -> Path:
    """Write the package ``glass``, as an installer would, for ``sys.path``."""
    info = folder / "glass-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: glass\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lantern_accel]\nglass = glass\n")
    (folder / "glass.py").write_text(SOURCE)
    return folder
