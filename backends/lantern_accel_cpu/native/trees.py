"""A step of a tree in one native call, or in four where somebody listens to its phases."""

from __future__ import annotations

from ctypes import addressof, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DynamicTree, FusedStep, Sizes, StaticTree, StepPlan
from lantern_accel_cpu.native.kernels import Kernels, lies, takes
from lantern_accel_cpu.native.library import byref
from lantern_accel_cpu.native.sampling import filter_of, rule_of
from lantern_accel_cpu.native.structures import TreeStep, table
from lantern_accel_cpu.native.trunk import address_of, trunk_of

PARTS = ("draft", "verify", "accept", "commit")


@dataclass(frozen=True)
class _Shape:
    """What is known of a tree before it is drafted.

    ``links``: of every node its first child, how many it has and, with a known shape, the group that they
    are, int64 ``[B, T]``, which a dynamic tree's step fills in; ``parents, depths [T]``; ``inner``: nodes
    with children, by level; ``widths``: the most children of a level's nodes; ``top_k``: a dynamic
    tree's, else 0; ``draft_columns``: uniforms that drafts are drawn with.
    """

    links: dict[str, Tensor]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    draft_columns: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, tree: StaticTree | DynamicTree, at: Sizes) -> _Shape:
        """Return the shape of a plan's tree."""
        if isinstance(tree, StaticTree):
            links = {"first_child": tree.first_child, "num_children": tree.num_children}
            links["group"] = tree.group
            return cls(
                links, tree.parents, tree.depths, tree.inner, tree.widths, tree.draft_columns
            )
        names, nothing = ("first_child", "num_children"), (0,) * at.nodes
        links = {n: torch.zeros(at.images, at.nodes, dtype=torch.int64) for n in names}
        return cls(links, nothing, nothing, (), (tree.top_k,) * at.depth, top_k=tree.top_k)


def tree_step(
    kernels: Kernels, ops: TensorOps, plan: StepPlan, tree: StaticTree | DynamicTree
) -> FusedStep | None:
    """Return a step of a drafter's tree (:meth:`.TensorOps.fused_step`), on buffers that stay."""
    at, state, target, drafter = plan.sizes, plan.buffers, plan.target, plan.drafter
    if target is None or drafter is None or at.own_prompts:
        return None
    if target.image_scale is not None or target.penalties is not None:
        return None
    stack, own, scale, dtype = target.stack, drafter.stack, target.scale, target.cache.layout.dtype
    if (scale is None) != (at.branches == 1) or stack.head.bias is not None:
        return None
    matrices = [stack.head, own.fc, *([] if own.fuse is None else [own.fuse])]
    if not all(takes(matrix.packed, dtype) for matrix in matrices):
        return None
    held: list[Tensor] = []
    described, judged = filter_of(plan.filter, held), rule_of(plan.rule)
    trunk = trunk_of(stack.blocks, target.cache, stack.norm)
    own_trunk = trunk_of(own.blocks, drafter.cache, None)
    if described is None or judged is None or trunk is None or own_trunk is None:
        return None
    biases = [] if own.fc.bias is None else [own.fc.bias]
    norms = [norm.weight for norm in own.tap_norms]
    if not lies(dtype, stack.embedding, own.embedding, stack.norm.weight, *biases, *norms):
        return None
    ropes, drafts = (target.cos, target.sin, drafter.cos, drafter.sin), tree.buffers
    shape = _Shape.of(tree, at)
    floats = [*ropes, state.price, *([] if state.uniforms is None else [state.uniforms])]
    floats += [] if scale is None else [scale]
    ints = {
        "length": state.length, "known": state.tokens, "step": state.step, "steps": state.steps,
        "histogram": state.histogram, "last_length": state.last_length, "finite": state.finite,
        "report": state.report, "root": drafts.root, "pending_tokens": drafts.pending_tokens,
        "pending_count": drafts.pending_count, "last_path": drafts.last_path,
        "slot_of": drafts.slot_of, "place_of": drafts.place_of, **shape.links,
    }  # fmt: skip
    if not lies(torch.float32, *floats) or not lies(torch.int64, *ints.values()):
        return None
    if not lies(dtype, drafts.pending_features) or len({norm.eps for norm in own.tap_norms}) > 1:
        return None
    tables: list[object] = []

    def array(values: list[int] | tuple[int, ...]) -> int:
        return table(values, tables)

    images, nodes, depth, vocab = at.images, at.nodes, at.depth, at.vocab
    groups = sum(len(level) for level in shape.inner)
    trunk.given.taps, trunk.given.tap_count = array(target.taps), len(target.taps)
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
        "prices": torch.zeros(images, depth),
    }
    cos, sin = (t[at.prefix :] for t in ropes[:2])
    own_cos, own_sin = (t[at.prefix - 1 :] for t in ropes[2:])
    tap_norms = (c_void_p * max(1, len(norms)))(*(norm.data_ptr() for norm in norms))
    uniforms = state.uniforms
    given = TreeStep(
        target=trunk.given, drafter=own_trunk.given, filter=described, rule=judged,
        embedding=stack.embedding.data_ptr(), head=address_of(stack.head),
        own_embedding=own.embedding.data_ptr(), fc=address_of(own.fc),
        fc_bias=None if own.fc.bias is None else own.fc.bias.data_ptr(),
        fuse=None if own.fuse is None else address_of(own.fuse), tap_norms=addressof(tap_norms),
        cos=cos.data_ptr(), sin=sin.data_ptr(), own_cos=own_cos.data_ptr(),
        own_sin=own_sin.data_ptr(), prompt=state.prefix_mask.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        pending_features=drafts.pending_features.data_ptr(),
        uniforms=None if uniforms is None else uniforms.data_ptr(),
        keys=None if state.keys is None else state.keys.data_ptr(),
        price=state.price.data_ptr(), holds=state.holds.data_ptr(),
        parent=array(shape.parents * images), depth_of=array(shape.depths * images),
        inner=array([node for level in shape.inner for node in level]),
        inner_count=array([len(level) for level in shape.inner]),
        widths=array(shape.widths), images=images, nodes=nodes, depth=depth,
        groups=groups, top_k=shape.top_k, image=at.tokens, prefix=at.prefix, vocab=vocab,
        columns=0 if uniforms is None else uniforms.shape[-1],
        draft_columns=shape.draft_columns, image_slots=drafts.slot_of.shape[1],
        ahead=at.slots - at.prefix - at.tokens + 1, own_slots=drafter.slots,
        width=drafts.pending_tokens.shape[1], branches=at.branches, blind=images > 1,
        hides_pads=drafter.hides_pads, tap_eps=own.tap_norms[0].eps if norms else 0.0,
        **{name: t.data_ptr() for name, t in (ints | between).items()},
    )  # fmt: skip
    if shape.top_k:
        given.q = None  # such drafts are certain
    keep = (
        plan,
        held,
        shape,
        tables,
        trunk,
        own_trunk,
        between,
        cos,
        sin,
        own_cos,
        own_sin,
        tap_norms,
    )
    library = kernels.library

    def run(logits: Tensor | None = None) -> bool:
        assert keep
        kernels.threads()
        if ops.listener is None:
            library.tree_step(byref(given), len(PARTS))
            return True
        for number, name in enumerate(PARTS):
            with ops.phase(name):
                library.tree_step(byref(given), number)
        return True

    return run
