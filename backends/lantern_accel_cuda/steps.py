"""Steps in kernels of its own: a whole one, or what follows a pass; or why a plan has no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lantern_accel.device.kv_cache import Pass
from lantern_accel.device.plan import FusedStep, NoDrafts, StepPlan, TargetModel, WindowPlan
from lantern_accel.nn.rounding import Rounded
from lantern_accel_cuda.options import has_triton

if has_triton():
    from lantern_accel_cuda import layers
    from lantern_accel_cuda.kernels.advance import MOST_POSITIONS, Advance
    from lantern_accel_cuda.kernels.enter import enter
    from lantern_accel_cuda.kernels.guess import MOST_RANK, Guesses

#: The version of plans that these steps were written for.
PLAN_VERSION = 3
Step = Callable[[Tensor | None], bool]

#: What fresh drafts are taken from, of what the kernels know.
FRESH = ("above", "given")


def explain_refusal(plan: StepPlan) -> str:
    """Say why the kernels do not know a plan, empty where they do: plain steps, windows by keys."""
    s, b, rule = plan.source, plan.buffers, plan.rule
    if plan.version != PLAN_VERSION:
        return f"the plan is of version {plan.version}, the kernels know {PLAN_VERSION}"
    if plan.greedy or b.keys is None:
        return "tokens are not chosen by noise"
    if plan.target is not None and (why := _unknown(plan, plan.target)):
        return why
    if rule.relaxed or rule.kind != "exact" or rule.budget is not None:
        return "the rule is relaxed"
    if isinstance(s, NoDrafts):
        return "" if plan.sizes.nodes == 1 else "plain decoding has more than one position"
    if not isinstance(s, WindowPlan):
        return "drafts are a tree's"
    if plan.sizes.nodes > MOST_POSITIONS:
        return f"the window is longer than {MOST_POSITIONS} positions"
    if s.above is not None or s.code_kind is not None:
        return "not every token may be any code, or rows differ"
    if s.head is not None:
        if plan.target is None:
            return "a draft head guesses, from states that logits alone do not give"
        wide = len(s.head.mid) > MOST_RANK
        return f"the draft head's rank is above {MOST_RANK}" if wide else ""
    drafts = s.fresh in FRESH and (s.q is not None or s.fresh == "given")
    return "" if drafts or plan.sizes.nodes == 1 else f"fresh drafts are {s.fresh}"


def _unknown(plan: StepPlan, target: TargetModel) -> str:
    """Say why a pass of the target cannot be done from its plan; empty where it can."""
    layout, stack = target.cache.layout, target.stack
    blocks = stack.blocks
    matrices = [m for b in blocks for m in (b.wqkv, b.wo, b.w13, b.w2)] + [stack.head]
    # What no kernel of ours multiplies is the reference's, module by module.
    if any(isinstance(one.packed, Rounded) for one in matrices):
        return "quantized weights have no kernel here"
    if plan.sizes.own_prompts:
        return "rows have prompts of their own"
    plain = all(b.heads == layout.heads for b in blocks) and layout.head_major and not target.taps
    return "" if plain else "the target's blocks, cache or taps have another form"


def fused_step(ops: Any, plan: StepPlan, cores: int = 1) -> FusedStep:
    """Return a plan's step, or what follows its pass (:meth:`.Capture.fused_step`).

    ``plan``: one that :func:`explain_refusal` says nothing of. ``ops`` filters; for a plan with a target
    it is the backend, with the stages of :mod:`.layers`. ``cores``: the card's multiprocessors.
    """
    source, guesses, last = plan.source, None, plan.sizes.tokens - 1
    assert isinstance(source, NoDrafts | WindowPlan)
    if isinstance(source, WindowPlan) and source.head is not None:
        guesses = Guesses(plan.buffers, source, plan.sizes.nodes, last)
        source = guesses.rest
    advance = Advance(plan.buffers, source, plan.sizes.nodes, last)

    def after(logits: Tensor | None = None) -> bool:
        if logits is None or logits.dtype != plan.buffers.quality_loss.dtype:
            return False
        advance(ops.filter(logits, plan.filter))
        return True

    if plan.target is not None:
        return FusedStep(_whole(ops, plan, plan.target, after, guesses, cores))
    return FusedStep(after)


def _whole(
    ops: layers.Ops,
    plan: StepPlan,
    target: TargetModel,
    after: Step,
    guesses: Guesses | None,
    cores: int,
) -> Step:
    """Return the whole step: what stands before the pass in one kernel, the blocks, what follows it."""
    at, b, stack, layout = plan.sizes, plan.buffers, target.stack, target.cache.layout
    rotary, room = (target.cos, target.sin), at.slots - at.prefix - 1

    def step(logits: Tensor | None = None) -> bool:
        with ops.phase("verify"):
            begun = enter(
                b.tokens, b.length, b.prefix_mask, stack.embedding, rotary, at.nodes, at.branches,
                room, layout.capacity, layout.heads,
            )  # fmt: skip
            mask = begun.mask.expand(at.rows, -1, -1, -1)
            here = Pass(begun.cos, begun.sin, mask, target.cache, begun.address)
            x = layers.run_stack(ops, cores, stack, begun.x, here)
            given = ops.linear(x, stack.head.packed, stack.head.bias, sums=True)
            found = ops.guide(
                given, begun.following, target.scale, target.image_scale, target.penalties
            )
        with ops.phase("accept"):
            if guesses is None:
                return after(found)
            noted = guesses.changed_buffers()
            done = after(found)
        with ops.phase("commit"):
            guesses(noted, ops.guide(x.float(), begun.following, target.scale))
        return done

    return step
