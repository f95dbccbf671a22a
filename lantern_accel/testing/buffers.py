"""Checks what a step keeps and changes: no view from step to step, and no buffer that nobody named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import Backend
from lantern_accel.device.capture import Arguments, buffers_of
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing


def kept(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Go through the tensors that an object keeps, with the path to each; every object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"{path}[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{path}[{index}]", one) for index, one in enumerate(value)]
    elif isinstance(value, nn.Module):
        tensors = (*value.named_parameters(recurse=False), *value.named_buffers(recurse=False))
        # A packed weight is the device's own, and the place that it leaves is read by nobody.
        packed = getattr(value, "packed", None) is not None
        inside = [
            (f"{path}.{name}", one) for name, one in tensors if not (packed and name == "weight")
        ]
        inside += [(f"{path}.{name}", one) for name, one in value.named_children()]
        more = {
            name: one for name, one in vars(value).items() if name[0] != "_" and name != "packed"
        }
        inside += [(f"{path}.{name}", one) for name, one in more.items()]
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [(f"{path}.{one.name}", getattr(value, one.name)) for one in fields(value)]
        inside += [(f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items()]
    elif type(value).__module__.startswith("lantern_accel.") and hasattr(value, "__dict__"):
        inside = [(f"{path}.{name}", one) for name, one in vars(value).items()]
    for name, one in inside:
        if not isinstance(one, Backend):  # what a device keeps is its own affair
            yield from kept(one, name, seen)


def views(backend: Backend) -> Measured:
    """Look through engines for tensors that are views: a lazy device makes a view anew when it is used.

    It does so once after each write to what the view is of, so that one step is another program than
    the next.
    """
    looked = 0
    for family, strategy in tiny.cases(STRATEGIES):
        doing(f"{family}, {strategy}")
        # Outside of any inference mode, in which torch does not note what a view is of.
        with torch.inference_mode(False), torch.no_grad():
            engine = tiny.tiny_engine(backend, strategy, family=family)
        vars(engine).pop("model")
        for path, tensor in kept(engine, "engine"):
            looked += 1
            if tensor._is_view():
                raise Failed(
                    f"{family}, {strategy}: {path} {list(tensor.shape)} is a view that is kept across "
                    "steps; keep a tensor of its own (.clone()), or make the view in the step"
                )
    return Measured(f"{looked} tensors that engines keep are no views")


def named(backend: Backend) -> Measured:
    """Watch prefill and steps write: to buffers that the engine names, and to no cache through a view.

    A device that replays functions of inputs and outputs brings back what is named, and nothing else;
    a compiler updates a cache where it lies if it is one tensor per layer, written as a whole.
    """
    if backend.device.type == "meta":
        raise NotApplicable("the backend has shapes and no data")
    writes = 0
    for family, strategy in tiny.cases(STRATEGIES):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, family=family)
        caches = {id(buffer) for cache in engine.caches for buffer in cache.buffers}
        tiny.load(engine, 0)
        for function in (engine.prefill, engine.step):
            names = {id(tensor): name for name, tensor in buffers_of(function).items()}
            before = {
                id(t): (n, t, t.clone()) for n, t in kept(engine, "engine") if id(t) not in names
            }
            with Arguments() as arguments:
                function()
            where = f"{family}, {strategy}, {function.__name__}"
            for key, tensor in arguments.written.items():
                writes += 1
                if key not in names:
                    raise Failed(
                        f"{where}: a buffer {list(tensor.shape)} is written, and not named"
                    )
                if key in caches and key in arguments.through_views:
                    raise Failed(
                        f"{where}: {names[key]} is written through a view; write to the layer's own "
                        "tensor, so that a compiler can update it where it lies"
                    )
            for name, tensor, was in before.values():
                if not torch.equal(tensor.cpu(), was.cpu()):
                    raise Failed(f"{where}: {name} changed, and is not named among the buffers")
    return Measured(f"{writes} buffers written by torch's operators, all named")


def separate(backend: Backend) -> Measured:
    """Show that keys and values of each layer are tensors of their own, which can be donated."""
    layout = backend.kv_layout(3, 2, 16, 2, 8, torch.float32)
    with torch.inference_mode(False), torch.no_grad():
        cache = backend.allocate(layout)
    for side in ("keys", "values"):
        for layer, tensor in enumerate(getattr(cache, side)):
            if tensor._is_view():
                raise Failed(
                    f"the {side} of layer {layer} are a view of a larger tensor: every write in a "
                    "compiled step copies all of it; allocate one tensor per layer"
                )
    return Measured(f"{len(cache.buffers)} tensors, none a view")


CHECKS: dict[str, Callable[[Backend], Measured]] = {
    "static.views": views,
    "static.buffers": named,
    "kv.separate": separate,
}
