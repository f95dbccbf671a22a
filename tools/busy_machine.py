"""Time an image on a quiet machine and beside a program that keeps every core busy.

    python tools/busy_machine.py --rounds 5 -o busy.json

The two are measured in turns, in one process: first with nothing else, then beside one thread per core
that never waits. With fair shares a busy machine takes twice as long; threads that spin while they wait
for one another take many times as long. The machine must be quiet otherwise, and the tool says where it
is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: One process with a thread per core; hashing lets go of Python's lock.
SPIN = """
import hashlib, os, threading
def spin():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"busy", b"cores", 100_000)
for _ in range(os.cpu_count() or 1):
    threading.Thread(target=spin).start()
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy inside the block, by a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(pipeline: Any, strategy: str, seed: int) -> float:
    """Return what one image takes, from the call to the picture."""
    began = time.perf_counter()
    pipeline.generate("red heart", strategy=strategy, seed=seed)
    return time.perf_counter() - began


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--strategy", action="append", help="may be repeated")
    parser.add_argument("--option", action="append", default=[], help="KEY=VALUE of the backend")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(words)

    import lantern_accel
    from lantern_accel.files import write_json
    from lantern_accel.measure.environment import busy_note, describe

    if note := busy_note(1.0):
        print(note, file=sys.stderr)
    options = dict(one.split("=", 1) for one in given.option)
    result: dict[str, Any] = {"kind": "lantern_accel.busy_machine", "cores": os.cpu_count()}
    with lantern_accel.load(
        given.model, device=given.device, dtype=given.dtype, options=options
    ) as pipeline:
        result["environment"] = describe(pipeline.backend, pipeline.dtype).model_dump(mode="json")
        result["note"], result["strategies"] = note, {}
        for strategy in given.strategy or ["vanilla", "auto"]:
            seconds(pipeline, strategy, 0)
            quiet, busy = [], []
            for seed in range(1, given.rounds + 1):
                quiet.append(seconds(pipeline, strategy, seed))
                with busy_cores():
                    busy.append(seconds(pipeline, strategy, seed))
            ratios = [one / other for one, other in zip(busy, quiet, strict=True)]
            found = {"quiet": quiet, "busy": busy, "ratio": statistics.median(ratios)}
            result["strategies"][strategy] = found
            print(
                f"{strategy}: {statistics.median(quiet):.2f} s alone, "
                f"{statistics.median(busy):.2f} s beside {os.cpu_count()} busy cores, "
                f"{found['ratio']:.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    if given.output is not None:
        write_json(given.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
