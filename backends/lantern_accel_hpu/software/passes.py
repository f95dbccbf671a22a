"""Run the vendor's own compiler passes over every function that is captured.

    python -m lantern_accel_hpu.software.passes CLONE

``CLONE`` is a clone of HabanaAI/gaudi-pytorch-bridge. The Python files of its ``hpu_backend`` are loaded
as they are: decompositions, placement, all passes, the partitioner, TorchScript. Of its C++ parts the
question whether an operator has a kernel is answered by this project's list, and a recipe is the
partition itself, run operator by operator on the software HPU. What is shown: which passes change which
function, what would leave its graph, and that a compiled function does to the buffers what it does
uncompiled. What the closed graph compiler makes of a partition is not shown. The facts that a run of
this left, with release 1.19, are in ``backends/lantern_accel_hpu/gaudi_passes.json``. The names that
release 1.24 has in addition, as its files show, are stood in for as well; no clone of it was to be had,
so that this has not run with one. What its passes do differently is modelled in the software HPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import typer
from torch import Tensor

from lantern_accel.cli import run_single
from lantern_accel.cli.console import say
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.files import write_json

PACKAGE = "python_packages/habana_frameworks/torch"
ROOT = "habana_frameworks.torch"
#: What the bridge's flags are by default (``scripts/env_flags.yaml`` of release 1.19); of 1.24's further
#: ones the fork of TorchScript is off, because it is a C++ part.
FLAGS = {
    "get_pt_hpu_enable_compiled_autograd": False,
    "get_pt_hpu_enable_dynamic_output_preallocate": False,
    "get_pt_hpu_enable_refine_dynamic_shapes": False,
    "get_pt_hpu_optim_dynamic_output_sif": False,
    "get_pt_hpu_override_linear_matmul_eager": False,
    "get_pt_hpu_wrap_random_ops_compile": True,
    "get_pt_hpu_use_jit_fork": False,
    "get_pt_hpu_enable_h2d_scales": False,
}
RANDOM = (
    *("bernoulli", "poisson", "rand", "randn", "randint", "multinomial", "randperm"),
    *("native_dropout", "uniform"),
)
ATTENTION = ("sdpa_recomp_fwd", "sdpa_fwd", "fp8_sdpa_fwd", "fp8_sdpa_recomp_fwd")
#: Operators of the vendor's own that its files name when they are loaded, and no step has.
NAMED = (
    *(f"habana_{name}{end}" for name in RANDOM for end in ("", "_checkpoint")),
    *(
        f"{name}{end}"
        for name in ATTENTION
        for end in ("", "_dropout", "_dropout_seed", "_non_dropout")
    ),
)
#: Overloads that newer torch has no more, with names of dimensions.
GONE = (
    (torch.ops.aten.index_add, "dimname"),
    (torch.ops.aten.index_select, "dimname"),
    (torch.ops.aten.index_select, "dimname_out"),
    (torch.ops.aten.norm, "names_ScalarOpt_dim"),
    (torch.ops.aten.norm, "names_ScalarOpt_dim_dtype"),
    (torch.ops.aten.norm, "names_dtype_out"),
    (torch.ops.aten.norm, "names_out"),
)
BATCHES = (1, 2, 4)
#: What sums in another order may differ by, in float32 numbers of about 1.
ROUNDING = 1e-4


class Quiet:
    """Stands in for the vendor's logger."""

    def __init__(self, *names: str) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Timer:
    """Stands in for the vendor's stopwatch."""

    elapsed = 0.0

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Vendor:
    """The vendor's compiler, loaded from a clone; ``changes`` counts what each pass did."""

    def __init__(self, clone: Path) -> None:
        folder = next(
            (
                f
                for f in (clone / PACKAGE, clone)
                if (f / "dynamo/compile_backend/passes.py").is_file()
            ),
            None,
        )
        if folder is None:
            raise RequestError(
                f"{clone} has no {PACKAGE}/dynamo/compile_backend/passes.py; give a clone of "
                "HabanaAI/gaudi-pytorch-bridge with its files checked out"
            )
        self.folder = folder
        self.changes: Counter[str] = Counter()
        self.partitions = 0
        self.eager: set[str] = set()
        self._library = torch.library.Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in NAMED:
            self._library.define(f"{name}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
        self._library.define("plain_index(Tensor x, Tensor?[] at) -> Tensor")  # type: ignore[no-untyped-call]
        self._library.impl("plain_index", torch.ops.aten.index.Tensor, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        os.environ["PT_HPU_USE_CPP_PARTITIONER"] = "0"  # torch's own, which it is a copy of
        self._stand_in()
        name = f"{ROOT}.dynamo.compile_backend"
        self.passes = importlib.import_module(f"{name}.passes")
        self.config = importlib.import_module(f"{name}.config")
        self.backends = importlib.import_module(f"{name}.backends")
        self.backends.import_compilers()
        self.backends.import_hpu_partition()
        self.watch()

    # --- what stands in for C++ ------------------------------------------------------------------

    def _stand_in(self) -> None:
        """Put packages whose files are the clone's into ``sys.modules``, and modules for C++ parts."""
        from torch._dynamo.backends import registry

        # The software HPU has registered a compiler of this name; the vendor's is called directly.
        registry._COMPILER_FNS.pop("hpu_backend", None)
        for name, path in (
            ("habana_frameworks", self.folder.parent),
            (ROOT, self.folder),
            *((f"{ROOT}.{part}", self.folder / part.replace(".", "/")) for part in (
                "dynamo", "dynamo.compile_backend", "dynamo.debug_utils",
                "dynamo.debug_utils.visualization", "internal", "utils", "utils.debug",
            )),
        ):  # fmt: skip
            package = ModuleType(name)
            package.__path__ = [str(path)]
            package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = package
        vars(sys.modules[ROOT])["is_torch_fork"] = False
        vars(sys.modules[f"{ROOT}.utils.debug"])["Logger"] = Quiet
        if importlib.util.find_spec("symengine") is None:  # of use for dynamic shapes alone
            import sympy  # type: ignore[import-untyped]

            sys.modules["symengine"] = symengine = ModuleType("symengine")
            vars(symengine)["sympify"] = sympy.sympify
        # What has moved since the torch of that release.
        common: Any = importlib.import_module("torch._inductor.codegen.common")
        if not hasattr(common, "ExprPrinter"):
            common.ExprPrinter = importlib.import_module("torch.utils._sympy.printers").ExprPrinter
        prims: Any = importlib.import_module("torch._prims_common")
        for name in ("Tuple", "List", "Optional", "Union"):
            if not hasattr(prims, name):
                setattr(prims, name, getattr(typing, name))
        for packet, overload in GONE:
            if not hasattr(packet, overload):  # in its place one that torch takes nothing apart for
                setattr(packet, overload, torch.ops.aten.item.default)
        backend = f"{ROOT}.dynamo.compile_backend"
        self._module(
            f"{ROOT}.internal.bridge_config", **{k: self._flag(v) for k, v in FLAGS.items()}
        )
        self._module(f"{ROOT}.utils.internal", Timer=Timer, is_lazy=lambda: False)
        analyzer = SimpleNamespace(registered_contexts={}, registered=[])
        self._module(f"{ROOT}.utils.debug.dynamo_utils", FxGraphAnalyzer=analyzer)
        self._module(
            f"{ROOT}.dynamo.debug_utils.visualization.graph_dumping",
            dump_fx_graph=lambda *args, **kwargs: None,
        )
        self._module(
            f"{backend}._shared_layer_C",
            check_cpu_fallback_op=self._falls_back,
            shared_layer_validation=lambda *given, **more: not self._falls_back(*given, **more),
        )
        # What 1.24 names in addition.
        self._module(f"{ROOT}._torch_jit_C")
        self._module(f"{ROOT}.utils.experimental")
        self._module(f"{ROOT}.utils.debug.logger", LogLevel=SimpleNamespace(DEBUG=10, INFO=20))
        self._module(f"{backend}._partition_bind_C", BindedPartitioner=None, PartitionDTO=None)
        self._module(f"{backend}.recipe_compiler", get_callable_recipe=self._recipe)

    def _module(self, name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        sys.modules[name] = made
        parent, _, own = name.rpartition(".")
        vars(sys.modules[parent])[own] = made

    def _flag(self, value: bool) -> Callable[[], bool]:
        return lambda: value

    def _falls_back(self, name: str, schema: Any, *rest: Any, **more: Any) -> bool:
        """Answer for the closed shared layer: whether an operator runs on the CPU."""
        from lantern_accel_hpu import operators

        found = not {f"aten::{name}", f"hpu::{name}"} & operators.names()
        if found:
            self.eager.add(name)
        return found

    def _recipe(self, jit: Any, module: Any, *rest: Any, **more: Any) -> Any:
        """Answer for the recipe compiler: the partition itself, which TorchScript has taken."""
        self.partitions += 1
        for node in module.graph.nodes:
            # Tracing takes results on hpu for contiguous, the CPU's kernels keep the order of strides:
            # a view of the one may need a copy of the other. Nothing is written through these.
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
            # A Gaudi multiplies stacks of any rank by bmm, where a pass has dropped the views around it.
            elif node.target is torch.ops.aten.bmm.default:
                node.target = torch.ops.aten.matmul.default
        module.recompile()
        return module

    # --- running ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Count for every pass whether it changed the operators of a graph."""
        real = self.passes.get_passes

        def watched(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
            @functools.wraps(one)
            def run(ctx: Any) -> Any:
                before = operators_of(ctx.graph_module)
                changed = one(ctx)
                if operators_of(ctx.graph_module) != before:
                    self.changes[one.__name__] += 1
                return changed

            return run

        vars(self.passes)["get_passes"] = lambda stage: [watched(one) for one in real(stage)]

    def compiled(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        """Return a function as the vendor's ``hpu_backend`` compiles it, with the backend's options."""
        from lantern_accel_hpu.graphs import own_code

        options = {
            "use_eager_fallback": False,
            "reassign_copy_": False,
            "reassign_full_copy": False,
        }

        def backend(module: Any, inputs: Any) -> Any:
            return self.backends.hpu_backend(module, inputs, options=options)

        made: Callable[[], None] = torch.compile(
            own_code(function, name.replace(" ", "_")),
            backend=backend,
            fullgraph=True,
            dynamic=False,
        )
        return made


def operators_of(module: Any) -> tuple[str, ...]:
    """Return the nodes of a graph, in order, each with the nodes that it takes."""
    return tuple(
        f"{node.op} {node.target} {[one.name for one in node.all_input_nodes]}"
        for node in module.graph.nodes
    )


def buffers_of(engine: Any) -> dict[str, Tensor]:
    """Return what a function may change, by name, and the request that it reads."""
    found: dict[str, Tensor] = {**engine.changes, **engine.state.buffers}
    return found


def compare(vendor: Vendor, engine: Any, name: str, function: Callable[[], None]) -> dict[str, Any]:
    """Run a function uncompiled and compiled from one state; return what passes did, and how far off."""
    vendor.changes.clear()
    vendor.partitions = 0
    vendor.eager = set()
    buffers = buffers_of(engine)
    before = {key: one.clone() for key, one in buffers.items()}
    function()
    wanted = {key: one.clone() for key, one in buffers.items()}
    for key, one in buffers.items():
        one.copy_(before[key])
    largest, integers, error = 0.0, 0, ""
    try:
        vendor.compiled(function, name)()
    except Exception as fault:  # an invalid graph fails as it likes
        error = " ".join(str(fault).split())[:200]
    for key, one in buffers.items():
        if not one.numel():
            continue
        gap = (one.cpu().double() - wanted[key].cpu().double()).abs().nan_to_num(nan=float("inf"))
        if one.is_floating_point():
            largest = max(largest, float(gap.max()))
        else:
            integers += int((gap > 0).sum())
    return {
        "partitions": vendor.partitions,
        "eager": sorted(vendor.eager),
        "passes": dict(sorted(vendor.changes.items())),
        "largest_difference": largest,
        "integers_that_differ": integers,
        "error": error,
    }


def gaudi_passes(
    clone: Path = typer.Argument(..., help="A clone of HabanaAI/gaudi-pytorch-bridge."),
    output: Path = typer.Option(
        Path("gaudi_passes.json"), "-o", help="Where the table is written."
    ),
    kinds: str = typer.Option("", help="Kinds of engines, such as windows,chains; all of them."),
    batches: str = typer.Option("", help="Batch sizes, such as 1,2; 1, 2 and 4."),
) -> None:
    """Take every function that is captured through the vendor's passes, and compare what it computes."""
    from lantern_accel.device.plugins import choose_device
    from lantern_accel.testing import tiny
    from lantern_accel_hpu import functions

    backend = choose_device("hpu", {"software": True, "mode": "compile"}).open()
    vendor = Vendor(clone)
    rows: list[dict[str, Any]] = []
    chosen = kinds.split(",") if kinds else list(functions.KINDS)
    sizes = [int(one) for one in batches.split(",")] if batches else list(BATCHES)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TorchScript on its own future
        for kind in chosen:
            for batch in sizes:
                for guided in (True, False):
                    engine = functions.engine_of(backend, kind, batch, guided)
                    tiny.start(engine, 1)
                    for name, function in functions.functions_of(engine).items():
                        row = {"kind": kind, "batch": batch, "guided": guided, "function": name}
                        row |= compare(vendor, engine, name, function)
                        rows.append(row)
                        say(
                            f"{kind} x {batch}{' guided' if guided else ''}, {name}: "
                            f"{row['error'] or row['largest_difference']}, {row['partitions']} part(s)"
                        )
                    torch._dynamo.reset()
    release = "1.24" if hasattr(vendor.config, "use_generic_reinplacer") else "1.19.0"
    told = {"release": release, "torch": torch.__version__, "functions": rows}
    write_json(output, told)
    worst = max(row["largest_difference"] for row in rows)
    wrong = [
        row
        for row in rows
        if row["error"] or row["eager"] or row["integers_that_differ"] or row["partitions"] != 1
    ]
    if worst > ROUNDING or wrong:
        raise LanternError(
            f"the vendor's passes change what functions compute, by {worst:g} at most, or {len(wrong)} "
            f"of {len(rows)} fail, leave their graph or have other integers; see {output}"
        )
    say(
        f"{len(rows)} functions compute the same integers, and floats within {worst:g}",
        label="passed",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    return run_single(gaudi_passes, argv)


if __name__ == "__main__":
    sys.exit(main())
