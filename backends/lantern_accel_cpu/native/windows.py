"""A window of drafts in native calls: the exact test, the look-up, or all that follows a pass.

Each returns None for what it has no kernel for: that goes the reference's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern_accel_cpu.native import races
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
    left: bool,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Test the drafts of windows (:meth:`SamplingOps.couple`)."""
    if not _plain(torch.int64, x) or not _plain(torch.float32, p, q, tests, draws):
        return None
    images, length, vocab = p.shape
    if length < 2:
        return None
    held = _Held()
    tokens = torch.empty((images, length), dtype=torch.int64)
    count = torch.empty(images, dtype=torch.int64)
    rest = torch.empty((images, vocab)) if left else None
    at_tests, at_draws = held.row(tests), held.row(draws)
    given = Couple(
        x=held(x), p=held(p), q=held(q), tests=at_tests[0], draws=at_draws[0],
        tokens=tokens.data_ptr(), count=count.data_ptr(),
        left=None if rest is None else rest.data_ptr(),
        images=images, length=length, vocab=vocab, test_stride=at_tests[1],
        draw_stride=at_draws[1], anew=anew,
    )  # fmt: skip
    library.couple(byref(given))
    return tokens, count, rest


def recall(
    library: Library,
    state: Any,
    x: Tensor,
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    first: Tensor,
    tests: Tensor,
    draws: Tensor,
    taken: Tensor | None,
    slots: int,
    image: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Look up earlier passes (:meth:`SamplingOps.recall`)."""
    whole = (x, tokens, first, state.length, state.step, state.heard, state.before)
    if not _plain(torch.int64, *whole) or not _plain(torch.float32, p, q, tests, draws):
        return None
    past = state.past
    if not _plain(torch.bfloat16, past) or not _plain(torch.bool, taken):
        return None
    images, length, vocab = p.shape
    if length < 2 or not (past.is_contiguous() and state.heard.is_contiguous()):
        return None
    held = _Held()
    out = torch.empty((images, length), dtype=torch.int64)
    places = torch.empty((images, slots), dtype=torch.int64)
    rows = torch.empty((images, slots, vocab))
    at_tests, at_draws = held.row(tests), held.row(draws)
    given = Recall(
        x=held(x), tokens=held(tokens), first=held(first), length_of=held(state.length),
        step=held(state.step), p=held(p), q=held(q), tests=at_tests[0], draws=at_draws[0],
        past=held(past), heard=held(state.heard), before=held(state.before),
        taken=None if taken is None else held(taken), out=out.data_ptr(),
        places=places.data_ptr(), rows=rows.data_ptr(), images=images, length=length,
        vocab=vocab, test_stride=at_tests[1], draw_stride=at_draws[1], slots=slots,
        passes=past.shape[1], wide=past.shape[2], image=image,
    )  # fmt: skip
    library.recall(byref(given))
    return out, rows, places


def advance(kernels: Kernels, engine: Any, span: int) -> Callable[[Tensor], bool] | None:
    """Return what follows a pass in one call (:meth:`SamplingOps.advance`), on buffers that stay."""
    if engine.geometry.keyed:
        return races.advance(kernels, engine, span)
    if engine.rule.relaxed:
        return None
    state, sound, g = engine.state, engine.sound, engine.geometry
    held: list[Tensor] = []
    described = filter_of(engine.filters.given, held)
    drafts = _drafts(engine) if hasattr(engine, "ring") else {"root": state.root}
    if described is None or drafts is None:
        return None
    buffers: dict[str, Tensor] = {
        "tokens": state.tokens, "length": state.length, "step": state.step, "steps": state.steps,
        "last_length": state.last_length, "histogram": state.histogram, "sound": sound.count,
        "report": sound.report, **drafts,
    }  # fmt: skip
    numbers = {"q": torch.float32, "past": torch.bfloat16}
    if not _plain(torch.float32, state.uniforms) or not all(
        _plain(numbers.get(name, torch.int64), tensor) for name, tensor in buffers.items()
    ):
        return None
    given = Advance(
        described, uniforms=state.uniforms.data_ptr(), holds=sound.holds.data_ptr(),
        images=g.batch, span=span, vocab=g.vocab, image=g.tokens, columns=state.uniforms.shape[-1],
        histogram_stride=state.histogram.stride(0),
        **{name: tensor.data_ptr() for name, tensor in buffers.items()},
    )  # fmt: skip
    if "q" in drafts:
        fresh, window = engine.fresh, engine.drafts
        given.kept = state.q.shape[1] - 1
        given.passes, given.wide = g.passes, state.past.shape[2]
        given.slots, given.fresh_column, given.width = (
            window.looked_up,
            window.fresh_column,
            fresh.width,
        )
        given.anew, given.above = engine.window.tail == "anew", fresh.kind == "above"
    library, keep = kernels.library, (buffers, state, sound, held)

    def run(logits: Tensor) -> bool:
        if not _plain(torch.float32, logits):
            return False
        assert keep
        logits = logits.contiguous()
        kernels.threads()
        library.advance(byref(given), logits.data_ptr())
        return True

    return run


def _drafts(engine: Any) -> dict[str, Tensor] | None:
    """Return the buffers of a window's drafts by name; None where there is no kernel for them."""
    state, fresh = engine.state, engine.fresh
    if engine.siblings.total:
        return None
    if fresh.kind not in ("above", "left") or fresh.kinds is not None or fresh.up is not None:
        return None
    return {
        "place": engine.ring.place, "newest": state.newest, "q": state.q, "past": state.past,
        "heard": state.heard, "before": state.before,
    }  # fmt: skip
