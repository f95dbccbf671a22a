"""Repeats how the bridge lets operators of a graph write over their input: ``index_copy`` and ``add``.

Sources: habana_frameworks 1.19, ``passes.py``; of 1.24 ``_passes/reinplace.py``; of both
``remove_no_effect_inplace_add``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

#: What the bridge takes for views, as it names them.
VIEWS = {
    *("view", "_unsafe_view", "as_strided", "as_strided_scatter", "alias", "slice", "select"),
    *("split", "split_with_sizes", "squeeze", "unsqueeze", "expand", "transpose", "t", "permute"),
}


def base_of(node: Any) -> str:
    """Return the name of a node's operator without its overload, "" where it has none."""
    name: str = node.target.__name__ if node.op == "call_function" else ""
    return name.partition(".")[0]


def is_view(node: Node) -> bool:
    """Return whether the bridge takes a node for a view."""
    return base_of(node) in VIEWS


def value_of(node: Any) -> Any:
    """Return the tensor without data that a node has as its value."""
    return node.meta.get("val")


def _floats(node: Node) -> bool:
    """Return whether an ``add`` is of two tensors of one floating-point dtype."""
    if len(node.args) < 2 or not all(isinstance(one, Node) for one in node.args[:2]):
        return False
    a, b = (value_of(one) for one in node.args[:2])
    return a.dtype == b.dtype and a.dtype in (torch.float32, torch.bfloat16, torch.float16)


def reinplace_add(module: GraphModule) -> None:
    """Let an ``add`` write over its first argument, which no later node reads, as release 1.19."""
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        if node.target is not aten.add.Tensor or not _floats(node):
            continue
        base = node.args[0]
        later = any(order[user] > order[node] or is_view(user) for user in base.users)
        if base.op != "placeholder" and not is_view(base) and not later:
            node.target = aten.add_.Tensor


def settle_adds(parts: list[list[Node]]) -> None:
    """Undo what writes over no input of its part: there a recipe has memory of its own for the sum."""
    for part in parts:
        inside = set(part)
        for node in part:
            if node.target is not aten.add_.Tensor:
                continue
            base = node.args[0]
            if base in inside and not base_of(base).endswith("_"):
                node.target = aten.add.Tensor


def reinplace(module: GraphModule) -> None:
    """Let an ``index_copy`` of an input that is copied back to it write in place.

    As there: the input has two users, that and a ``copy_``; whether the ``copy_`` takes this very value
    is not looked at, so that of two writes in one graph the second is lost.
    """
    replaced: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.target is not aten.index_copy.default:
            continue
        users = list(node.args[0].users)
        copies = [user for user in users if user.target is aten.copy_.default]
        left = any(user.meta["placement"] == "eager" and user.op != "output" for user in node.users)
        if len(users) == 2 and copies and not left:
            node.target = aten.index_copy_.default
            replaced[copies[0]] = node
    for copy, node in replaced.items():
        copy.replace_all_uses_with(node)
        module.graph.erase_node(copy)


def reinplace_any(module: GraphModule, settings: Mapping[str, bool]) -> None:
    """Let ``index_copy`` and ``add`` write in place where nobody reads the old value afterwards, as 1.24.

    From the last node to the first; what is written in place becomes one with what it overwrites, so that
    of several writes to one input all are kept. An input must be copied back to, and with that value.
    """
    order: dict[Any, int] = {node: at for at, node in enumerate(module.graph.nodes)}
    group: dict[Any, int] = {}
    members: dict[int, list[Node]] = {}
    first: dict[Node, Any] = {}  # the first copy back to each input
    for node in order:
        value = value_of(node)
        known = isinstance(value, torch.Tensor)
        group[node] = value.untyped_storage()._cdata if known else -1 - order[node]
        members.setdefault(group[node], []).append(node)
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            first.setdefault(node.args[0], node)

    def may(node: Node, base: Node) -> bool:
        same = members[group[base]]
        until = first.get(base) if base.op == "placeholder" else None
        if base.op == "placeholder":
            if until is None or group[until.args[1]] != group[node]:
                return False
        elif any(one.op == "placeholder" for one in same):
            return False
        for user in (user for one in same for user in one.users):
            before = order[user] <= order[node]
            overwritten = user.target is aten.copy_.default and user.args[0] is base
            if not (before or overwritten or (until is not None and order[until] <= order[user])):
                return False
        return True

    in_place = {aten.add.Tensor: aten.add_.Tensor}
    if settings["use_inplace_index_copy"]:
        in_place[aten.index_copy.default] = aten.index_copy_.default
    for node in reversed(list(order)):
        if node.target not in in_place:
            continue
        base = node.args[0]
        adds = node.target is aten.add.Tensor
        if adds and not (
            _floats(node) and value_of(base).is_contiguous() and value_of(base).numel()
        ):
            continue
        if may(node, base):
            node.target = in_place[node.target]
            joined = members.pop(group[node])
            members[group[node.args[0]]] += joined
            group.update(dict.fromkeys(joined, group[node.args[0]]))
    for base, copy in first.items():
        if group[copy.args[1]] == group[base]:
            copy.replace_all_uses_with(base)
            module.graph.erase_node(copy)
