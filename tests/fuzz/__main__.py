"""Try thousands of hostile inputs and say how they ended: python tests/fuzz --inputs 20000.

Inputs are drawn by hypothesis from the commands' own signatures and from files damaged field by field
(tests/fuzz). Those that end in a traceback, take longer than ten seconds or draw a picture from NaN are
kept in tests/fuzz/cases, which the test suite replays. Needs the package's extra ``test``.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "lantern-emoji")]


def work(inputs: int, seed: int, keep: Path, out: Path, whole: Path) -> None:
    """Try ``inputs`` inputs in this process; write what they came to."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from fuzz.cases import cases
    from fuzz.harness import keep as keep_case
    from fuzz.harness import run_case
    from fuzz.words import commands

    keep.mkdir(parents=True, exist_ok=True)
    known = commands()
    counts: collections.Counter[str] = collections.Counter()
    slowest, kept = 0.0, list[Any]()
    began = time.monotonic()

    def write() -> None:
        found = {"counts": dict(counts), "slowest": slowest, "kept": kept}
        out.write_text(json.dumps({**found, "seconds": time.monotonic() - began}))

    def try_one(data: Any) -> None:
        nonlocal slowest
        case = data.draw(cases(whole, known))
        outcome = run_case(case, whole)
        counts[outcome.kind] += 1
        counts[f"to {case['target']}"] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.fault:
            path = keep_case(case, keep)
            kept.append(str(path.name))
            print(f"{outcome.kind}: {path}\n{outcome.details[-1500:]}", file=sys.stderr, flush=True)
        write()

    quiet = settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seeded(seed)(quiet(given(data=st.data())(try_one)))()
    write()


def main() -> None:
    """Share the inputs out to processes, and add up what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=ROOT / "tests" / "fuzz" / "cases")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--part", nargs=3, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        inputs, out, whole = int(str(given.part[0])), given.part[1], given.part[2]
        work(inputs, given.seed, given.keep, out, whole)
        return
    from fuzz.harness import write_whole_files

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        whole.mkdir()
        write_whole_files(whole)
        # Parts of 500, so that no process grows old, and one that dies takes few inputs with it.
        parts = [min(500, given.inputs - at) for at in range(0, given.inputs, 500)]
        waiting = list(enumerate(parts))
        running: list[subprocess.Popen[bytes]] = []
        died = 0
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            while (waiting or running) and time.monotonic() - began < 60 * given.minutes:
                while waiting and len(running) < given.jobs:
                    number, inputs = waiting.pop(0)
                    words = [
                        "--seed",
                        f"{given.seed * 100_000 + number}",
                        "--keep",
                        str(given.keep),
                    ]
                    words += ["--part", str(inputs), f"{folder}/{number}.json", str(whole)]
                    running.append(
                        subprocess.Popen([sys.executable, __file__, *words], env=environ)
                    )
                time.sleep(0.2)
                for process in [one for one in running if one.poll() is not None]:
                    running.remove(process)
                    died += process.returncode != 0
        finally:
            for process in running:
                process.kill()
        counts: collections.Counter[str] = collections.Counter()
        slowest, kept = 0.0, []
        for number in range(len(parts)):
            path = Path(folder, f"{number}.json")
            found = json.loads(path.read_text()) if path.is_file() else {}
            counts.update(found.get("counts", {}))
            slowest = max(slowest, found.get("slowest", 0.0))
            kept += found.get("kept", [])
    figures = {
        "inputs": sum(count for kind, count in counts.items() if not kind.startswith("to ")),
        "seconds": round(time.monotonic() - began, 1),
        **{
            kind: counts[kind] for kind in ("ran", "reached", "refused", "traceback", "hang", "nan")
        },
        "processes that died": died,
        "slowest seconds": round(slowest, 2),
        "by target": {k[3:]: n for k, n in sorted(counts.items()) if k.startswith("to ")},
        "kept": sorted(set(kept)),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    sys.exit(bool(died or counts["traceback"] or counts["hang"] or counts["nan"]))


if __name__ == "__main__":
    main()
