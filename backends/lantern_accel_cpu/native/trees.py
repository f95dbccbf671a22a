"""A step of a static tree in four native calls, one a phase."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_int32, c_void_p
from typing import Any

import torch

from lantern_accel_cpu.native.kernels import Kernels, lies, takes
from lantern_accel_cpu.native.library import TreeStep, Trunk, byref
from lantern_accel_cpu.native.sampling import filter_of, rule_of
from lantern_accel_cpu.native.trunk import PlannedCache, plan_of

PARTS = ("draft", "verify", "accept", "commit")


def _packed(dtype: torch.dtype, *projections: Any) -> bool:
    return all(takes(p.packed, dtype) for p in projections)


def _blocks(stack: Any, kv: Any, held: list[Any]) -> Trunk | None:
    """Describe a stack's blocks over its cache; None where the native trunk does not take them."""
    plan = plan_of(stack.blocks, kv) if isinstance(kv, PlannedCache) else None
    if plan is None:
        return None
    plan.last_norm(getattr(stack, "norm", None))
    held.append(plan)
    return Trunk.from_buffer_copy(plan.given)


def tree_step(kernels: Kernels, ops: Any, engine: Any) -> Callable[[], bool] | None:
    """Return a step of a static tree (:meth:`TensorOps.tree_step`), on buffers that stay."""
    drafting, v, g = engine.drafting, engine.verifying, engine.geometry
    if engine.greedy or drafting is None or drafting.tables is None or g.own_prompts:
        return None
    target, drafter, state, sound = v.target, drafting.drafter, engine.state, engine.sound
    stack, own = getattr(target, "stack", None), getattr(drafter, "stack", None)
    if stack is None or own is None or target.ops is not ops or drafter.ops is not ops:
        return None
    guidance, tables, dtype = v.guidance, drafting.tables, v.cache.layout.dtype
    scale = guidance.scale
    if guidance.image_scale is not None or guidance.allowed is not None:
        return None
    if (scale is None) != (g.branches == 1) or stack.head.bias is not None:
        return None
    fuse = [] if own.fuse is None else [own.fuse]
    if not _packed(dtype, stack.head, own.fc, *fuse):
        return None
    held: list[Any] = []
    described, judged = filter_of(engine.filters.given, held), rule_of(engine.rule)
    trunks = _blocks(stack, v.cache, held), _blocks(own, drafting.cache, held)
    biases = [own.fc.bias] if own.fc.bias is not None else []
    norms = [norm.weight for norm in own.tap_norms]
    tables_ok = lies(dtype, stack.embedding, own.embedding, stack.norm.weight, *biases, *norms)
    ropes = (target.rope_cos, target.rope_sin, drafter.rope_cos, drafter.rope_sin)
    floats = (
        *ropes,
        state.price,
        *([] if g.keyed else [state.uniforms]),
        *([] if scale is None else [scale]),
    )
    ints = {
        name: getattr(state, name)
        for name in (
            "length", "root", "pending_tokens", "pending_count", "step", "steps", "histogram",
            "last_path", "last_length", "slot_of", "place_of",
        )
    } | {"known": state.tokens, "sound": sound.count, "report": sound.report}  # fmt: skip
    topology = {n: drafting.topology[n] for n in ("first_child", "num_children", "group")}
    ints |= topology
    if (
        described is None
        or judged is None
        or trunks[0] is None
        or trunks[1] is None
        or not tables_ok
    ):
        return None
    if not lies(torch.float32, *floats) or not lies(torch.int64, *ints.values()):
        return None
    if not lies(dtype, state.pending_features) or any(
        n.eps != own.tap_norms[0].eps for n in own.tap_norms
    ):
        return None

    def table(values: list[int]) -> Any:
        made = (c_int32 * max(1, len(values)))(*values)
        held.append(made)
        return made

    images, nodes, depth, vocab = g.batch, tables.nodes, tables.max_depth, g.vocab
    taps = table(list(v.taps))
    trunks[0].taps, trunks[0].tap_count = taps, len(v.taps)
    trunks[1].tap_count = 0
    wide = (len(v.taps) + 1) * g.dim
    between = {
        "tokens": torch.zeros(images, nodes, dtype=torch.int64),
        "q": torch.zeros(images, tables.groups, vocab),
        "logits": torch.zeros(images, nodes, vocab),
        "states": torch.zeros(g.rows, nodes, wide, dtype=dtype),
        "path": torch.zeros(images, depth + 1, dtype=torch.int64),
        "kept": torch.zeros(images, dtype=torch.int64),
        "bonus": torch.zeros(images, dtype=torch.int64),
        "weights": torch.zeros(images, vocab),
        "prices": torch.zeros(images, depth),
    }
    cos, sin = (t[g.prefix :] for t in ropes[:2])
    own_cos, own_sin = (t[g.prefix - 1 :] for t in ropes[2:])
    tap_norms = (c_void_p * max(1, len(norms)))(*(norm.data_ptr() for norm in norms))
    given = TreeStep(
        target=trunks[0], drafter=trunks[1], filter=described, rule=judged,
        embedding=stack.embedding.data_ptr(), head=stack.head.packed.address,
        own_embedding=own.embedding.data_ptr(), fc=own.fc.packed.address,
        fc_bias=None if own.fc.bias is None else own.fc.bias.data_ptr(),
        fuse=None if own.fuse is None else own.fuse.packed.address, tap_norms=addressof(tap_norms),
        cos=cos.data_ptr(), sin=sin.data_ptr(), own_cos=own_cos.data_ptr(),
        own_sin=own_sin.data_ptr(), prompt=state.prefix_mask.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        pending_features=state.pending_features.data_ptr(),
        uniforms=None if g.keyed else state.uniforms.data_ptr(),
        keys=state.keys.data_ptr() if g.keyed else None,
        price=state.price.data_ptr(), holds=sound.holds.data_ptr(),
        parent=table(tables.parents), depth_of=table(tables.depths),
        inner=table([node for level in tables.inner for node in level]),
        inner_count=table([len(level) for level in tables.inner]),
        widths=table(list(tables.max_children)), images=images, nodes=nodes, depth=depth,
        groups=tables.groups, image=g.tokens, prefix=g.prefix, vocab=vocab,
        columns=state.uniforms.shape[-1],
        draft_columns=g.draft_columns, image_slots=state.slot_of.shape[1], own_slots=g.drafter_slots,
        width=state.pending_tokens.shape[1],
        branches=g.branches, blind=ops.skips_blind and images > 1,
        hides_pads=bool(drafter.config.mask_padding),
        tap_eps=own.tap_norms[0].eps if norms else 0.0,
        **{name: t.data_ptr() for name, t in (ints | between).items()},
    )  # fmt: skip
    keep = (held, stack, own, between, ints, floats, cos, sin, own_cos, own_sin, tap_norms, norms)
    library = kernels.library

    def run() -> bool:
        if v.guidance is not guidance or engine.accounting != "bound":
            return False
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
