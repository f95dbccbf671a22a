"""Stands in for Habana's ``hpu_backend`` of torch.compile on the software HPU.

Dynamo and AOT autograd are torch's own, so that guards, graphs and their number are real. The bridge's
passes over a graph are modelled (see :mod:`~lantern_accel_hpu.software.lowering`); only the last step,
from there to a recipe, is missing: the graph is run operator by operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from lantern_accel_hpu.software import config, late, lowering, metrics

BACKEND = "hpu_backend"

#: Operators that the bridge, too, has taken apart before it sees a graph.
DECOMPOSED = (
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "new_zeros",
    "new_ones",
    "eye",
    "stack",
    "t",
)

#: Writes to inputs by every graph compiled in this process, in place (``index_copy_``) or by a copy
#: (``copy_``), with the input's shape.
writes = Counter[tuple[str, tuple[int, ...]]]()
WRITES = {torch.ops.aten.index_copy_.default, torch.ops.aten.copy_.default}


def _compiler(settings: Mapping[str, bool], name: str) -> Callable[..., Any]:
    """Return what compiles a graph of AOT autograd under the settings of one call of torch.compile.

    ``name``: of the function that it is made of.
    """

    def compile_(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Count a graph, take it through the bridge's passes and return a function that runs it."""
        from torch._functorch._aot_autograd.utils import make_boxed_func

        lowered = lowering.lower(graph, settings, example_inputs)
        nodes = [node for node in lowered.graph.nodes if node.op == "call_function"]
        done = [node for node in nodes if node.target in WRITES]
        writes.update((one.target.__name__, tuple(one.args[0].meta["val"].shape)) for one in done)
        for node in nodes:
            # Tracing takes results on hpu for contiguous, the CPU's kernels keep the order of strides:
            # a view of the one may need a copy of the other. No value here aliases one that is written.
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        lowered.recompile()
        metrics.graph_compilation.add()
        results: Any = lowered.graph.output_node().args[0]
        made: list[Any] = [one and one.meta["val"] for one in results]

        def run(*given: Any) -> Any:
            if not late.count_run(name):
                return lowered.forward(*given)
            device = torch.device("hpu:0")
            return [
                None if a is None else torch.zeros(a.shape, dtype=a.dtype, device=device)
                for a in made
            ]

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    return compile_


def _full_like(
    like: Tensor, value: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """Fill a new tensor; ``full_like`` itself has no kernel."""
    return torch.full(like.shape, value, dtype=dtype or like.dtype, device=device or like.device)


def _backend(
    graph: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, bool] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo; ``options`` are settings of this one call."""
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.symbolic_convert import InstructionTranslator

    name = InstructionTranslator.current_tx().f_code.co_name.removeprefix("lantern_")
    taken_apart = get_decompositions([getattr(torch.ops.aten, name) for name in DECOMPOSED])
    taken_apart[torch.ops.aten.full_like.default] = _full_like
    compiler = aot_autograd(
        fw_compiler=_compiler(config.settings_of(options), name),
        decompositions=taken_apart,
        # As in the bridge, writes to inputs (caches, state) stay inside the graph.
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(graph, example_inputs)
    return compiled


def register() -> None:
    """Register the compiler under the bridge's name."""
    from torch._dynamo import register_backend

    register_backend(_backend, name=BACKEND)
