"""SJD's test of a window's drafts, and what follows a pass of plain decoding, in native calls.

Each returns None for what it has no kernel for: that goes the reference's way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.device.plan import NoDrafts, StepPlan
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.library import Library, byref
from lantern_accel_cpu.native.sampling import filter_of
from lantern_accel_cpu.native.structures import Advance, Couple


def _plain(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Return whether these are ordinary tensors of a dtype, on the CPU."""
    return all(
        t is None or (type(t) is Tensor and t.dtype == dtype and t.device.type == "cpu")
        for t in tensors
    )


class _Held:
    """Keeps contiguous copies alive until the call has ended."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()

    def row(self, uniforms: Tensor) -> tuple[int, int]:
        """Return the address of uniforms ``[B, N]`` and how far apart their rows lie."""
        if uniforms.stride(-1) != 1:
            uniforms = uniforms.contiguous()
        self.tensors.append(uniforms)
        return uniforms.data_ptr(), uniforms.stride(0)


def couple(
    library: Library,
    x: Tensor,
    p: Tensor,
    q: Tensor,
    tests: Tensor,
    draws: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Test the drafts of windows (:meth:`SamplingOps.couple`)."""
    if not _plain(torch.int64, x) or not _plain(torch.float32, p, q, tests, draws):
        return None
    images, length, vocab = p.shape
    if length < 2:
        return None
    held = _Held()
    tokens = torch.empty((images, length), dtype=torch.int64)
    count = torch.empty(images, dtype=torch.int64)
    at_tests, at_draws = held.row(tests), held.row(draws)
    given = Couple(
        x=held(x), p=held(p), q=held(q), tests=at_tests[0], draws=at_draws[0],
        tokens=tokens.data_ptr(), count=count.data_ptr(),
        images=images, length=length, vocab=vocab, test_stride=at_tests[1],
        draw_stride=at_draws[1],
    )  # fmt: skip
    library.couple(byref(given))
    return tokens, count


def advance(kernels: Kernels, plan: StepPlan, source: NoDrafts) -> Callable[[Tensor], bool] | None:
    """Return what follows a pass of plain decoding under uniforms in one call, on buffers that stay."""
    at, state = plan.sizes, plan.buffers
    held: list[Tensor] = []
    described = filter_of(plan.filter, held)
    if plan.rule.relaxed or described is None or state.uniforms is None or at.nodes != 1:
        return None
    buffers: dict[str, Tensor] = {
        "tokens": state.tokens, "length": state.length, "step": state.step, "steps": state.steps,
        "last_length": state.last_length, "histogram": state.histogram, "finite": state.finite,
        "report": state.report, "root": source.root,
    }  # fmt: skip
    if not _plain(torch.float32, state.uniforms) or not _plain(torch.int64, *buffers.values()):
        return None
    given = Advance(
        described, uniforms=state.uniforms.data_ptr(), holds=state.holds.data_ptr(),
        images=at.images, vocab=at.vocab, image=at.tokens, columns=state.uniforms.shape[-1],
        histogram_stride=state.histogram.stride(0),
        **{name: tensor.data_ptr() for name, tensor in buffers.items()},
    )  # fmt: skip
    library, keep = kernels.library, (plan, held)

    def run(logits: Tensor) -> bool:
        if not _plain(torch.float32, logits):
            return False
        assert keep
        logits = logits.contiguous()
        kernels.threads()
        library.advance(byref(given), logits.data_ptr())
        return True

    return run
