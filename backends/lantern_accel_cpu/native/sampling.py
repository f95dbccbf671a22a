"""Does what follows a pass in one native call each: guidance, filters, draws, and the walk down a tree.

Every function returns None for tensors or rules that it has no kernel for: those go the reference's way.
"""

from __future__ import annotations

from ctypes import Structure, byref

import torch
from torch import Tensor

from lantern_accel.device.plan import AcceptancePlan, DraftedTree
from lantern_accel.device.plan import Filter as StepFilter
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.native.plans import Owner
from lantern_accel_cpu.native.structures import Accept, Filter, Guide, Rule

KINDS = {"exact": 0, "lantern": 1, "lantern++": 2}
RESIDUALS = {"official": 0, "optimal": 1, "aggregate": 2}


def _floats(*tensors: Tensor | None) -> bool:
    """Return whether these are plain float32 tensors on the CPU, on no way to a gradient."""
    return all(
        t is None
        or (
            type(t) is Tensor
            and t.dtype == torch.float32
            and t.device.type == "cpu"
            and not t.requires_grad
        )
        for t in tensors
    )


def filter_of(given: StepFilter, owner: Owner) -> Structure | None:
    """Describe a filter whose numbers stay where they are; what is made for it is ``owner``'s."""
    numbers = [v for v in (given.temperature, given.top_p) if isinstance(v, Tensor)]
    if not _floats(*numbers):
        return None
    top_p = None if given.top_p is None else owner.number(given.top_p)
    return Filter(owner.number(given.temperature), top_p, given.top_k, given.p_first)


def guide(
    kernels: Kernels,
    logits: Tensor,
    token: Tensor,
    scale: Tensor | None,
    image_scale: Tensor | float | None = None,
    penalties: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Return guided logits ``[B, T, V]`` (:meth:`SamplingOps.guide`)."""
    kind, penalty = penalties if penalties is not None else (None, None)
    if not _floats(logits, scale, penalty) or token.dtype != torch.int64:
        return None
    if type(token) is not Tensor or (kind is not None and kind.dtype != torch.int64):
        return None
    images = len(token)
    branches = logits.shape[0] // images
    if scale is None:
        if penalty is None:
            return logits
        branches, images = 1, logits.shape[0]
        if images != len(token):
            return None
    elif branches != (2 if image_scale is None else 3):
        return None
    owner = Owner()
    logits, token = logits.contiguous(), token.contiguous()
    _, count, vocab = logits.shape
    out = logits.new_empty((images, count, vocab))
    given = Guide(
        logits=logits.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        image_scale=None if image_scale is None else owner.number(image_scale),
        penalty=None if penalty is None else penalty.data_ptr(),
        token=token.data_ptr(),
        kind=None if kind is None else kind.data_ptr(),
        out=out.data_ptr(),
        images=images,
        count=count,
        vocab=vocab,
        branches=branches,
        whole_image=token.dim() == 1,
    )
    kernels.library.guide(byref(given))
    return out


def filter(
    kernels: Kernels, logits: Tensor, given: StepFilter, tables: object | None = None
) -> Tensor | None:
    """Return the probabilities ``[..., V]`` that a filter makes of logits."""
    owner = Owner()
    described = filter_of(given, owner) if _floats(logits) and logits.numel() else None
    if described is None:
        return None
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    vocab = logits.shape[-1]
    kernels.library.filter(
        byref(described), logits.data_ptr(), logits.numel() // vocab, vocab, out.data_ptr()
    )
    return out


def sample(
    kernels: Kernels, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None
) -> Tensor | None:
    """Sample codes of the shape of ``uniforms`` from ``[..., V]`` (:meth:`SamplingOps.sample`)."""
    if not _floats(weights, uniforms) or not weights.numel() or not uniforms.numel():
        return None
    alone = uniforms.dim() < weights.dim()
    rows = uniforms.shape if alone else uniforms.shape[:-1]
    if weights.shape[:-1] != rows:
        return None
    weights, uniforms = weights.contiguous(), uniforms.contiguous()
    out = torch.empty(uniforms.shape, dtype=torch.int64)
    vocab, count = weights.shape[-1], 1 if alone else uniforms.shape[-1]
    kernels.library.draw(
        weights.data_ptr(), uniforms.data_ptr(), weights.numel() // vocab, vocab, count,
        out.data_ptr(),
    )  # fmt: skip
    return out


def likeliest(
    kernels: Kernels, weights: Tensor, count: int, luck: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the likeliest codes of weights ``[B, T, V]`` (:meth:`SamplingOps.likeliest`)."""
    if not _floats(weights, luck) or not weights.numel():
        return None
    images, each, vocab = weights.shape
    if luck is not None:
        if luck.shape != (images, 1, vocab):
            return None
        luck = luck.contiguous()
    weights = weights.contiguous()
    codes = torch.empty((images, each, count), dtype=torch.int64)
    scores = torch.empty((images, each, count))
    kernels.library.likeliest(
        weights.data_ptr(),
        None if luck is None else luck.data_ptr(),
        images * each,
        each,
        vocab,
        count,
        codes.data_ptr(),
        scores.data_ptr(),
    )
    return scores, codes


def rule_of(rule: AcceptancePlan) -> Structure | None:
    """Describe a rule of one of the papers' kinds."""
    table, params = rule.neighbours, rule.params
    kind = KINDS.get(rule.kind)
    if kind is None or (kind and (table is None or params is None)):
        return None
    # A budget is used by what the whole of q leaves, which the kernel does not look at.
    if rule.budget is not None or not _floats(params):
        return None
    given = Rule(kind=kind, residual=RESIDUALS[rule.residual], k=rule.k)
    if params is not None and kind:
        given.rule_param = params.data_ptr()
    if table is not None:
        if table.dtype != torch.int32 or table.stride(1) != 1 or table.device.type != "cpu":
            return None
        given.neighbours = table.data_ptr()
        given.neighbour_stride, given.neighbour_width = table.stride(0), table.shape[1]
    return given


def accept(
    kernels: Kernels,
    tree: DraftedTree,
    logits: Tensor,
    given: StepFilter,
    rule: AcceptancePlan,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    masked: bool,
) -> tuple[Tensor, ...] | None:
    """Walk down a tree (:meth:`SamplingOps.accept`); return the fields of an ``Accepted``."""
    if not _floats(logits, tree.q, uniforms, bonus_uniform):
        return None
    tables = (tree.tokens, tree.first_child, tree.num_children, tree.group)
    if any(one is not None and one.dtype != torch.int64 for one in tables):
        return None
    owner = Owner()
    described, judged = filter_of(given, owner), rule_of(rule)
    if described is None or judged is None or type(tree.tokens) is not Tensor:
        return None
    if tree.q is not None and tree.group is None:
        return None

    def whole(tensor: Tensor) -> int:
        return owner(tensor.contiguous())

    images, nodes, vocab = logits.shape
    depth = len(tree.max_children)
    if uniforms.stride(-1) != 1:
        uniforms = uniforms.contiguous()
    path = torch.empty((images, depth + 1), dtype=torch.int64)
    length, bonus = (torch.empty(images, dtype=torch.int64) for _ in range(2))
    weights, quality_loss = logits.new_empty((images, vocab)), logits.new_empty((images, depth))
    call = Accept(
        filter=described,
        rule=judged,
        logits=whole(logits),
        tokens=whole(tree.tokens),
        first_child=whole(tree.first_child),
        num_children=whole(tree.num_children),
        uniforms=uniforms.data_ptr(),
        bonus_uniform=bonus_uniform.data_ptr(),
        widths=owner.table(tree.max_children),
        path=path.data_ptr(),
        length=length.data_ptr(),
        bonus=bonus.data_ptr(),
        weights=weights.data_ptr(),
        quality_loss=quality_loss.data_ptr(),
        images=images,
        nodes=nodes,
        vocab=vocab,
        uniform_stride=uniforms.stride(0),
        bonus_stride=bonus_uniform.stride(0),
        depth=depth,
        masked=masked,
    )
    if tree.q is not None and tree.group is not None:
        call.q, call.group, call.groups = whole(tree.q), whole(tree.group), tree.q.shape[1]
    kernels.library.accept(byref(call))
    return path, length, bonus, weights, quality_loss
