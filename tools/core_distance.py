"""Tell how far the processor's cores are apart: how long a line of memory takes from one to another.

    python tools/core_distance.py

Two threads hand a number to and fro. Within a cluster of cores, which share a third-level cache, that
takes some 50 ns each way, between clusters some 200 ns. A virtual machine's cores may move from one case
to the other within a minute. Across two clusters plain decoding reads from two caches and drafts gain
less, so that figures of speed belong to one case: run this before and after, and see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lantern_accel.errors import LanternError
from lantern_accel_cpu.native.build import compiler

SOURCE = """
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

alignas(128) std::atomic<int> number{0};

int main() {
    const int rounds = 100000;
    std::thread other([&] {
        for (int i = 0; i < rounds; ++i) {
            while (number.load(std::memory_order_acquire) != 2 * i + 1) {}
            number.store(2 * i + 2, std::memory_order_release);
        }
    });
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; ++i) {
        number.store(2 * i + 1, std::memory_order_release);
        while (number.load(std::memory_order_acquire) != 2 * i + 2) {}
    }
    other.join();
    std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    std::printf("%.1f", 1e9 * spent.count() / (2 * rounds));
}
"""


def distances(times: int) -> list[float]:
    """Return what a line took each way, nanoseconds, the mean of every measurement."""
    cxx = compiler()
    if cxx is None:
        raise LanternError("there is no C++ compiler; install one, or name it with CXX")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "distance.cpp"), Path(folder, "distance")
        source.write_text(SOURCE, encoding="utf-8")
        flags = ["-O2", "-std=c++17", "-pthread"]
        made = subprocess.run([cxx, *flags, str(source), "-o", str(program)])
        if made.returncode:
            raise LanternError(f"{cxx} could not compile it; name another compiler with CXX")
        return [
            float(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout)
            for _ in range(times)
        ]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=5, help="measurements of some 20 ms each")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    given = parser.parse_args(words)
    if given.times < 1:
        parser.error("--times takes a number from 1 up")
    try:
        found = distances(given.times)
    except LanternError as error:
        parser.exit(error.exit_code, f"{error}\n")
    if given.json:
        print(json.dumps({"nanoseconds": found}))
    else:
        least, most = min(found), max(found)
        print(f"{statistics.median(found):.0f} ns each way ({least:.0f} to {most:.0f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
