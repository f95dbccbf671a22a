"""Compare the CPU's decoding steps with the floor that this machine's own bandwidth and rate set.

    python tools/cpu_floor.py --threads 1 --threads 2 --dtype bfloat16 --dtype float32 -o floor.json

A step here is one pass of a target's blocks, last norm and head over two rows (guidance) of random
weights: ``vanilla`` has one node a row, ``tree`` nine. Its floor is the greater of bytes read over
bandwidth and of multiply-adds over rate; both are measured in the same rounds as the steps, in turns, so
that other work on the machine weighs on all of them. Medians, with the lower and upper quartile. One
thread is timed by its own processor time, which leaves out when the system ran another; two by the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT, llamagen_config
from lantern_accel.nn.transformer import Pass, pack
from lantern_accel_cpu.native import library

ROWS, SEEN = 2, 136
NODES = {"vanilla": 1, "tree": 9}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Bytes of the buffer whose reading gives the bandwidth of memory; beyond most third caches.
LARGE = 256 << 20
#: Multiply-adds a thread, in vectors, whose time gives the rate; about 2 ms.
ROUNDS = 1 << 20
#: Calls before each that is timed: torch's threads wait awake for some milliseconds.
WARM = 12


def config(size: str) -> LlamaGenConfig:
    """Return the sizes of the bundled model or of a LlamaGen (B, L, XL) at 256 pixels."""
    if size != "bundled":
        return llamagen_config(size, 256)
    return LlamaGenConfig(
        dim=256, n_layer=16, n_head=4, ffn_dim=768, vocab_size=2048, grid=16, prefix_length=16,
        caption_dim=192, prefix_rotary="identity",
    )  # fmt: skip


def steps(
    backend: Backend, sizes: LlamaGenConfig, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Build a target of random weights on ``backend``; return its steps by name."""
    torch.manual_seed(0)
    target = LlamaGenGPT(sizes, ops=backend).eval().requires_grad_(False)
    tables = target.rope_cos, target.rope_sin
    target.to(dtype)
    target.rope_cos, target.rope_sin = tables
    pack(target, backend)
    length = SEEN + 16
    layout = backend.kv_layout(sizes.n_layer, ROWS, length, sizes.n_head, sizes.head_dim, dtype)
    kv = backend.allocate(layout)

    def step(nodes: int) -> Callable[[], Tensor]:
        x = torch.randn(ROWS, nodes, sizes.dim).to(dtype)
        seen = torch.zeros(ROWS, 1, nodes, length, dtype=torch.bool)
        seen[..., :SEEN] = True
        for node in range(nodes):  # a chain is the tree with the most to see
            seen[:, :, node, SEEN : SEEN + node + 1] = True
        mask = backend.mask(seen, dtype)
        address = backend.address(
            kv, torch.arange(SEEN, SEEN + nodes).expand(ROWS, -1).contiguous()
        )
        shape = (1, nodes, 1, -1)
        cos = target.rope_cos[SEEN - nodes : SEEN].view(shape)
        sin = target.rope_sin[SEEN - nodes : SEEN].view(shape)
        return lambda: target.head(target(x, Pass(cos, sin, mask, kv, address)))

    return {name: step(nodes) for name, nodes in NODES.items()}


def work(sizes: LlamaGenConfig, dtype: torch.dtype, nodes: int) -> tuple[int, int]:
    """Return the bytes that a step reads and its multiply-adds."""
    c = sizes
    weights = c.n_layer * c.dim * (4 * c.dim + 3 * c.hidden_dim) + c.dim * c.vocab_size
    slots = SEEN + nodes
    cache = 2 * c.n_layer * ROWS * slots * c.dim
    products = ROWS * nodes * weights
    attention = 2 * c.n_layer * ROWS * nodes * slots * c.dim
    return (weights + cache) * dtype.itemsize, products + attention


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began


@contextlib.contextmanager
def _opened(native: str, threads: int) -> Iterator[Backend]:
    with open_backend("cpu", {"native": native, "compile": "off", "threads": threads}) as backend:
        yield backend


def measure(sizes: LlamaGenConfig, name: str, threads: int, repeats: int) -> dict[str, Any]:
    """Time all in turns; seconds, bytes a second and multiply-adds a second."""
    dtype = DTYPES[name]
    loaded = library.load()
    moved = {n: work(sizes, dtype, nodes) for n, nodes in NODES.items()}
    memory = torch.ones(LARGE, dtype=torch.uint8)
    alike = torch.ones(moved["vanilla"][0], dtype=torch.uint8)
    taken: dict[str, list[float]] = {}
    clock = time.thread_time if threads == 1 else time.perf_counter
    with _opened("off", threads) as plain, _opened("on", threads) as native:
        # As a request runs them: torch has one thread in a native step.
        former = {n: plain.capture(call) for n, call in steps(plain, sizes, dtype).items()}
        calls: dict[str, Callable[[], Any]] = {f"former {n}": one for n, one in former.items()}
        calls.update({n: native.capture(call) for n, call in steps(native, sizes, dtype).items()})
        for call in calls.values():
            call()
        for _ in range(repeats):
            for label, buffer in (("memory", memory), ("weights", alike)):
                read = partial(loaded.read_seconds, buffer.data_ptr(), buffer.numel(), threads)
                seconds = _timed(read, clock)
                taken.setdefault(label, []).append(buffer.numel() / seconds)
            seconds = _timed(partial(loaded.multiply_seconds, ROUNDS, threads), clock)
            taken.setdefault("rate", []).append(ROUNDS * loaded.lanes() * threads / seconds)
            for label, call in calls.items():
                for _ in range(WARM):  # so that caches are alike, and no thread of torch's is awake
                    call()
                taken.setdefault(label, []).append(_timed(call, clock))
    found = {label: statistics.median(values) for label, values in taken.items()}
    bandwidth = max(found["memory"], found["weights"])
    report: dict[str, Any] = {
        "dtype": name,
        "threads": threads,
        "unit": loaded.unit,
        "clock": "processor time of the thread" if threads == 1 else "wall",
        "bandwidth": {n: found[n] for n in ("memory", "weights")},
        "rate": found["rate"],
        "steps": {},
    }
    for label, (size, operations) in moved.items():
        floor = max(size / bandwidth, operations / found["rate"])
        low, _, high = statistics.quantiles(taken[label], n=4)
        report["steps"][label] = {
            "seconds": found[label],
            "quartiles": [low, high],
            "fastest": min(taken[label]),
            "former_seconds": found[f"former {label}"],
            "bytes": size,
            "multiply_adds": operations,
            "floor_seconds": floor,
            "bound": "bytes" if size / bandwidth > operations / found["rate"] else "operations",
            "share_of_floor": floor / found[label],
            "times_as_fast": statistics.median(
                a / b for a, b in zip(taken[f"former {label}"], taken[label], strict=True)
            ),
        }
    vanilla = report["steps"]["vanilla"]["seconds"]
    report["tree_in_vanilla_steps"] = report["steps"]["tree"]["seconds"] / vanilla
    return report


def table(report: dict[str, Any]) -> str:
    """Return a measurement as lines of text."""
    read = max(report["bandwidth"].values()) / 1e9
    lines = [
        f"{report['dtype']}, {report['threads']} threads, {report['unit']}: reads {read:.1f} GB/s, "
        f"{report['rate'] / 1e9:.0f} G multiply-adds/s",
    ]
    for name, step in report["steps"].items():
        lines.append(
            f"  {name:8} {step['seconds'] * 1e3:7.2f} ms, floor {step['floor_seconds'] * 1e3:6.2f} "
            f"({step['bound']}), {step['share_of_floor']:.0%} of it; former "
            f"{step['former_seconds'] * 1e3:.2f} ms, {step['times_as_fast']:.1f} times as fast"
        )
    lines.append(f"  a tree step is {report['tree_in_vanilla_steps']:.2f} vanilla steps")
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="bundled", choices=["bundled", "B", "L", "XL"])
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    found = []
    for name in given.dtype or ["bfloat16", "float32"]:
        for threads in given.threads or [1]:
            with torch.inference_mode():
                found.append(measure(config(given.size), name, threads, given.repeats))
            print(table(found[-1]), flush=True)
    if given.output:
        given.output.write_text(json.dumps({"size": given.size, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
