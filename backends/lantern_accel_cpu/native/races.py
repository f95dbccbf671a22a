"""Decoding where noise decides every token, in native calls: races, walks, and what follows a pass.

Every function returns None for what it has no kernel for: that goes the reference's way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.device.plan import DraftedTree, Filter, FusedStep, NoDrafts, StepPlan, Window
from lantern_accel_cpu.native.guesses import Guessing, guessing
from lantern_accel_cpu.native.kernels import Kernels, lies
from lantern_accel_cpu.native.library import Library, byref
from lantern_accel_cpu.native.sampling import filter_of
from lantern_accel_cpu.native.structures import AdvanceChosen, Choose

FRESH = {"uniform": 0, "above": 1, "head": 2, "given": 3}


def _rows(weights: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, ...] | None:
    """Return the tensors of a race in one piece each, or None."""
    if positions.dtype != torch.int64 or weights.requires_grad or not weights.numel():
        return None
    given = weights.contiguous(), keys.contiguous(), positions.contiguous()
    whole = lies(torch.float32, given[0]) and lies(torch.int32, given[1])
    return given if whole and lies(torch.int64, given[2]) else None


def race(library: Library, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor | None:
    """Return the codes ``[B, T]`` that win (:meth:`SamplingOps.race`)."""
    given = _rows(weights, keys, positions)
    if given is None:
        return None
    images, count, vocab = weights.shape
    out = torch.empty((images, count), dtype=torch.int64)
    library.race(*(t.data_ptr() for t in given), images, count, vocab, out.data_ptr())
    return out


def perturb(library: Library, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor | None:
    """Return weights over noise ``[B, T, V]`` (:meth:`SamplingOps.perturb`)."""
    given = _rows(weights, keys, positions)
    if given is None:
        return None
    images, count, vocab = weights.shape
    out = torch.empty((images, count, vocab))
    library.perturb(*(t.data_ptr() for t in given), images, count, vocab, out.data_ptr())
    return out


def accept(
    library: Library,
    tree: DraftedTree,
    logits: Tensor,
    given: Filter,
    keys: Tensor,
    length: Tensor,
) -> tuple[Tensor, ...] | None:
    """Walk down a tree (:meth:`SamplingOps.accept_invariant`); return the fields of an ``Accepted``."""
    held: list[Tensor] = []
    described = filter_of(given, held) if lies(torch.float32, logits) else None
    ints = [t.contiguous() for t in (tree.tokens, tree.first_child, tree.num_children, length)]
    if described is None or not lies(torch.int64, *ints) or not lies(torch.int32, keys):
        return None
    images, nodes, vocab = logits.shape
    depth = len(tree.max_children)
    path = torch.empty((images, depth + 1), dtype=torch.int64)
    kept, bonus = (torch.empty(images, dtype=torch.int64) for _ in range(2))
    weights = torch.empty((images, vocab))
    call = Choose(
        described, logits.data_ptr(), *(t.data_ptr() for t in ints[:3]), keys.data_ptr(),
        ints[3].data_ptr(), path.data_ptr(), kept.data_ptr(), bonus.data_ptr(), weights.data_ptr(),
        images, nodes, vocab, depth,
    )  # fmt: skip
    library.choose(byref(call))
    return path, kept, bonus, weights, torch.zeros(images, depth)


def _drafts_of(source: NoDrafts | Window) -> dict[str, Tensor] | None:
    """Return the buffers of drafts by name; None where there is no kernel for them."""
    if isinstance(source, NoDrafts):
        return {"root": source.root}
    if source.code_kind is not None or source.above is not None or source.fresh not in FRESH:
        return None
    notes = {name: getattr(source, name) for name in ("row_keys", "row_previous", "row_tokens")}
    kept = {name: tensor for name, tensor in notes.items() if tensor is not None}
    return {"place": source.place, "newest": source.newest, **kept}


def described(
    plan: StepPlan, source: NoDrafts | Window, head: Guessing | None
) -> tuple[AdvanceChosen, list[Tensor]] | None:
    """Describe what follows a pass where noise decides, or greedily the likeliest codes are chosen.

    Returns what must outlive the description, too.
    """
    at, state = plan.sizes, plan.buffers
    held: list[Tensor] = []
    filtered = filter_of(plan.filter, held)
    drafts = _drafts_of(source)
    if filtered is None or drafts is None or (state.keys is None) != plan.greedy:
        return None
    if plan.greedy and plan.rule.relaxed:
        return None
    buffers: dict[str, Tensor] = {
        "tokens": state.tokens, "length": state.length, "step": state.step, "steps": state.steps,
        "last_length": state.last_length, "histogram": state.histogram, "finite": state.finite,
        "report": state.report, **drafts,
    }  # fmt: skip
    rows = source.q if isinstance(source, Window) else None
    keys = [] if state.keys is None else [state.keys]
    if not lies(torch.int64, *buffers.values()) or not lies(torch.int32, *keys):
        return None
    given = AdvanceChosen(
        filtered, keys=None if state.keys is None else state.keys.data_ptr(),
        holds=state.holds.data_ptr(),
        rows=None if rows is None else rows.data_ptr(), images=at.images, span=at.depth + 1,
        vocab=at.vocab, image=at.tokens, histogram_stride=state.histogram.stride(0),
        **{name: tensor.data_ptr() for name, tensor in buffers.items()},
    )  # fmt: skip
    if isinstance(source, Window):
        given.kept, given.passes = source.kept, source.passes
        given.wide = 0 if source.row_tokens is None else source.row_tokens.shape[2]
        given.width, given.fresh = source.width, FRESH[source.fresh]
        if source.head is not None:
            if head is None:  # its states are the pass's
                return None
            given.head = head.address
    return given, held


def advance(
    kernels: Kernels,
    plan: StepPlan,
    source: NoDrafts | Window,
    head: Guessing | None = None,
) -> Callable[[Tensor], bool] | None:
    """Return what follows a pass where noise decides in one call, on buffers that stay."""
    found = described(plan, source, head)
    if found is None:
        return None
    given = found[0]
    library, keep = kernels.library, (plan, found, head)

    def run(logits: Tensor) -> bool:
        if not lies(torch.float32, logits := logits.contiguous()):
            return False
        assert keep
        kernels.threads()
        library.advance_chosen(byref(given), logits.data_ptr())
        return True

    return run


def fresh_guesses(kernels: Kernels, plan: StepPlan) -> FusedStep | None:
    """Return what guesses drafts that no pass has seen (:meth:`.TensorOps.fused_guesses`)."""
    head = guessing(kernels, plan)
    if head is None or not isinstance(plan.source, Window):
        return None
    found = described(plan, plan.source, head)
    if found is None:
        return None
    given = found[0]
    library, keep = kernels.library, (plan, found, head)

    def run(logits: Tensor | None = None) -> bool:
        assert keep
        kernels.threads()
        library.fresh_guesses(byref(given))
        return True

    return run
