"""The static-shape proof: prefill and step on fake tensors, then on the device, operator by operator.

Every installed family's tiny model is traced. On fake tensors a host read or a
data-dependent shape cannot even be executed; what they let pass
(another device, float64, a device's generator, an operator the backend does not list) is refused by
rule. The same step with other content must give the same operators, shapes and Python arguments:
then a compiled or captured graph is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing
from lantern_accel.testing.trace import (
    Recorder,
    Signature,
    Violation,
    fake,
    first_difference,
    source_line,
)

TEMPERATURES = (0.0, 1.0)
BATCH = 4
#: Steps per request that are compared; a step that is unlike the first is so at the second.
STEPS = 2
#: Steps that a window is watched for, over several requests.
LONG = 200


def _refused(error: Exception) -> str | None:
    """Return the rule that a fake tensor's refusal stands for."""
    rules = {
        "DataDependentOutputException": "host_read",
        "DynamicOutputShapeException": "dynamic_shape",
        "FakeTensorDeviceMismatchError": "other_device",
        "UnsupportedOperatorException": "operators",
    }
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ in rules:
            return rules[type(chain).__name__]
        chain = chain.__cause__
    return None


def _fake_model(backend: Backend, dtype: torch.dtype, family: str) -> tuple[tiny.TinyModel, Any]:
    """Return a tiny model on fake tensors and the mode to go on with; made once per backend."""
    kept: dict[Any, tuple[tiny.TinyModel, Any]] = vars(backend).setdefault("_static_models", {})
    if (family, dtype) not in kept:

        def build() -> tiny.TinyModel:
            return tiny.tiny_model(backend, backend.device, dtype, family)

        # Tensors of a device without data are as good as fake ones, and cannot be faked again.
        without_data = backend.device.type == "meta"
        kept[family, dtype] = (build(), nullcontext()) if without_data else fake(build)
    return kept[family, dtype]


def trace_fake(
    backend: Backend,
    strategy: str,
    batch: int,
    temperature: float,
    dtype: torch.dtype,
    family: str = "",
) -> Recorder:
    """Run prefill and one step on fake tensors of this backend's device; return what was seen."""

    model, mode = _fake_model(backend, dtype, family)
    recorder = Recorder(backend.device, backend.operators(), backend.operator_rules())
    with mode:
        engine = tiny.tiny_engine(
            backend,
            strategy,
            batch=batch,
            temperature=temperature,
            dtype=dtype,
            family=family,
            model=model,
        )
        try:
            # The condition and the uniforms come from the host, before both functions.
            tiny.load(engine, 0)
            with recorder:
                engine.prefill()
                recorder.launched = 0
                engine.step()
        except Exception as error:
            rule = _refused(error)
            if rule is None:
                if recorder.violations:  # of which this error is a consequence
                    return recorder
                raise
            recorder.violations.append(Violation(rule, type(error).__name__, source_line(error)))
    return recorder


def trace_once(
    backend: Backend,
    strategy: str,
    batch: int,
    temperature: float,
    dtype: torch.dtype,
    family: str,
) -> tuple[str, Recorder]:
    """Return a case's name and its :func:`trace_fake`, which is made once per backend."""
    kept: dict[str, Recorder] = vars(backend).setdefault("_static_traces", {})
    name = str(dtype).removeprefix("torch.")
    where = f"{family}, {strategy}, batch {batch}, temperature {temperature:g}, {name}"
    if where not in kept:
        doing(where)
        kept[where] = trace_fake(backend, strategy, batch, temperature, dtype, family)
    return where, kept[where]


def traces(backend: Backend) -> Iterator[tuple[str, Recorder]]:
    """Trace every case of :func:`.tiny.cases`, sampled and greedy; each only once per backend.

    Batches and dtypes are spread over both: sampled, one image in the device's dtype; greedy, several
    images in float32.
    """
    best = backend.dtypes().compute
    for family, strategy in tiny.cases(STRATEGIES):
        for batch, temperature, dtype in ((1, 1.0, best), (BATCH, 0.0, torch.float32)):
            yield trace_once(backend, strategy, batch, temperature, dtype, family)


def kernels(backend: Backend) -> Measured:
    """Count what one step of one image launches, by strategy; a device that replays still runs these."""
    best = backend.dtypes().compute
    found: dict[str, int] = {}
    for family, strategy in tiny.cases(("vanilla", "lantern++", "eagle2", "sjd-pac")):
        if strategy not in found:  # the first family that can show it
            found[strategy] = trace_once(backend, strategy, 1, 1.0, best, family)[1].launched
    listed = ", ".join(f"{name} {count}" for name, count in found.items())
    return Measured(f"operators that a sampled step of one tiny image runs: {listed}")


def _rule(rule: str, what: str) -> Callable[[Backend], Measured]:
    def check(backend: Backend) -> Measured:
        seen = 0
        for where, recorder in traces(backend):
            seen += len(recorder.signature)
            for violation in recorder.violations:
                if violation.rule == rule:
                    raise Failed(f"{where}: {violation}")
        return Measured(f"{what} in {seen} operators")

    return check


def _own_rule(rule: str, what: str) -> Callable[[Backend], Measured]:
    """As :func:`_rule`, for a rule that a backend may have or not."""
    check = _rule(rule, what)

    def applies(backend: Backend) -> Measured:
        if rule not in backend.operator_rules():
            raise NotApplicable(f"backend {backend.name!r} has no rule for {rule}")
        return check(backend)

    return applies


def _record(function: Callable[[], None]) -> Signature:
    """Run a function on the device itself and return its operators."""
    seen = Signature()
    with seen:
        function()
    return seen


def one_graph(backend: Backend) -> Measured:
    """Show that steps of different content, and of different prompts, are one graph."""
    seen = 0
    first_family = ""
    for family, strategy in tiny.cases(STRATEGIES):
        first_family = first_family or family
        for temperature in TEMPERATURES if family == first_family else (1.0,):
            where = f"{family}, {strategy}, temperature {temperature:g}"
            doing(where)
            engine = tiny.tiny_engine(
                backend, strategy, batch=2, temperature=temperature, family=family
            )
            first: dict[str, Signature] = {}
            # A window is watched for long: its uniforms, rows and drafts go round in rings.
            long = strategy == "scd" and family == first_family and temperature > 0
            for seed in range(LONG // engine.geometry.tokens + 1 if long else 2):
                tiny.load(engine, seed)
                for step in range((engine.geometry.tokens if long else STEPS) + 1):
                    name = "step" if step else "prefill"
                    now = _record(getattr(engine, name))
                    change = first_difference(first.setdefault(name, now), now)
                    if change:
                        at = f"{name} {step}" if step else name
                        raise Failed(f"{where}, {at}: {change}")
                    seen += bool(step)
    return Measured(f"{seen} steps, no new graph")


def operators(backend: Backend) -> Measured:
    """Hold the operators of every step to those that the backend lists, or gives reasons against."""
    if backend.operators() is None and "operators" not in backend.operator_rules():
        raise NotApplicable(f"backend {backend.name!r} lists no operators")
    seen, first, names = 0, "", dict[str, None]()
    for where, recorder in traces(backend):
        seen += len(recorder.signature)
        wrong = [one for one in recorder.violations if one.rule == "operators"]
        first = first or (f"{where}: {wrong[0]}" if wrong else "")
        names |= dict.fromkeys(one.operator for one in wrong)
    if first:
        others = f"; of all that are run, these are missing: {', '.join(names)}"
        raise Failed(first + (others if len(names) > 1 else ""))
    return Measured(f"only operators that the backend lists in {seen} operators")


CHECKS: dict[str, Callable[[Backend], Measured]] = {
    "static.host_read": _rule("host_read", "no host read"),
    "static.dynamic_shape": _rule("dynamic_shape", "no data-dependent shape"),
    "static.float64": _rule("float64", "no float64"),
    "static.other_device": _rule("other_device", "no tensor of another device"),
    "static.device_generator": _rule("device_generator", "no device generator"),
    "static.operators": operators,
    "static.dtypes": _own_rule("dtypes", "only dtypes that the backend's kernels take"),
    "static.indices": _own_rule("indices", "no integers wider than the device's indices"),
    "static.one_graph": one_graph,
    "static.kernels": kernels,
}
