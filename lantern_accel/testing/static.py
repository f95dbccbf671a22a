"""The static-shape proof: prefill and step without data, then on the device, operator by operator.

Every installed family's tiny model is traced. Without data a host read or a data-dependent shape
cannot even be executed; what that lets pass (another device, float64, a device's generator, an operator
the backend does not list) is refused by rule. The same step with other content must give the same
operators, shapes and Python arguments: then a compiled or captured graph is reused. A step keeps no view,
and writes to no buffer that nobody named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import is_dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from lantern_accel.device.backend import Backend, dtype_policy
from lantern_accel.device.capture import buffers_of
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing
from lantern_accel.testing.tiny import CHECKED
from lantern_accel.testing.tolerances import short
from lantern_accel.testing.trace import OpRecorder, Violation, Writes, first_difference, source_line

#: Rules that only some backends have.
OF_BACKENDS = ("operators", "dtypes", "indices")
TEMPERATURES = (0.0, 1.0)
BATCH = 4
#: Steps per request that are compared; a step that is unlike the first is so at the second.
STEPS = 2
#: Steps that a window is watched for, over several requests.
LONG = 200


@functools.cache
def without_data() -> FakeTensorMode:
    """Return the mode of torch's fake tensors; one for all, since those of two modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def trace_shapes(
    backend: Backend,
    strategy: str,
    batch: int,
    temperature: float,
    dtype: torch.dtype,
    family: str = "",
) -> OpRecorder:
    """Run prefill and one step on this backend's device without data, once; return what was seen."""
    traces: dict[tuple[object, ...], OpRecorder] = vars(backend).setdefault("_static_traces", {})
    models: dict[tuple[object, ...], tiny.TinyModel] = vars(backend).setdefault(
        "_static_models", {}
    )
    case = (strategy, batch, temperature, dtype, family)
    if case in traces:
        return traces[case]
    recorder = OpRecorder(backend.device, backend.conformance().rules)
    # Tensors of a device without data are as good as fake ones, and cannot be made into them.
    with nullcontext() if backend.device.type == "meta" else without_data():
        if (family, dtype) not in models:
            models[family, dtype] = tiny.tiny_model(backend, backend.device, dtype, family)
        engine = tiny.tiny_engine(
            backend,
            strategy,
            batch=batch,
            temperature=temperature,
            dtype=dtype,
            family=family,
            model=models[family, dtype],
        )
        try:
            # The condition and the uniforms come from the host, before both functions.
            tiny.load(engine, 0)
            with recorder:
                engine.prefill()
                recorder.launched = 0
                engine.step()
        except UnsupportedOperatorException as error:
            at = source_line(error) or "unknown"
            recorder.violations.append(Violation("operators", str(error.func), at))
        except Exception:
            if not recorder.violations:  # of which this error is a consequence
                raise
    traces[case] = recorder
    return recorder


def traces(backend: Backend) -> Iterator[tuple[str, OpRecorder]]:
    """Trace every case of :func:`.tiny.cases`, sampled and greedy.

    Batches and dtypes are spread over both: sampled, one image in the device's dtype; greedy, several
    images in float32.
    """
    best = dtype_policy(backend).compute
    for family, strategy in tiny.cases(CHECKED):
        for batch, temperature, dtype in ((1, 1.0, best), (BATCH, 0.0, torch.float32)):
            given = f"batch {batch}, temperature {temperature:g}, {short(dtype)}"
            doing(where := f"{family}, {strategy}, {given}")
            yield where, trace_shapes(backend, strategy, batch, temperature, dtype, family)


def kernels(backend: Backend) -> Measured:
    """Count what one step of one image launches, by strategy; a device that replays still runs these."""
    best = dtype_policy(backend).compute
    found: dict[str, int] = {}
    for family, strategy in tiny.cases(("vanilla", "lantern++", "eagle2", "scd")):
        if strategy not in found:  # the first family that can show it
            found[strategy] = trace_shapes(backend, strategy, 1, 1.0, best, family).launched
    listed = ", ".join(f"{name} {count}" for name, count in found.items())
    return Measured(f"operators that a sampled step of one tiny image runs: {listed}")


def rule(name: str, what: str) -> Callable[[Backend], Measured]:
    """Return the check that no step breaks a rule: one of every device, or one that a backend has."""

    def check(backend: Backend) -> Measured:
        if name in OF_BACKENDS and name not in backend.conformance().rules:
            raise NotApplicable(f"backend {backend.name!r} has no rule for {name}")
        seen, first, names = 0, "", dict[str, None]()
        for where, recorder in traces(backend):
            seen += len(recorder.signature)
            wrong = [one for one in recorder.violations if one.rule == name]
            first = first or (f"{where}: {wrong[0]}" if wrong else "")
            names |= dict.fromkeys(one.operator for one in wrong)
        if first:
            others = f"; of all that are run, these break the rule: {', '.join(names)}"
            raise Failed(first + (others if len(names) > 1 else ""))
        return Measured(f"{what} in {seen} operators")

    return check


def one_graph(backend: Backend) -> Measured:
    """Show that steps of different content, and of different prompts, are one graph."""
    seen = 0
    first_family = ""
    for family, strategy in tiny.cases(tiny.FORMS, tiny.COMPILED, turn=0):
        first_family = first_family or family
        greedy = family == first_family and strategy in tiny.COMPILED
        for temperature in TEMPERATURES if greedy else (1.0,):
            where = f"{family}, {strategy}, temperature {temperature:g}"
            doing(where)
            engine = tiny.tiny_engine(
                backend, strategy, batch=2, temperature=temperature, family=family
            )
            first: dict[str, OpRecorder] = {}
            # A window is watched for long: its uniforms, rows and drafts go round in rings.
            long = strategy == "scd" and family == first_family and temperature > 0
            for seed in range(LONG // engine.geometry.tokens + 1 if long else 2):
                tiny.load(engine, seed)
                for step in range((engine.geometry.tokens if long else STEPS) + 1):
                    name = "step" if step else "prefill"
                    with OpRecorder(backend.device) as now:
                        (engine.step if step else engine.prefill)()
                    change = first_difference(first.setdefault(name, now), now)
                    if change:
                        at = f"{name} {step}" if step else name
                        raise Failed(f"{where}, {at}: {change}")
                    seen += bool(step)
    return Measured(f"{seen} steps, no new graph")


# --- what a step keeps and changes --------------------------------------------------------------


def walk_tensors(
    value: object, path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors that an object keeps, with the path to each; every object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    inside: dict[str, object] = {}
    if isinstance(value, Mapping):
        inside = {f"{path}[{key!r}]": one for key, one in value.items()}
    elif isinstance(value, list | tuple):
        inside = {f"{path}[{index}]": one for index, one in enumerate(value)}
    elif isinstance(value, nn.Module):
        # A packed weight is the device's own, and the place that it leaves is read by nobody.
        left = ("packed", "weight") if getattr(value, "packed", None) is not None else ("packed",)
        every = {**vars(value), **value._parameters, **value._buffers, **value._modules}
        names = (name for name in every if name[0] != "_" and name not in left)
        inside = {f"{path}.{name}": every[name] for name in names}
    elif hasattr(value, "__dict__") and (
        (is_dataclass(value) and not isinstance(value, type))
        or type(value).__module__.startswith("lantern_accel.")
    ):
        inside = {f"{path}.{name}": one for name, one in vars(value).items()}
    for name, one in inside.items():
        if not isinstance(one, Backend):  # what a device keeps is its own affair
            yield from walk_tensors(one, name, seen)


def views(backend: Backend) -> Measured:
    """Look through engines for tensors that are views: a lazy device makes a view again when it is used.

    It does so once after each write to what the view is of, so that one step is another program than
    the next.
    """
    looked = 0
    for family, strategy in tiny.cases(CHECKED):
        doing(f"{family}, {strategy}")
        # Outside of any inference mode, in which torch does not note what a view is of.
        with torch.inference_mode(False), torch.no_grad():
            engine = tiny.tiny_engine(backend, strategy, family=family)
        vars(engine).pop("model")
        for path, tensor in walk_tensors(engine, "engine"):
            looked += 1
            if tensor._is_view():
                raise Failed(
                    f"{family}, {strategy}: {path} {list(tensor.shape)} is a view that is kept across "
                    "steps; keep a tensor of its own (.clone()), or make the view in the step"
                )
    return Measured(f"{looked} tensors that engines keep are not views")


def buffers(backend: Backend) -> Measured:
    """Watch prefill and steps write: to buffers that the engine names, and to no cache through a view.

    A device that replays functions of inputs and outputs returns what is named, and nothing else;
    a compiler updates a cache where it lies if it is one tensor per layer, written as a whole.
    """
    if backend.device.type == "meta":
        raise NotApplicable("the backend has shapes and no data")
    writes = 0
    for family, strategy in tiny.cases(tiny.FORMS, tiny.COMPILED, turn=0):
        doing(f"{family}, {strategy}")
        # Outside of any inference mode, as for `views`.
        with torch.inference_mode(False), torch.no_grad():
            engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
            tiny.load(engine, 0)
        caches = {id(buffer) for cache in engine.caches for buffer in cache.buffers}
        for function in (engine.prefill, engine.step):
            names = {id(tensor): name for name, tensor in buffers_of(function).items()}
            before = {
                id(t): (n, t, t.clone())
                for n, t in walk_tensors(engine, "engine")
                if id(t) not in names
            }
            with torch.inference_mode(False), torch.no_grad(), Writes() as seen:
                function()
            where = f"{family}, {strategy}, {function.__name__}"
            for key, tensor in seen.written.items():
                writes += 1
                if key not in names:
                    raise Failed(
                        f"{where}: a buffer {list(tensor.shape)} is written, and not named"
                    )
                if key in caches and key in seen.through_views:
                    raise Failed(
                        f"{where}: {names[key]} is written through a view; write to the layer's own "
                        "tensor, so that a compiler can update it where it lies"
                    )
            for name, tensor, was in before.values():
                if not torch.equal(tensor.cpu(), was.cpu()):
                    raise Failed(f"{where}: {name} changed, and is not named among the buffers")
    return Measured(f"{writes} buffers written by torch's operators, all named")
