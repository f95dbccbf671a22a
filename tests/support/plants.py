"""Faults to plant in the core, each with the check of the kit that must catch it.

``support.faults`` has those of a backend's methods.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch

import lantern_accel.decoding.buckets as buckets
import lantern_accel.decoding.engine as engine_module
import lantern_accel.decoding.host_loop as host_loop
from lantern_accel.decoding.sources.tree import TreeDrafts
from lantern_accel.device.backend import Backend, Conformance, Stopwatch
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.testing import tiny
from support.engines import Late

Plant = Callable[[pytest.MonkeyPatch, Backend], None]


def after(owner: type, name: str, act: Callable[..., None]) -> Plant:
    """Do something wrong behind every call of a method of ``owner``, with what it was given."""

    def plant(patch: pytest.MonkeyPatch, backend: Backend) -> None:
        real = getattr(owner, name)

        def wrong(self, *given):
            real(self, *given)
            act(self, *given)

        patch.setattr(owner, name, wrong)

    return plant


def after_commit(act: Callable[..., None]) -> Plant:
    """Do something wrong at the end of every step of a tree."""
    return after(TreeDrafts, "commit", lambda _, state, *rest: act(state))


def after_step(act: Callable[..., None]) -> Plant:
    """Do something wrong behind every step, whoever does it."""
    return after(engine_module.Engine, "step", lambda engine, *rest: act(engine.state))


def method(name: str, make: Callable[[Callable], Callable]) -> Plant:
    """Replace a method of the opened backend."""

    def plant(patch: pytest.MonkeyPatch, backend: Backend) -> None:
        patch.setattr(backend, name, make(getattr(backend, name)))

    return plant


def counting(state) -> None:
    counting.n += 1
    state.quality_loss.add_(1e-9 * counting.n).sub_(1e-9 * counting.n)


counting.n = 0


def rebinding(state) -> None:
    state.length = state.length + 0


def last_argmax(patch: pytest.MonkeyPatch, backend: Backend) -> None:
    real = torch.Tensor.argmax

    def argmax(self, dim=None, keepdim=False):
        if not self.is_floating_point():
            return real(self, dim=dim, keepdim=keepdim)
        return self.shape[dim] - 1 - real(self.flip(dim), dim=dim, keepdim=keepdim)

    patch.setattr(torch.Tensor, "argmax", argmax)


def spilling(write):
    def wrong(kv, layer, address, k, v):
        write(kv, layer, address, k, v)
        kv.keys[0].view(-1)[0] += 1

    return wrong


def forgetful(real):
    """Draw every code from the same weights."""

    def wrong(weights, uniforms, *rest):
        if uniforms.dim() < weights.dim():
            return real(weights, uniforms, *rest)
        return torch.stack([real(weights, one, *rest) for one in uniforms.unbind(-1)], dim=-1)

    return wrong


def restless(scan):
    """Add in another order every time, as a long row is scanned in pieces."""
    times = count()

    def wrong(weights):
        found = scan(weights)
        return torch.where(
            found > found[..., -1:] / 2, found * (1 + 1e-7 * (next(times) % 3)), found
        )

    return wrong


def falling(scan):
    def wrong(weights):
        found = scan(weights)
        found[..., 1::2] -= 2e-6
        return found

    return wrong


def refusing(rule: str) -> Plant:
    """Give the backend a rule against one operator that every step runs."""
    rules = {rule: lambda func, args, kwargs: "too hot" if "argmax" in func.name() else ""}
    return method("conformance", lambda real: lambda: Conformance(rules))


class Forgets(Late):
    """A copy that arrives nine steps late."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source, 9)  # more than between two copies: one is under way at any time


class Remembers(Forgets):
    """Forgets nothing when a request is cancelled."""

    def clear(self) -> None:
        pass


def without_views(linear):
    """Refuse weights from outside the inference mode, as a runtime does that makes no views of them."""

    def strict(x, weight, bias=None):
        if torch.is_inference_mode_enabled() and not weight.is_inference():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return linear(x, weight, bias)

    return strict


def rising() -> Callable[[], dict[str, int]]:
    numbers = count()
    return lambda: {"graphs": next(numbers)}


class Hasty(Stopwatch):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.seconds *= 0.5


def kept_view(real):
    """Keep a slice of the cache's slots from construction, as the reference once did."""

    def build(backend, *args, **kwargs):
        engine = real(backend, *args, **kwargs)
        engine.verifying.scratch = engine.verifying.slots[:4].expand(2, -1)
        return engine

    return build


def one_cache_tensor(backend: Backend) -> Callable:
    """Allocate one tensor for all layers, and let each layer's keys and values be views of it."""

    def allocate(layout):
        whole = torch.zeros(2, layout.layers, *layout.shape, dtype=layout.dtype)
        return KVCache(layout, tuple(whole[0]), tuple(whole[1]))

    return allocate


def spreads(real):
    """Write keys through a view of the layer's tensor."""

    def write(kv, layer, address, k, v):
        kv.keys[layer].view(kv.keys[layer].shape).add_(0)
        real(kv, layer, address, k, v)

    return write


def reach(name: str, make: Callable[[Callable], Callable]) -> Plant:
    """Replace a method of what chooses each step's bucket."""

    def plant(patch: pytest.MonkeyPatch, backend: Backend) -> None:
        patch.setattr(buckets.BucketChooser, name, make(getattr(buckets.BucketChooser, name)))

    return plant


def uncounted(patch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Choose each step's bucket by the lengths that were read, and by no step since."""
    patch.setattr(host_loop.HostLoop, "_since", 0)


def without_nodes(init):
    """Leave what a step writes and sees behind the committed positions out of what it needs."""

    def wrong(self, sizes, g):
        init(self, sizes, g)
        self.fixed -= g.ahead

    return wrong


class Boasts(Replay):
    """Calls Python, and says that it is compiled."""

    captured = True
    kind = "compiled"


class Silent(Boasts):
    """Traces at each call, and does not say what that costs."""

    kind = "traced"


MUTANTS: list[tuple[str, str, Plant]] = [
    ("a hidden .item()", "static.host_read", after_commit(lambda s: s.length.sum().item())),
    ("a boolean index", "static.dynamic_shape", after_commit(lambda s: s.tokens[s.tokens > 3])),
    ("float64", "static.float64", after_commit(lambda s: s.quality_loss.double())),
    ("a double in a comparison", "static.float64", after_commit(lambda s: s.quality_loss > 0.3)),
    ("a view kept from construction", "static.views",
     lambda patch, backend: patch.setattr(tiny, "tiny_engine", kept_view(tiny.tiny_engine))),
    ("a buffer that is not named", "static.buffers",
     lambda patch, backend: patch.setattr(
         engine_module, "GIVEN", (*engine_module.GIVEN, "quality_loss"))),
    ("a cache written through a view", "static.buffers", method("write", spreads)),
    ("a replay that boasts", "replay.kind",
     method("capture", lambda real: lambda step, name: Boasts(step))),
    ("a tracing that is not told", "replay.kind",
     method("capture", lambda real: lambda step, name: Silent(step))),
    ("a draw", "static.device_generator",
     after_commit(lambda s: torch.rand_like(s.quality_loss).uniform_())),
    ("a Python int that changes", "static.one_graph", after_commit(counting)),
    ("a slot handed out twice", "kv.slots",
     after_step(lambda s: s.slot_of[:, 5].copy_(s.slot_of[:, 2]))),
    ("a scan that is not repeatable", "draw.scan", method("scan", restless)),
    ("a buffer that moves", "kv.addresses", after_step(rebinding)),
    ("a wrong tie-break", "accept.ties", last_argmax),
    ("a bucket left too late", "replay.buckets",
     reach("size", lambda real: lambda self, length: real(self, max(length - 1, 0)))),
    ("a bucket that does not hold its step's nodes", "replay.buckets",
     reach("__init__", without_nodes)),
    ("steps that no report has counted yet, forgotten", "replay.buckets",
     uncounted),
    ("an inference mode without views", "decode.weights_from_outside",
     method("linear", lambda real: without_views(real))),
    ("a dtype without a kernel", "static.dtypes", refusing("dtypes")),
    ("an index that is too wide", "static.indices", refusing("indices")),
]  # fmt: skip
