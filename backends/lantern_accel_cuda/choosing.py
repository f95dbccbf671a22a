"""Chooses what does a product of few rows on a card: a Triton kernel, or torch's between kernels.

Both are timed at first use, for each stage of a layer and each size of matrix, with weights that no cache
holds. A kernel that computes something else than torch is left out. What came of it is kept in the cache
folder, for the same card, driver, torch, Triton and source as the kernels' checks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lantern_accel.device.plan import Norm
from lantern_accel.files import kept_dir, read_record, write_record

if TYPE_CHECKING:
    from lantern_accel_cuda.agreement import Site

#: Rows of a plain step and of a window of 16 with guidance: what serves is faster for both together.
ROWS = (2, 32)
#: Calls in a timed recording, recordings of each, and bytes of weights that they share at most.
CALLS, REPEATS, MOST_BYTES = 24, 5, 2**29
#: Largest relative difference from torch's result.
DIFFERENCE = 2e-2

Measure = Callable[[str, int, int, torch.dtype], int | None]


class Choices:
    """What serves each stage and size: a shape of :data:`.few.SHAPES` by number, or None for torch."""

    def __init__(self, key: Mapping[str, Any], measure: Measure) -> None:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
        folder = kept_dir("kernels")
        self._path = None if folder is None else folder / f"{digest}.products.json"
        self._measure = measure
        self._known: dict[str, int | None] = {}

    def __call__(self, stage: str, outputs: int, inputs: int, dtype: torch.dtype) -> int | None:
        """Return what serves a matrix ``[outputs, inputs]``; it is measured where nothing is kept."""
        name = f"{stage} {outputs}x{inputs} {str(dtype).removeprefix('torch.')}"
        if name not in self._known:
            kept = self._kept()
            if name not in kept:
                kept[name] = self._measure(stage, outputs, inputs, dtype)
                self._keep(name, kept[name])
            self._known[name] = kept[name]
        return self._known[name]

    def _kept(self) -> dict[str, int | None]:
        found = None if self._path is None else read_record(self._path)
        products = (found or {}).get("products")
        return dict(products) if isinstance(products, dict) else {}

    def _keep(self, name: str, chosen: int | None) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_record(self._path, {"products": {**self._kept(), name: chosen}})


def measured(site: Site, stage: str, outputs: int, inputs: int, dtype: torch.dtype) -> int | None:
    """Time a stage with torch's product and with each shape; return the fastest, None for torch's."""
    from lantern_accel_cuda.kernels import few

    with _disable_current_modes(), torch.inference_mode():
        count = max(2, min(-(-MOST_BYTES // (2 * outputs * inputs)), CALLS))
        free = torch.cuda.mem_get_info(site.device)[0]
        count = max(1, min(count, free // (8 * outputs * inputs)))
        many = [site.numbers(n, outputs, inputs, dtype=dtype) * inputs**-0.5 for n in range(2)]
        many += [many[n % 2].clone() for n in range(count - len(many))]
        times: dict[int | None, float] = {}
        for shape in (None, *range(len(few.SHAPES))):
            total = 0.0
            for rows in ROWS:
                made = partial(_call, site, stage, outputs, inputs, dtype, rows)
                if shape is not None and not _agrees(made()(shape, many[0]), made()(None, many[0])):
                    break
                total += _seconds(site.device, partial(made(), shape), many)
            else:
                times[shape] = total
        return min(times, key=lambda one: times[one])


def _call(
    site: Site, stage: str, outputs: int, inputs: int, dtype: torch.dtype, rows: int
) -> Callable[[int | None, Tensor], Tensor]:
    """Return a function of a shape and a weight that does a stage on ``rows`` rows, and its result."""
    from lantern_accel_cuda import layers

    x, cores = site.numbers(1, 1, rows, inputs, dtype=dtype), site.cores
    norm = Norm(torch.ones(inputs, dtype=dtype, device=site.device), 1e-5)
    if stage == "sums":
        return lambda shape, w: layers.sums(x, w, shape, cores)
    if stage == "gate":
        return lambda shape, w: layers.gated(x, norm, w, shape, cores)
    if stage == "add":
        residual = site.numbers(2, 1, rows, outputs, dtype=dtype)

        def add(shape: int | None, w: Tensor) -> Tensor:
            layers.added(x, w, residual, shape, cores)
            return residual

        return add
    # Heads of any width take as long: of 64 where that divides the outputs.
    width = next(n for n in (64, 32, 16, 8, 4, 2) if outputs % (3 * n) == 0)
    heads = outputs // (3 * width)
    angles = site.numbers(3, 1, rows, 1, 1, width // 2)
    rotary = angles.cos(), angles.sin()
    k, v = (torch.zeros(1, heads, rows, width, dtype=dtype, device=site.device) for _ in range(2))
    first = torch.arange(heads, device=site.device) * rows
    address = (torch.arange(rows, device=site.device).unsqueeze(1) + first).flatten()
    return lambda shape, w: layers.rotated(x, norm, w, rotary, address, k, v, heads, shape, cores)


def _agrees(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether a kernel computes what torch does, once more at this size."""
    error, size = (ours.float() - theirs.float()).norm(), theirs.float().norm()
    return bool(error <= DIFFERENCE * size)


def _seconds(device: torch.device, call: Callable[[Tensor], Tensor], many: list[Tensor]) -> float:
    """Return the seconds of a call in a recorded step, the least of some recordings' replays."""
    from lantern_accel_cuda.handles import event, stream

    side, current = stream(device, "measure"), torch.cuda.current_stream(device)
    side.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for weight in many[:2]:
            call(weight)
        torch.cuda.synchronize(device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for n in range(CALLS):
                call(many[n % len(many)])
        finally:
            graph.capture_end()
        best = float("inf")
        for _ in range(REPEATS):
            begin, end = event(timing=True), event(timing=True)
            begin.record(side)
            graph.replay()
            end.record(side)
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1000 / CALLS)
    graph.reset()
    current.wait_stream(side)
    return best
