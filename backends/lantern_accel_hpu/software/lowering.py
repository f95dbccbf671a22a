"""Repeats what the bridge does to a graph between AOT autograd and its own compiler, as far as published.

Placement, the pass that takes views out of a graph that are its results, those that let operators write
in place, the one that makes ``linear`` of a product with a transposed matrix, partitions where the graph
is left, the pass that moves writes of state between partitions, and the order in which torch's fuser
lists a partition's nodes: first come, first served. The result is one flat graph in the order in which a
Gaudi would run it, so that whatever these passes lose or reorder shows in the numbers. Sources:
habana_frameworks 1.19, ``passes.py``, ``partitioner.py``, ``shared_layer.py`` of its
``dynamo/compile_backend``; torch's ``fuser_utils.py`` up to 2.11. Of 1.24, which the setting
``use_generic_reinplacer`` tells apart, single files. Its stable sort acts before a graph is parted, and
the fuser sorts every part again.
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
from lantern_accel_hpu.software.reinplace import (
    is_view,
    reinplace,
    reinplace_add,
    reinplace_any,
    settle_adds,
    value_of,
)

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
    views = leaf_views(module)
    if views and not settings["use_eager_fallback"]:
        told = [f"{node}:{node.target}" for node in views]
        raise AssertionError(f"Eager fallback in nodes: {told}")
    if settings.get("use_generic_reinplacer", False):
        reinplace_any(module, settings)
    else:
        if settings["use_inplace_index_copy"]:
            reinplace(module)
        reinplace_add(module)
    fuse_linear(module)
    parts = partitions(module)
    if settings["reassign_copy_"]:
        reassign(module, parts)
    settle_adds(parts)
    return reorder(module, parts)


def place(module: GraphModule) -> list[Node]:
    """Mark each node's placement; return the operators for which the graph is left.

    Placement asks for an operator's name, the kernel registry for its overload as well: raises
    RuntimeError, in the registry's words, for one that stays and has no lowering. Some operators are
    placed by name alone: a dtype or a rank that no kernel is known to take is refused late, by Synapse.
    """
    eager = []
    for node in module.graph.nodes:
        node.meta["placement"] = "eager"
        if node.op != "call_function":
            continue
        node.meta["placement"] = "hpu_cluster"
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
            if why_left(node.target, args, kwargs):
                node.meta["placement"] = "eager"
                eager.append(node)
            elif operators.has_lowering(node.target):
                name = operators.names_of(node.target)[1]
                raise RuntimeError(f"{name} isn't registered in KernelRegistry!")
            elif why := operators.was_tested(node.target, args, kwargs):
                name = operators.names_of(node.target)[1]
                raise RuntimeError(
                    f"synNodeCreateWithId failed for node: {name} with synStatus 18 [Unsupported]: {why}"
                )
    return eager


def why_left(target: Any, args: Any, kwargs: Any) -> str:
    """Say why a graph is left for an operator; "" where it stays."""
    by_name = target._schema.name in operators.BY_NAME
    why = operators.has_kernel(target, args, kwargs)
    if not why and not by_name:
        return operators.has_dtype(target, args, kwargs)
    return "" if why == operators.UNLISTED and by_name else why


def leaf_views(module: GraphModule) -> list[Node]:
    """Mark and return views that are results of the graph or of a part of it: they run outside.

    As there; except for a view that is read inside as well, of which the bridge keeps a copy there.
    """
    found = []
    for node in reversed(module.graph.nodes):
        outside = [user.meta["placement"] == "eager" for user in node.users]
        if node.meta["placement"] == "hpu_cluster" and is_view(node) and any(outside):
            found.append(node)
            if all(outside):
                node.meta["placement"] = "eager"
    return found


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
    inner, outer = value_of(before.args[0]).shape, value_of(after).shape
    if len(inner) != len(outer) or inner[:-1] != outer[:-1]:
        return
    added = () if bias is None else tuple(value_of(bias).shape)
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


def reorder(module: GraphModule, parts: Sequence[Sequence[Node]]) -> GraphModule:
    """Return the graph in the order of its clusters, each in the order of torch's fuser."""
    unit: dict[Node, int] = {}
    members: list[list[Node]] = []
    for part in parts:
        if part:
            unit.update(dict.fromkeys(part, len(members)))
            members.append(breadth_first(part))
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
