"""A step of a tree in one native call, or in four where somebody listens to its phases."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, byref, c_void_p

import torch
from torch import Tensor

from lantern_accel.device.capture import Capture
from lantern_accel.device.plan import DynamicTreePlan, StaticTreePlan, StepPlan
from lantern_accel_cpu.native.kernels import Kernels, lies
from lantern_accel_cpu.native.plans import Owner, check_model, require
from lantern_accel_cpu.native.sampling import filter_of, rule_of
from lantern_accel_cpu.native.structures import TreeStep
from lantern_accel_cpu.native.trunk import address_of, trunk_of

PARTS = ("draft", "verify", "accept", "commit")


def tree_step(
    kernels: Kernels, ops: Capture, plan: StepPlan, tree: StaticTreePlan | DynamicTreePlan
) -> Callable[[Tensor | None], bool]:
    """Return a step of a drafter's tree on buffers that stay; raises Unserved without kernels for it."""
    at, state, target, drafter, drafts = (
        plan.sizes, plan.buffers, plan.target, plan.drafter, tree.buffers,
    )  # fmt: skip
    require(target is not None and drafter is not None, "a tree is taken with both models or not")
    assert target is not None and drafter is not None
    stack, own, dtype = target.stack, drafter.stack, target.cache.layout.dtype
    check_model(plan, dtype)
    owner = Owner()
    described, judged = filter_of(plan.filter, owner), rule_of(plan.rule)
    require(described is not None, "the filter's numbers are not float32 on the CPU")
    require(judged is not None, f"the rule {plan.rule.kind} has no kernel")
    trunk = trunk_of(stack.blocks, target.cache, stack.norm)
    own_trunk = trunk_of(own.blocks, drafter.cache, None)
    norms = [norm.weight for norm in own.tap_norms]
    parts = [own.embedding, drafts.pending_features, *norms]
    parts += [] if own.fc.bias is None else [own.fc.bias]
    here = lies(dtype, *parts) and lies(torch.float32, drafter.cos, drafter.sin)
    require(here, f"the drafter is not all {dtype} on the CPU")
    require(len({norm.eps for norm in own.tap_norms}) <= 1, "its norms have several epsilons")
    images, nodes, depth, vocab = at.images, at.nodes, at.depth, at.vocab
    # Of a dynamic tree the step fills in the links; no level is known before.
    links = {
        n: torch.zeros(images, nodes, dtype=torch.int64) for n in ("first_child", "num_children")
    }
    parents = depths = (0,) * nodes
    inner: tuple[tuple[int, ...], ...] = ()
    top_k = draft_columns = 0
    if isinstance(tree, StaticTreePlan):
        links = {name: getattr(tree, name) for name in (*links, "group")}
        parents, depths, inner, widths = tree.parents, tree.depths, tree.inner, tree.widths
        draft_columns = tree.draft_columns
    else:
        top_k, widths = tree.top_k, (tree.top_k,) * depth
    groups = sum(len(level) for level in inner)
    trunk.given.taps, trunk.given.tap_count = owner.table(target.taps), len(target.taps)
    own_trunk.given.tap_count = 0
    between = {
        "tokens": torch.zeros(images, nodes, dtype=torch.int64),
        "q": torch.zeros(images, groups, vocab),
        "logits": torch.zeros(images, nodes, vocab),
        "states": torch.zeros(at.rows, nodes, drafts.pending_features.shape[-1], dtype=dtype),
        "path": torch.zeros(images, depth + 1, dtype=torch.int64),
        "kept": torch.zeros(images, dtype=torch.int64),
        "bonus": torch.zeros(images, dtype=torch.int64),
        "weights": torch.zeros(images, vocab),
        "quality_losses": torch.zeros(images, depth),
    }
    names = (
        "root", "pending_tokens", "pending_count", "pending_features", "last_path", "slot_of",
        "place_of",
    )  # fmt: skip
    tensors = {**{name: getattr(drafts, name) for name in names}, **links, **between}
    tap_norms = (c_void_p * max(1, len(norms)))(*map(owner, norms))
    owner.held += [trunk, own_trunk, tap_norms, stack.head, own.fc, own.fuse]
    uniforms = state.uniforms
    given = TreeStep(
        target=trunk.given, drafter=own_trunk.given, filter=described, rule=judged,
        embedding=owner(stack.embedding), head=address_of(stack.head, dtype),
        own_embedding=owner(own.embedding), fc=address_of(own.fc, dtype),
        fc_bias=owner.optional(own.fc.bias),
        fuse=None if own.fuse is None else address_of(own.fuse, dtype),
        tap_norms=addressof(tap_norms), cos=owner(target.cos[at.prefix :]),
        sin=owner(target.sin[at.prefix :]), own_cos=owner(drafter.cos[at.prefix - 1 :]),
        own_sin=owner(drafter.sin[at.prefix - 1 :]), prompt=owner(state.prefix_mask),
        scale=owner.optional(target.scale), uniforms=owner.optional(uniforms),
        keys=owner.optional(state.keys), quality_loss=owner(state.quality_loss),
        known=owner(state.tokens), parent=owner.table(parents * images),
        depth_of=owner.table(depths * images),
        inner=owner.table([node for level in inner for node in level]),
        inner_count=owner.table([len(level) for level in inner]),
        widths=owner.table(widths), images=images, nodes=nodes, depth=depth,
        groups=groups, top_k=top_k, image=at.tokens, prefix=at.prefix, vocab=vocab,
        columns=0 if uniforms is None else uniforms.shape[-1],
        draft_columns=draft_columns, image_slots=drafts.slot_of.shape[1],
        ahead=at.slots - at.prefix - at.tokens + 1, own_slots=drafter.slots,
        width=drafts.pending_tokens.shape[1], branches=at.branches, blind=images > 1,
        hides_pads=drafter.hides_pads, tap_eps=own.tap_norms[0].eps if norms else 0.0,
        **{name: owner(tensor) for name, tensor in tensors.items()}, **owner.progress(plan),
    )  # fmt: skip
    if top_k:
        given.q = None  # such drafts are certain
    given.owner, library = owner, kernels.library

    def run(logits: Tensor | None) -> bool:
        kernels.threads()
        if ops.listener is None:
            library.tree_step(byref(given), len(PARTS))
            return True
        for number, name in enumerate(PARTS):
            with ops.phase(name):
                library.tree_step(byref(given), number)
        return True

    return run
