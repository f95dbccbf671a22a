"""Layer by layer: what lies between a whole step as one graph and its operators one by one.

Where the compiler refuses a whole step, the blocks of its trunk are compiled one by one, as the vendor's
serving code does: a block's weights and its part of the cache are inputs, so that all layers of a model
share one graph. A step's drafts are another graph, and all behind its pass is a third; what is left of
the pass runs operator by operator.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device.kv_cache import KVCache, Pass
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import NotCapturableError
from lantern_accel_hpu import faults
from lantern_accel_hpu.bridge import Bridge
from lantern_accel_hpu.graphs import Step, Warmed, Watch, compile_step

Layer = Callable[..., Tensor]


class Layers:
    """The compiled blocks of all functions that run layer by layer; ``calls``: blocks that have run."""

    def __init__(self, bridge: Bridge, ops: TensorOps) -> None:
        self.calls = 0
        self._bridge, self._ops = bridge, ops
        self._made: dict[Hashable, Layer] = {}

    @contextlib.contextmanager
    def region(self, part: Callable[..., Any] | None) -> Iterator[None]:
        """Run the block with ``part`` for what runs parts of a step; None: blocks are what they are."""
        before, self._ops.region = self._ops.region, part
        try:
            yield
        finally:
            self._ops.region = before

    def of(self, block: nn.Module) -> Layer:
        """Return what stands for a block in a pass: it takes what the block takes."""
        return functools.partial(self._run, block)

    def _run(
        self, block: nn.Module, x: Tensor, layer: int, at: Pass, ops: TensorOps, rotary: Any
    ) -> Tensor:
        self.calls += 1
        assert at.cache is not None and at.address is not None and at.mask is not None
        cache, form = at.cache, type(rotary)
        seen, cos, sin = (_lying(one) for one in (at.mask, rotary.cos, rotary.sin))
        shapes = [one.shape for one in (x, at.mask, seen, rotary.cos, cos, rotary.sin, sin)]
        key = (x.dtype, *shapes, cache.layout, form)
        if key not in self._made:
            whole = (at.mask.shape, rotary.cos.shape, rotary.sin.shape)
            self._made[key] = self._compile(cache, whole, form)
        buffers = cache.keys[layer], cache.values[layer]
        return self._made[key](block, x, *buffers, at.address, seen, cos, sin)

    def _compile(self, cache: KVCache, whole: tuple[torch.Size, ...], form: Any) -> Layer:
        """Compile a block for the shapes of a pass; ``whole``: of mask, cosines and sines."""
        layout, ops = replace(cache.layout, layers=1), self._ops

        def run(
            block: nn.Module,
            x: Tensor,
            keys: Tensor,
            values: Tensor,
            address: Tensor,
            *narrow: Tensor,
        ) -> Tensor:
            mask, cos, sin = (one.expand(size) for one, size in zip(narrow, whole, strict=True))
            one = KVCache(layout, (keys,), (values,))
            out: Tensor = block(x, 0, Pass(cos, sin, mask, one, address), ops, form(cos, sin))
            return out

        return compile_step(self._bridge, run, "layer")


def _lying(tensor: Tensor) -> Tensor:
    """Return a broadcast view without its repetitions: what a graph reads must lie in memory."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _apart(value: Any) -> Any:
    """Copy what a part returns: a view may be no result, nor show what a later part writes."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: _apart(getattr(value, one.name)) for one in fields(value)}
        )
    return value


class Layered(Warmed):
    """A step whose trunk runs block by block, each one compiled graph, and the rest by operators."""

    retreats = True

    def __init__(self, watch: Watch, step: Step, name: str, layers: Layers) -> None:
        self._layers = layers
        #: Parts of the step as graphs, or as they are where that was refused.
        self._parts: dict[Callable[..., Any], Callable[..., Any]] = {}
        super().__init__(watch, step, name)

    def _prepare(self) -> None:
        before = self._layers.calls
        super()._prepare()
        if self._layers.calls == before:
            raise NotCapturableError(f"the {self.name} has no layers")

    def _part(self, part: Callable[..., Any], *given: Any) -> Any:
        """Run a part of the step as one graph, in which blocks are what they are."""
        with self._layers.region(None):
            run = self._parts.get(part)
            return self._first(part, given) if run is None else run(*given)

    def _first(self, part: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Compile a part, run it and wait; where it is refused, run it as it is, now and later."""
        name = part.__name__.strip("_")
        run = compile_step(self._bridge, lambda *given: _apart(part(*given)), name)
        self._parts[part] = run
        try:
            out = run(*given)
            self._bridge.synchronize()
            return out
        except Exception as error:
            if any(faults.of_the_card(one) for one in (error, *self._bridge.drain())):
                raise
        self._parts[part] = part
        return part(*given)

    def _run(self) -> None:
        with self._layers.region(self._part):
            super()._run()

    def release(self) -> None:
        """Forget the graphs of parts, which hold the step's buffers."""
        super().release()
        self._parts.clear()
