"""Chooses what does a product of few rows on a card: a Triton kernel, or torch's between kernels.

All are timed at first use, for each stage of a layer, each size of matrix and each class of rows, with
weights that no cache holds. A kernel that computes something else than torch is left out. The times are
kept in the cache folder, for the same card, driver, torch, Triton and source as the kernels' checks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lantern_accel.device.plan import Norm
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    NotCapturableError,
)
from lantern_accel_cuda.agreement import Site
from lantern_accel_cuda.faults import by_kernel, explain_errors, is_lost
from lantern_accel_cuda.graphs import Recorder
from lantern_accel_cuda.handles import event
from lantern_accel_cuda.options import has_triton
from lantern_accel_cuda.trust import Kept

if has_triton():
    from lantern_accel_cuda import layers
    from lantern_accel_cuda.kernels import few

#: Most rows of a class, each of which has a choice, and the rows that are timed for it: a plain step with
#: guidance, windows of 16, and windows of 32 or of a batch.
ROWS = {16: 2, 32: 32, 64: 64}
#: Calls in a timed recording, recordings of each, and bytes of weights that they share at most.
CALLS, REPEATS, MOST_BYTES = 24, 5, 2**29
#: Bytes of a matrix below which nothing is timed: a cache holds it, and fewer launches are faster.
LEAST_BYTES = 2**22
#: Largest relative difference from torch's result.
DIFFERENCE = 2e-2
#: Name of torch's product among the choices; a Triton kernel's is the number of its shape.
TORCH = "torch"

#: Milliseconds of a call by class of rows and choice; 0 where nothing was timed.
Times = dict[str, dict[str, float]]
Measure = Callable[[str, int, int, torch.dtype], Times]


class Choices:
    """What serves each stage, size and class of rows: a shape of :data:`.few.SHAPES`, or None for torch.

    ``exact``: a kernel serves everything, or it is an error.
    """

    def __init__(self, key: Mapping[str, str], measure: Measure, exact: bool = False) -> None:
        self.kept = Kept({**key, "preset": "exact"} if exact else key, "products")
        self._measure, self._exact = measure, exact
        self._known: dict[str, dict[int, int | None]] = {}

    def __call__(
        self, stage: str, outputs: int, inputs: int, dtype: torch.dtype, rows: int
    ) -> int | None:
        """Return what serves a matrix ``[outputs, inputs]`` and at most 64 rows, measured at first use.

        Raises BackendError where exactness was asked for and the kernel differs from torch's product.
        """
        name = f"{stage} {outputs}x{inputs} {str(dtype).removeprefix('torch.')}"
        if name not in self._known:
            self._known[name] = self._choose(name, stage, outputs, inputs, dtype)
        return self._known[name][next(most for most in ROWS if rows <= most)]

    def _choose(
        self, name: str, stage: str, outputs: int, inputs: int, dtype: torch.dtype
    ) -> dict[int, int | None]:
        if (times := self.kept.read().get(name)) is None:
            try:
                times = self._measure(stage, outputs, inputs, dtype)
            except (NotCapturableError, DeviceMemoryError):
                return dict.fromkeys(ROWS, 0)  # what is not measured is not kept
            except DeviceLostError as error:
                if by_kernel(error):
                    self.kept.keep(name, {str(most): {TORCH: 0.0} for most in ROWS})
                    raise DeviceLostError(
                        f"{error}; start again: torch's product serves {name!r} from now on"
                    ) from error
                raise
            self.kept.keep(name, times)
        if self._exact and any(TORCH in by for by in times.values()):
            raise BackendError(
                f"preset=exact needs the kernel of {name!r}, which differs from torch's product on this "
                "card; give --option preset=fast"
            )
        best = {most: min(times[str(most)], key=times[str(most)].__getitem__) for most in ROWS}
        return {most: None if one == TORCH else int(one) for most, one in best.items()}


def time_stage(
    site: Site, recorder: Recorder, timed: bool, stage: str, outputs: int, inputs: int,
    dtype: torch.dtype,
) -> Times:  # fmt: skip
    """Time a stage with torch's product and with each shape that agrees with it, in ms.

    Small matrices, and all where not ``timed``, are compared alone, in the first shape. Raises
    NotCapturableError and DeviceMemoryError where they cannot be timed.
    """
    nbytes = dtype.itemsize * outputs * inputs
    timed = timed and nbytes >= LEAST_BYTES
    found: Times = {}
    torch.cuda.synchronize(site.device)  # what an earlier kernel did comes out here
    with (
        _disable_current_modes(),
        torch.inference_mode(),
        explain_errors(site.device, "timing products"),
    ):
        count = max(2, min(-(-MOST_BYTES // nbytes), CALLS)) if timed else 1
        count = max(1, min(count, torch.cuda.mem_get_info(site.device)[0] // (4 * nbytes)))
        many = [site.numbers(n, outputs, inputs, dtype=dtype) * inputs**-0.5 for n in range(2)]
        many = many[:count] + [many[n % 2].clone() for n in range(count - 2)]
        gc.collect()  # a cycle that holds GPU memory must not be freed during a capture
        for most, rows in ROWS.items():
            made = partial(_call, site, stage, outputs, inputs, dtype, rows)
            want, times = made()(None, many[0]), found.setdefault(str(most), {})
            for shape in range(len(few.SHAPES) if timed else 1):
                if _serves(made, shape, many[0], want):
                    times[str(shape)] = (
                        _ms(recorder, partial(made(), shape), many) if timed else 0.0
                    )
            if timed or not times:
                times[TORCH] = _ms(recorder, partial(made(), None), many) if timed else 0.0
    if timed:
        torch.cuda.empty_cache()
    return found


def _call(
    site: Site, stage: str, outputs: int, inputs: int, dtype: torch.dtype, rows: int
) -> Callable[[int | None, Tensor], tuple[Tensor, ...]]:
    """Return a function of a shape and a weight that does a stage on ``rows`` rows; it returns all."""
    x, cores = site.numbers(1, 1, rows, inputs, dtype=dtype), site.cores
    norm = Norm(torch.ones(inputs, dtype=dtype, device=site.device), 1e-5)
    if stage == "sums":
        return lambda shape, w: (layers.sums(x, w, shape, cores),)
    if stage == "gate":
        return lambda shape, w: (layers.apply_gate(x, norm, w, shape, cores),)
    if stage == "add":
        residual = site.numbers(2, 1, rows, outputs, dtype=dtype)

        def add(shape: int | None, w: Tensor) -> tuple[Tensor, ...]:
            layers.add_product(x, w, residual, shape, cores)
            return (residual,)

        return add
    # Heads of any width take as long: of 64 where that divides the outputs.
    width = next(n for n in (64, 32, 16, 8, 4, 2) if outputs % (3 * n) == 0)
    heads = outputs // (3 * width)
    angles = site.numbers(3, 1, rows, 1, 1, width // 2)
    rotary = angles.cos(), angles.sin()
    k, v = (torch.zeros(1, heads, rows, width, dtype=dtype, device=site.device) for _ in range(2))
    first = torch.arange(heads, device=site.device) * rows
    address = (torch.arange(rows, device=site.device).unsqueeze(1) + first).flatten()

    def rotate(shape: int | None, w: Tensor) -> tuple[Tensor, ...]:
        q = layers.project_heads(x, norm, w, rotary, address, k, v, heads, shape, cores)
        return q, k, v

    return rotate


def _serves(
    made: Callable[[], Callable[[int | None, Tensor], tuple[Tensor, ...]]], shape: int,
    weight: Tensor, want: tuple[Tensor, ...],
) -> bool:  # fmt: skip
    """Return whether a kernel can be compiled in a shape, and writes what torch does at this size."""
    try:
        ours = made()(shape, weight)
    except Exception as error:
        if by_kernel(error) and not is_lost(error):
            return False
        raise
    pairs = [(a.float(), b.float()) for a, b in zip(ours, want, strict=True)]
    return all(bool((a - b).norm() <= DIFFERENCE * b.norm()) for a, b in pairs)


def _ms(
    recorder: Recorder, call: Callable[[Tensor], tuple[Tensor, ...]], many: list[Tensor]
) -> float:
    """Return the milliseconds of a call in a recorded step, the least of some recordings' replays."""

    def run() -> None:
        for n in range(CALLS):
            call(many[n % len(many)])

    replay, best = recorder.trial(run), float("inf")
    try:
        on = torch.cuda.current_stream(recorder.device)
        for _ in range(REPEATS):
            begin, end = event(timing=True), event(timing=True)
            begin.record(on)
            replay()
            end.record(on)
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / CALLS)
    finally:
        replay.release()
    return best
