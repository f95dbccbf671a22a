"""What follows a pass of plain decoding under uniforms, in one native call."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from functools import partial

from lantern_accel.device.plan import NoDrafts, StepPlan
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.plans import Owner, require
from lantern_accel_cpu.native.sampling import filter_of
from lantern_accel_cpu.native.structures import Advance


def advance(kernels: Kernels, plan: StepPlan, source: NoDrafts) -> Callable[[int], None]:
    """Return what follows a pass of plain decoding under uniforms, on its logits' address."""
    at, state, owner = plan.sizes, plan.buffers, Owner()
    described = filter_of(plan.filter, owner)
    require(not plan.rule.relaxed, "the rule is relaxed")
    require(described is not None, "the filter's numbers are not float32 on the CPU")
    require(at.nodes == 1, "plain decoding has more than one position")
    assert state.uniforms is not None
    given = Advance(
        described, uniforms=owner(state.uniforms), tokens=owner(state.tokens),
        root=owner(source.root), images=at.images, vocab=at.vocab, image=at.tokens,
        columns=state.uniforms.shape[-1], histogram_stride=state.histogram.stride(0),
        **owner.progress(plan),
    )  # fmt: skip
    given.owner = owner

    return partial(kernels.library.advance, byref(given))
