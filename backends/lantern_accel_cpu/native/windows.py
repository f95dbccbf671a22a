"""A window of drafts in native calls: the exact test, the look-up, or all that follows a pass.

Each returns None for what it has no kernel for: that goes the reference's way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from lantern_accel.device.plan import Lookup, NoDrafts, StepPlan, Window
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.library import Advance, Couple, Library, Recall, byref
from lantern_accel_cpu.native.sampling import filter_of


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
    anew: bool,
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
        draw_stride=at_draws[1], anew=anew,
    )  # fmt: skip
    library.couple(byref(given))
    return tokens, count


def recall(library: Library, given: Lookup) -> tuple[Tensor, Tensor, Tensor] | None:
    """Look up earlier passes (:meth:`SamplingOps.recall`)."""
    x, p, q, past = given.x, given.p, given.q, given.row_probs
    whole = (
        x,
        given.tokens,
        given.first,
        given.length,
        given.step,
        given.row_keys,
        given.row_previous,
    )
    if not _plain(torch.int64, *whole):
        return None
    if not _plain(torch.float32, p, q, given.tests, given.draws):
        return None
    if not _plain(torch.bfloat16, past):
        return None
    images, length, vocab = p.shape
    if length < 2 or not (past.is_contiguous() and given.row_keys.is_contiguous()):
        return None
    held = _Held()
    out = torch.empty((images, length), dtype=torch.int64)
    places = torch.empty((images, given.slots), dtype=torch.int64)
    rows = torch.empty((images, given.slots, vocab))
    at_tests, at_draws = held.row(given.tests), held.row(given.draws)
    call = Recall(
        x=held(x), tokens=held(given.tokens), first=held(given.first), length_of=held(given.length),
        step=held(given.step), p=held(p), q=held(q), tests=at_tests[0], draws=at_draws[0],
        row_probs=held(past), row_keys=held(given.row_keys), row_previous=held(given.row_previous),
        out=out.data_ptr(),
        places=places.data_ptr(), rows=rows.data_ptr(), images=images, length=length,
        vocab=vocab, test_stride=at_tests[1], draw_stride=at_draws[1], slots=given.slots,
        passes=past.shape[1], wide=past.shape[2], image=given.image,
    )  # fmt: skip
    library.recall(byref(call))
    return out, rows, places


def advance(
    kernels: Kernels, plan: StepPlan, source: NoDrafts | Window
) -> Callable[[Tensor], bool] | None:
    """Return what follows a pass under uniforms in one call, on buffers that stay."""
    if plan.rule.relaxed:
        return None
    at, state = plan.sizes, plan.buffers
    held: list[Tensor] = []
    described = filter_of(plan.filter, held)
    drafts = drafts_of(
        source,
        ("above", "left"),
        ("place", "newest", "q"),
        ("row_probs", "row_keys", "row_previous"),
    )
    if described is None or drafts is None or state.uniforms is None:
        return None
    buffers: dict[str, Tensor] = {
        "tokens": state.tokens, "length": state.length, "step": state.step, "steps": state.steps,
        "last_length": state.last_length, "histogram": state.histogram, "finite": state.finite,
        "report": state.report, **drafts,
    }  # fmt: skip
    numbers = {"q": torch.float32, "row_probs": torch.bfloat16}
    if not _plain(torch.float32, state.uniforms) or not all(
        _plain(numbers.get(name, torch.int64), tensor) for name, tensor in buffers.items()
    ):
        return None
    given = Advance(
        described, uniforms=state.uniforms.data_ptr(), holds=state.holds.data_ptr(),
        images=at.images, span=at.nodes, vocab=at.vocab, image=at.tokens,
        columns=state.uniforms.shape[-1], histogram_stride=state.histogram.stride(0),
        **{name: tensor.data_ptr() for name, tensor in buffers.items()},
    )  # fmt: skip
    if isinstance(source, Window):
        given.kept, given.passes = source.kept, source.passes
        given.wide = 0 if source.row_keys is None else source.row_keys.shape[2]
        given.slots, given.fresh_column = source.recalled, source.fresh_column
        given.width, given.anew, given.above = source.width, source.anew, source.fresh == "above"
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


def drafts_of(
    source: NoDrafts | Window,
    fresh: Container[str],
    drafts: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Tensor] | None:
    """Return the buffers of drafts by name; None where there is no kernel for them.

    ``fresh``: the kinds of fresh drafts that there are kernels for; ``drafts``: the window's buffers that
    must be there; ``notes``: those that may be.
    """
    if isinstance(source, NoDrafts):
        return {"root": source.root}
    if source.code_kind is not None or source.above is not None:
        return None
    found = {name: getattr(source, name) for name in (*drafts, *notes)}
    if source.fresh not in fresh or any(found[name] is None for name in drafts):
        return None
    return {name: tensor for name, tensor in found.items() if tensor is not None}
