"""Decoding where noise decides every token, in native calls: races, walks, and what follows a pass.

What works on tensors returns None where it has no kernel: that goes the reference's way. What describes
a plan raises Unserved.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref
from functools import partial

import torch
from torch import Tensor

from lantern_accel.device.plan import DraftedTree, Filter, NoDrafts, StepPlan, WindowPlan
from lantern_accel_cpu.native.guesses import Guessing
from lantern_accel_cpu.native.kernels import Kernels, lies
from lantern_accel_cpu.native.plans import Owner, Unserved, require
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


def race(
    kernels: Kernels, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
) -> Tensor | None:
    """Return the codes ``[B, T]`` that win (:meth:`SamplingOps.race`); None for more of each."""
    given = _rows(weights, keys, positions) if count is None else None
    if given is None:
        return None
    out = torch.empty(weights.shape[:2], dtype=torch.int64)
    kernels.library.race(*(t.data_ptr() for t in given), *weights.shape, out.data_ptr())
    return out


def perturb(kernels: Kernels, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor | None:
    """Return weights over noise ``[B, T, V]`` (:meth:`SamplingOps.perturb`)."""
    given = _rows(weights, keys, positions)
    if given is None:
        return None
    out = torch.empty(weights.shape)
    kernels.library.perturb(*(t.data_ptr() for t in given), *weights.shape, out.data_ptr())
    return out


def accept(
    kernels: Kernels, tree: DraftedTree, logits: Tensor, given: Filter, keys: Tensor, length: Tensor
) -> tuple[Tensor, ...] | None:
    """Walk down a tree (:meth:`SamplingOps.accept_invariant`); return the fields of an ``Accepted``."""
    owner = Owner()
    described = filter_of(given, owner) if lies(torch.float32, logits) else None
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
    kernels.library.choose(byref(call))
    return path, kept, bonus, weights, torch.zeros(images, depth)


def _drafts_of(source: NoDrafts | WindowPlan, owner: Owner) -> dict[str, int]:
    """Return the addresses of the buffers of drafts; raises Unserved where they have no kernel."""
    if isinstance(source, NoDrafts):
        return {"root": owner(source.root)}
    require(source.code_kind is None, "not every token may be any code")
    require(source.above is None, "rows have widths of their own")
    require(source.fresh in FRESH, f"fresh drafts are {source.fresh}")
    notes = {name: getattr(source, name) for name in ("row_keys", "row_previous", "row_tokens")}
    kept = {name: owner(tensor) for name, tensor in notes.items() if tensor is not None}
    return {"place": owner(source.place), "newest": owner(source.newest), **kept}


def describe_advance(
    plan: StepPlan, source: NoDrafts | WindowPlan, head: Guessing | None
) -> Structure:
    """Describe what follows a pass where noise decides, or greedily the likeliest codes are chosen."""
    at, state, owner = plan.sizes, plan.buffers, Owner(head)
    filtered = filter_of(plan.filter, owner)
    require(filtered is not None, "the filter's numbers are not float32 on the CPU")
    require((state.keys is None) == plan.greedy, "neither noise nor the likeliest code decides")
    require(not (plan.greedy and plan.rule.relaxed), "a relaxed rule decides greedily")
    given = AdvanceChosen(
        filtered, keys=owner.optional(state.keys), tokens=owner(state.tokens), images=at.images,
        span=at.depth + 1, vocab=at.vocab, image=at.tokens,
        histogram_stride=state.histogram.stride(0), **owner.progress(plan),
        **_drafts_of(source, owner),
    )  # fmt: skip
    if isinstance(source, WindowPlan):
        given.rows, given.kept, given.passes = owner.optional(source.q), source.kept, source.passes
        given.wide = 0 if source.row_tokens is None else source.row_tokens.shape[2]
        given.width, given.fresh = source.width, FRESH[source.fresh]
        if source.head is not None:
            if head is None:
                raise Unserved("a draft head guesses from states of the whole step's pass")
            given.head = head.address
    given.owner = owner
    return given


def advance(
    kernels: Kernels, plan: StepPlan, source: NoDrafts | WindowPlan, head: Guessing | None = None
) -> Callable[[int], None]:
    """Return what follows a pass where noise decides in one call on its logits' address."""
    given = describe_advance(plan, source, head)

    return partial(kernels.library.advance_chosen, byref(given))


def fresh_guesses(
    kernels: Kernels, plan: StepPlan, source: NoDrafts | WindowPlan, head: Guessing
) -> Callable[[], bool]:
    """Return what guesses drafts that no pass has seen (:attr:`.FusedStep.guess`)."""
    given, library = describe_advance(plan, source, head), kernels.library

    def guess() -> bool:
        kernels.threads()
        library.fresh_guesses(byref(given))
        return True

    return guess
