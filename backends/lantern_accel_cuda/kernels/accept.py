"""The walk down a tree in one Triton kernel: tests, residuals and the token after the path.

One program serves an image and follows the children that are kept; the arithmetic is that of
:mod:`lantern_accel.decoding.accept`, step by step. The rows are filtered before it, all at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel.device.plan import AcceptancePlan, DraftedTree, Filter
from lantern_accel_cuda.kernels import rows, sampling
from lantern_accel_cuda.kernels.operators import operator
from lantern_accel_cuda.kernels.rows import pick

KINDS = {"exact": 0, "lantern": 1, "lantern++": 2}
#: Codes that a program takes at once: more would not stay in its registers.
BLOCK = 2048
#: Neighbours that a program holds at once.
MOST_NEAR = 4096
#: Smaller sums of weights than this are taken for nothing.
TINY = tl.constexpr(2.0**-126)


@triton.jit
def _copy(source, to, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    tl.debug_barrier()
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < SIZE, other=0.0), mask=at < SIZE)
    tl.debug_barrier()


@triton.jit
def _residual_mass(p, q, SIZE: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of ``max(0, p - q)``, of p alone where drafts are certain."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(p + at, mask=at < SIZE, other=0.0)
        if DRAWN:
            w = tl.maximum(w - tl.load(q + at, mask=at < SIZE, other=0.0), 0.0)
        mass += w
    return tl.sum(mass, 0)


@triton.jit
def _normalise(p, q, total, SIZE: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``max(0, p - q) / total`` over p."""
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(p + at, mask=at < SIZE, other=0.0)
        if DRAWN:
            w = tl.maximum(w - tl.load(q + at, mask=at < SIZE, other=0.0), 0.0)
        tl.store(p + at, tl.div_rn(w, total), mask=at < SIZE)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["nodes", "groups", "depth", "k", "uniform_stride", "bonus_stride"])
def _walk(
    probs, q_rows, tokens, first_child, num_children, tests, group, neighbours, rule_param,
    uniforms, bonus_uniform, path, length, bonus, weights, spare, quality_loss,
    nodes, groups, depth, k, near_stride, uniform_stride, bonus_stride,
    SIZE: tl.constexpr, KIND: tl.constexpr, AGGREGATE: tl.constexpr, DRAWN: tl.constexpr,
    NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    probs += image * nodes * SIZE
    q_rows += image * groups * SIZE
    p = weights + image * SIZE
    q = spare + image * SIZE
    tokens += image * nodes
    first_child += image * nodes
    num_children += image * nodes
    tests += image * nodes
    group += image * nodes
    uniforms += image * uniform_stride
    path += image * (depth + 1)
    quality_loss += image * depth
    order = tl.arange(0, NEAR)
    node = tl.full([], 0, tl.int32)
    alive = tl.full([], 1, tl.int32)
    steps = tl.full([], 0, tl.int32)
    tl.store(path, node.to(path.dtype.element_ty))
    _copy(probs, p, SIZE, BLOCK)
    for d in range(depth):
        count = tl.load(num_children + node).to(tl.int32) * alive
        first = tl.load(first_child + node).to(tl.int32)
        slot = tl.load(tests + node).to(tl.int32)
        if DRAWN:  # noqa: SIM102 (known when the kernel is compiled)
            if count > 0:
                _copy(q_rows + tl.load(group + node).to(tl.int64) * SIZE, q, SIZE, BLOCK)
        chosen = node
        taken = tl.full([], 0, tl.int32)
        paid = tl.full([], 0.0, tl.float32)
        c = tl.full([], 0, tl.int32)
        while (c < count) & (taken == 0):
            x = tl.load(tokens + first + c).to(tl.int32)
            u = tl.load(uniforms + slot + c)
            px = tl.load(p + x)
            qx = tl.full([], 1.0, tl.float32)
            if DRAWN:
                qx = tl.load(q + x)
            mass = px
            near = tl.zeros([NEAR], tl.int32)
            lent = tl.zeros([NEAR], tl.float32)
            counts = order < 0
            if KIND > 0:
                near = tl.load(
                    neighbours + x.to(tl.int64) * near_stride + order, mask=order < k, other=0
                ).to(tl.int32)
                lent = tl.load(p + near, mask=order < k, other=0.0)
                bound = tl.load(rule_param) if KIND == 1 else (tl.load(rule_param) - 1.0) * px
                running = tl.cumsum(lent, 0)
                inside = (running <= bound) & (order < k)
                counts = order < tl.sum(inside.to(tl.int32), 0)
                mass = px + tl.max(tl.where(inside, running, 0.0), 0)
            if qx > 0:
                divisor = tl.maximum(qx, TINY)
                keeps = tl.minimum(tl.div_rn(mass, divisor), 1.0)
                if KIND > 0:
                    paid += keeps - tl.minimum(tl.div_rn(px, divisor), 1.0)
                kept = u * qx <= mass
                chosen = tl.where(kept, first + c, chosen)
                taken = tl.where(kept, 1, taken)
                if taken == 0:
                    # What the target wants in the place of what was rejected, to p.
                    tl.debug_barrier()
                    if AGGREGATE and KIND > 0:
                        tl.store(p + near, tl.zeros([NEAR], tl.float32), mask=counts)
                        tl.debug_barrier()
                    at_x = px
                    if AGGREGATE:
                        at_x = mass
                    if not DRAWN:
                        at_x = tl.maximum(at_x - (1.0 if AGGREGATE else tl.minimum(mass, 1.0)), 0.0)
                    tl.store(p + x, at_x)
                    tl.debug_barrier()
                    total = _residual_mass(p, q, SIZE, DRAWN, BLOCK)
                    tl.debug_barrier()
                    if total > 0:
                        _normalise(p, q, tl.maximum(total, TINY), SIZE, DRAWN, BLOCK)
                    else:
                        # Nothing is left: p stays what it was.
                        tl.store(p + x, px)
                        tl.debug_barrier()
                        if AGGREGATE and KIND > 0:
                            tl.store(p + near, lent, mask=counts)
                        tl.debug_barrier()
                    if DRAWN:
                        tl.store(q + x, 0.0)
                        tl.debug_barrier()
                        rest = _residual_mass(q, q, SIZE, False, BLOCK)
                        tl.debug_barrier()
                        if rest > 0:
                            _normalise(q, q, tl.maximum(rest, TINY), SIZE, False, BLOCK)
            c += 1
        tl.store(quality_loss + d, paid)
        alive = taken
        node = chosen
        steps += alive
        tl.store(path + d + 1, node.to(path.dtype.element_ty))
        if alive > 0:
            _copy(probs + node.to(tl.int64) * SIZE, p, SIZE, BLOCK)
    tl.store(length + image, steps.to(length.dtype.element_ty))
    nothing = tl.full([1], -1, tl.int32)
    code = pick(p, tl.load(bonus_uniform + image * bonus_stride), nothing, SIZE, BLOCK)
    tl.store(bonus + image, code.to(bonus.dtype.element_ty))


def _results(probs: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, ...]:
    images = len(probs)
    path = tokens.new_empty(images, depth + 1)
    length, bonus = tokens.new_empty(images), tokens.new_empty(images)
    return (
        path,
        length,
        bonus,
        probs.new_empty(images, probs.shape[-1]),
        probs.new_empty(images, depth),
    )


@operator(
    "walk(Tensor probs, Tensor? q, Tensor tokens, Tensor first_child, Tensor num_children, Tensor tests,"
    " Tensor? group, Tensor? neighbours, Tensor? rule_param, Tensor uniforms, Tensor bonus_uniform,"
    " int depth, int k, int kind, bool aggregate) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda probs, q, tokens, *rest: _results(probs, tokens, rest[8]),
)
def _launch_walk(
    probs: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    first_child: Tensor,
    num_children: Tensor,
    tests: Tensor,
    group: Tensor | None,
    neighbours: Tensor | None,
    rule_param: Tensor | None,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    depth: int,
    k: int,
    kind: int,
    aggregate: bool,
) -> tuple[Tensor, ...]:
    found = _results(probs, tokens, depth)
    path, length, bonus, weights, quality_loss = found
    images, nodes, size = probs.shape
    spare = torch.empty_like(weights)
    with torch.cuda.device_of(probs):
        _walk[(images,)](
            probs, probs if q is None else q, tokens, first_child, num_children, tests,
            tokens if group is None else group, tokens if neighbours is None else neighbours,
            probs if rule_param is None else rule_param, uniforms, bonus_uniform, path, length, bonus,
            weights, spare, quality_loss,
            nodes, 0 if q is None else q.shape[1], depth, k,
            0 if neighbours is None else neighbours.stride(0),
            uniforms.stride(0), bonus_uniform.stride(0),
            SIZE=size, KIND=kind, AGGREGATE=aggregate, DRAWN=q is not None,
            NEAR=triton.next_power_of_2(max(k, 1)) if kind else 1,
            BLOCK=min(rows.block_of(size), BLOCK), num_warps=rows.WARPS,
        )  # fmt: skip
    return found


def accept(
    tree: DraftedTree,
    logits: Tensor,
    given: Filter,
    rule: AcceptancePlan,
    uniforms: Tensor,
    bonus_uniform: Tensor,
) -> tuple[Tensor, ...] | None:
    """Walk down a tree (:meth:`SamplingOps.accept`); return the fields of an ``Accepted``.

    ``rule``: of :data:`KINDS`, without a budget, and not with the official residual. None: not served.
    """
    k, kind = rule.k, KINDS[rule.kind] if rule.relaxed else 0
    if kind and (
        rule.params is None
        or not 0 < k <= MOST_NEAR
        or rule.neighbours is None
        or rule.neighbours.stride(1) != 1
    ):
        return None
    if not sampling.plain(logits, tree.q, uniforms if tree.max_children else None, bonus_uniform):
        return None
    if tree.q is not None and tree.group is None:
        return None
    probs = sampling.filter(logits, given)
    if probs is None:
        return None
    tables = (tree.tokens, tree.first_child, tree.num_children, tree.first_tests)
    tokens, first, count, tests = (table.contiguous() for table in tables)
    if uniforms.stride(-1) != 1:
        uniforms = uniforms.contiguous()
    return _launch_walk(
        probs,
        None if tree.q is None else tree.q.contiguous(),
        tokens,
        first,
        count,
        tests,
        None if tree.group is None else tree.group.contiguous(),
        rule.neighbours if kind else None,
        rule.params if kind else None,
        uniforms,
        bonus_uniform,
        len(tree.max_children),
        k,
        kind,
        rule.residual == "aggregate",
    )
