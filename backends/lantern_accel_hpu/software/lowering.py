"""Repeats what the bridge does to a graph between AOT autograd and its own compiler, as far as published.

Placement, the pass that makes ``index_copy`` write in place, the one that makes ``linear`` of a product
with a transposed matrix, partitions where the graph is left, the pass that moves writes of state between
partitions, and the order in which torch's fuser lists a partition's nodes. The result is one flat graph
in the order in which a Gaudi would run it, so that whatever these passes lose or reorder shows in the
numbers. Sources: habana_frameworks 1.19, ``passes.py``, ``partitioner.py``, ``shared_layer.py`` of its
``dynamo/compile_backend``; torch's ``fuser_utils.py``. For 1.24, whose setting ``use_generic_reinplacer``
tells it apart: its ``_passes/reinplace.py``, and that it sorts a graph before it parts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupport

from lantern_accel_hpu import operators

aten = torch.ops.aten


def lower(
    module: GraphModule, settings: Mapping[str, bool], inputs: Sequence[Any] = ()
) -> GraphModule:
    """Return the graph as the bridge would run it; raises AssertionError where it may not be left.

    An input that is a broadcast view (stride 0) is refused: what a recipe reads must lie in memory.
    """
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for name, one in zip(names, inputs, strict=False):
        if isinstance(one, torch.Tensor):
            pairs = zip(one.shape, one.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in pairs):
                raise AssertionError(
                    f"the input {name}, {list(one.shape)}, has a stride of 0; make it contiguous"
                )
    eager = place(module)
    if eager and not settings["use_eager_fallback"]:
        raise AssertionError(f"Node: {eager[0]} requires fallback: True")
    newer = settings.get("use_generic_reinplacer", False)
    if settings["use_inplace_index_copy"]:
        (reinplace_any if newer else reinplace)(module)
    fuse_linear(module)
    parts = partitions(module)
    if settings["reassign_copy_"]:
        reassign(module, parts)
    return reordered(module, parts, stable=newer)


def place(module: GraphModule) -> list[Node]:
    """Mark each node's placement; return the operators for which the graph is left.

    Placement asks for an operator's name, the kernel registry for its overload as well: raises
    RuntimeError, in the registry's words, for one that stays and has no lowering.
    """
    eager = []
    for node in module.graph.nodes:
        node.meta["placement"] = "eager"
        if node.op != "call_function":
            continue
        node.meta["placement"] = "hpu_cluster"
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _value)
            if why_left(node.target, args, kwargs):
                node.meta["placement"] = "eager"
                eager.append(node)
            elif operators.has_lowering(node.target):
                name = operators.names_of(node.target)[1]
                raise RuntimeError(f"{name} isn't registered in KernelRegistry!")
    return eager


def why_left(target: Any, args: Any, kwargs: Any) -> str:
    """Say why a graph is left for an operator; "" where it stays."""
    why = operators.has_kernel(target, args, kwargs)
    return "" if why == operators.UNLISTED and target._schema.name in operators.BY_NAME else why


def _value(node: Node) -> Any:
    return node.meta.get("val")


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


def reinplace_any(module: GraphModule) -> None:
    """Let every ``index_copy`` write in place whose old value nobody reads afterwards, as release 1.24.

    From the last node to the first; what is written in place becomes one with what it overwrites, so that
    of several writes to one input all are kept. An input must be copied back to, and with that value.
    """
    order: dict[Any, int] = {node: at for at, node in enumerate(module.graph.nodes)}
    group: dict[Any, int] = {}
    members: dict[int, list[Node]] = {}
    first: dict[Node, Any] = {}  # the first copy back to each input
    for node in order:
        value = _value(node)
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

    for node in reversed(list(order)):
        if node.target is aten.index_copy.default and may(node, node.args[0]):
            node.target = aten.index_copy_.default
            joined = members.pop(group[node])
            members[group[node.args[0]]] += joined
            group.update(dict.fromkeys(joined, group[node.args[0]]))
    for base, copy in first.items():
        if group[copy.args[1]] == group[base]:
            copy.replace_all_uses_with(copy.args[1])
            module.graph.erase_node(copy)


def fuse_linear(module: GraphModule) -> None:
    """Make ``linear`` of ``mm`` and ``addmm`` with a transposed weight, and drop the views around it.

    As there: what ``addmm`` adds becomes the bias, whatever its shape, and the views go where rank and
    leading sizes are the same outside, bias or not. Raises AssertionError where the result then has
    another shape, which makes the graph invalid.
    """
    for node in [one for one in module.graph.nodes if one.target is aten.transpose.int]:
        if str(node.meta.get("original_aten", "")) != "aten.t.default":
            continue
        for user in list(node.users):
            bias: Any
            x: Any
            if user.target is aten.addmm.default and user.args[2] is node:
                bias, x = user.args[0], user.args[1]
            elif user.target is aten.mm.default and user.args[1] is node:
                bias, x = None, user.args[0]
            else:
                continue
            given: tuple[Any, ...] = (x, node.args[0])
            given = given if bias is None else (*given, bias)
            with module.graph.inserting_after(user):
                made = module.graph.create_node("call_function", aten.linear.default, given)
            made.meta.update(user.meta)
            user.replace_all_uses_with(made)
            module.graph.erase_node(user)
            _drop_views(made, bias)


def _drop_views(node: Node, bias: Node | None) -> None:
    before: Any = node.args[0]
    after = next(iter(node.users), None)
    if after is None or len(node.users) != 1 or len(before.users) != 1:
        return
    if before.target is not aten.view.default or after.target is not aten.view.default:
        return
    inner, outer = _value(before.args[0]).shape, _value(after).shape
    if len(inner) != len(outer) or inner[:-1] != outer[:-1]:
        return
    added = () if bias is None else tuple(_value(bias).shape)
    pairs = zip(reversed(added), reversed(outer), strict=False)
    if len(added) > len(outer) or any(size not in (1, whole) for size, whole in pairs):
        raise AssertionError(
            f"pass_inference_fuse_linear: the output {list(outer)} of {node.name} does not match its "
            f"bias {list(added)}"
        )
    node.args = (before.args[0], *node.args[1:])
    node.meta.update(after.meta)
    after.replace_all_uses_with(node)


class _Clusters(OperatorSupport):
    """What stays in a cluster."""

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return bool(node.meta["placement"] == "hpu_cluster")


def partitions(module: GraphModule) -> list[list[Node]]:
    """Return the clusters of a graph: all of it where nothing leaves it, else by torch's partitioner."""
    inside = [node for node in module.graph.nodes if node.meta["placement"] == "hpu_cluster"]
    outside = [node for node in module.graph.nodes if node.op == "call_function"]
    if len(inside) == len(outside):
        return [inside]
    found = CapabilityBasedPartitioner(
        module, _Clusters(), allows_single_node_partition=True
    ).propose_partitions()
    place_of = {node: at for at, node in enumerate(module.graph.nodes)}
    return [sorted(one.nodes, key=place_of.__getitem__) for one in found]


def reassign(module: GraphModule, parts: list[list[Node]]) -> None:
    """Move each write of an input into the cluster that its value comes from.

    As there: who reads the old value afterwards is not looked at.
    """
    home = {node: part for part in parts for node in part}
    for node in module.graph.nodes:
        if node.target is not aten.copy_.default or node.args[0].op != "placeholder":
            continue
        here, there = home.get(node), home.get(node.args[1])
        if here is None or there is None or here is there:
            continue
        here.remove(node)
        there.append(node)
        home[node] = there


def reordered(
    module: GraphModule, parts: Sequence[Sequence[Node]], stable: bool = False
) -> GraphModule:
    """Return the graph in the order of its clusters, each in the order of torch's fuser.

    ``stable``: nodes of a cluster keep the order of the graph.
    """
    unit: dict[Node, int] = {}
    members: list[list[Node]] = []
    for part in parts:
        if part:
            unit.update(dict.fromkeys(part, len(members)))
            members.append(list(part) if stable else breadth_first(part))
    for node in module.graph.nodes:
        if node not in unit:
            unit[node] = len(members)
            members.append([node])
    # The clusters themselves keep the order of the graph as far as their inputs allow.
    first = {node: at for at, node in enumerate(module.graph.nodes)}
    order = _by_inputs(members, unit, first)
    graph = Graph()
    copied: dict[Node, Node] = {}
    for index in order:
        for node in members[index]:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return GraphModule(module, graph)


def _by_inputs(
    members: list[list[Node]], unit: Mapping[Node, int], first: Mapping[Node, int]
) -> list[int]:
    waits = {
        index: {unit[one] for node in nodes for one in node.all_input_nodes} - {index}
        for index, nodes in enumerate(members)
    }
    # A unit stands where its last node stood, as the fuser inserts it; the output is last.
    last = {index: max(first[node] for node in nodes) for index, nodes in enumerate(members)}
    order: list[int] = []
    done: set[int] = set()
    left = sorted(waits, key=last.__getitem__)
    while left:
        ready = next(index for index in left if waits[index] <= done)
        left.remove(ready)
        order.append(ready)
        done.add(ready)
    return order


def breadth_first(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in the order of torch's fuser before it was made stable: first come, first served.

    A write of state may come before a reader that has a longer chain of inputs.
    """
    inside = set(nodes)
    waits = {node: sum(one in inside for one in node.all_input_nodes) for node in nodes}
    queue = deque(node for node in nodes if not waits[node])
    order = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for user in node.users:
            if user in inside:
                waits[user] -= 1
                if not waits[user]:
                    queue.append(user)
    return order
