"""A fault in every method of the backend interface, as a vendor's own method would have it.

Each is a subclass of the backend that ``lantern-accel port`` writes, with one method that is wrong, and
has the check that must find it and words that must name it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lantern_accel.porting
from lantern_accel.decoding.accept import Accepted, accept, accept_invariant
from lantern_accel.decoding.logits import Filters, TokenChooser
from lantern_accel.decoding.rule import Rule
from lantern_accel.device import noise
from lantern_accel.device.backend import Backend, Conformance, MemoryUse, Support
from lantern_accel.device.capture import Replay
from lantern_accel.device.plan import FusedStep
from lantern_accel.device.sampling import Tables
from lantern_accel.nn.rounding import Rounded
from lantern_accel.strategy.rules import Exact, LanternPP
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing import attention, host, operations, rotation, tiny, trunks
from lantern_accel.testing import noise as noise_checks
from support.plants import Hasty, Remembers, falling, forgetful, one_cache_tensor, rising, spilling

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def scaffold() -> type[Backend]:
    """The class of a backend as ``lantern-accel port`` writes it."""
    path = Path(lantern_accel.porting.__file__).parent / "template/lantern_accel_abacus/backend.py"
    spec = importlib.util.spec_from_file_location("lantern_accel_abacus_template", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: type[Backend] = module.DeviceBackend
    return made


@dataclass(frozen=True)
class Fault:
    """``make``: the wrong method, made of the right one, bound; ``says``: a part of what is told."""

    words: str
    method: str
    check: str
    says: str
    make: Make

    def backend(self, dtype: torch.dtype | None = None) -> Backend:
        """An opened backend that has the fault; ``dtype``: only where it is called with one of it."""
        parent, name, make = scaffold(), self.method, self.make
        made: list[Callable[..., Any]] = []

        def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            right = getattr(super(kind, self), name)
            if dtype is not None and all(getattr(one, "dtype", None) != dtype for one in args):
                return right(*args, **kwargs)
            if not made:
                made.append(make(right))
            return made[0](*args, **kwargs)

        kind = type("DeviceBackend", (parent,), {name: wrong})
        if dtype is not None:
            kind.compute_dtypes = lambda self: (torch.float32, dtype)  # type: ignore[method-assign]
        return kind(0)  # the scaffold's takes the device's number


def few_cases(
    strategies: tuple[str, ...], *others: tuple[str, ...], turn: int | None = None
) -> list[tuple[str, str]]:
    """The first strategy with the first family, or both of two."""
    return [("llamagen", one) for one in strategies[: 1 if len(strategies) > 2 else 2]]


def small_shapes(patch: pytest.MonkeyPatch) -> None:
    """Let the checks run on few and small shapes: a fault of every shape shows in them."""
    patch.setattr(operations, "MATRICES", ((100, 37), (64, 48)))
    patch.setattr(operations, "HEADS", ((100, 417),))
    patch.setattr(operations, "NORMS", ((64, 1e-5), (37, 1e-6)))
    patch.setattr(operations, "HIDDEN", (48, 37))
    patch.setattr(rotation, "HEADS", ((2, 16), (3, 20)))
    patch.setattr(attention, "HEADS", ((3, 16),))
    patch.setattr(trunks, "STACKS", ((4, 8, 48, 1e-5),))
    patch.setattr(noise_checks, "VOCABS", (48,))
    patch.setattr(host, "family_names", lambda: ["llamagen"])
    patch.setattr(host, "DRAWN", ("vanilla", tiny.BY_HEAD))
    patch.setattr(tiny, "cases", few_cases)


# --- what is wrong --------------------------------------------------------------------------------


def after(spoil: Callable[[Any], Any]) -> Make:
    """Spoil what the right method gives."""
    return lambda real: lambda *given, **named: spoil(real(*given, **named))


def before(spoil: Callable[..., tuple[Any, ...]]) -> Make:
    """Spoil what the right method is given."""
    return lambda real: lambda *given: real(*spoil(*given))


def stale(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give the first result of a shape again to every later call."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kept.setdefault((*x.shape, *weight.shape), real(x, weight, bias))

    return wrong


def rows_dropped(out: Tensor) -> Tensor:
    """Leave the last row of many out, as a kernel of whole blocks does."""
    out = out.clone()
    if out.dim() == 2 and len(out) > 1:
        out[-1] = 0
    return out


def without_bias(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, bias=None: real(x, weight)


def whole_blocks(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave out what is behind the last whole block of inputs."""

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        whole = x.shape[-1] // 8 * 8
        return real(x[..., :whole], weight[:, :whole], bias)

    return wrong


def halves(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotate pairs (i, i + d/2)."""

    def wrong(x: Tensor, rotary: Any) -> Tensor:
        half = x.shape[-1] // 2
        mixed = torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)
        return real(mixed, rotary).unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)

    return wrong


def next_angles(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(qkv: Tensor, rotary: Any, *rest: Any) -> Tensor:
        return real(
            qkv, replace(rotary, **{n: v.roll(-1, 1) for n, v in vars(rotary).items()}), *rest
        )

    return wrong


def rotated_values(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(qkv: Tensor, rotary: Any, *rest: Any) -> Tensor:
        ops = real.__self__  # type: ignore[attr-defined]  # a bound method
        qkv = torch.cat((qkv[:, :, :2], ops.rotate(qkv[:, :, 2:], rotary)), dim=2)
        return real(qkv, rotary, *rest)

    return wrong


def without_mean(x: Tensor, weight: Tensor, eps: float) -> tuple[Any, ...]:
    return x - x.mean(-1, keepdim=True), weight, eps


def shallow_mask(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hide slots behind -6, not behind the smallest number."""
    return lambda visible, dtype: real(visible, dtype).clamp(min=-6.0)


def not_causal(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.zeros(len(q), 1, q.shape[1], k.shape[1])
        return real(q, k, v, mask)

    return wrong


def without_norm(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda blocks, x, at, taps=(), norm=None: real(blocks, x, at, taps)


def last_layer_first(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(blocks: Any, x: Tensor, at: Any, taps: Any = (), norm: Any = None) -> Tensor:
        return real(torch.nn.ModuleList(reversed(blocks)), x, at, taps, norm)

    return wrong


def saturating(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make noise with additions that stop at the largest word."""

    class Word(Tensor):
        """A tensor of words whose sums saturate."""

    def add(a: Any, b: Any) -> Tensor:
        a, b = (torch.as_tensor(x).as_subclass(Tensor).long() for x in (a, b))
        return (a + b).clamp(-(2**31), 2**31 - 1).int().as_subclass(Word)

    Word.__add__ = Word.__radd__ = add

    def wrong(weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        low, high, image = (keys[:, i].view(-1, 1, 1).as_subclass(Word) for i in range(3))
        half = torch.arange((weights.shape[-1] + 1) // 2, dtype=torch.int32)
        counter = (positions.int() << 16).unsqueeze(-1) | half
        pair = noise.threefry(low, high, counter.as_subclass(Word), image)
        both = torch.stack(
            [word.as_subclass(Tensor) for word in torch.broadcast_tensors(*pair)], -1
        )
        return weights / noise.exponential_of(both.flatten(-2)[..., : weights.shape[-1]])

    return wrong


def contracted(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Round once where a window's graph contracts a product and a sum: other last bits there."""

    def wrong(weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        out = real(weights, keys, positions)
        return out if positions.shape[1] == 1 else torch.nextafter(out, torch.zeros_like(out))

    return wrong


def stale_noise(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep the noise of the first request, as a table that is never made again."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def wrong(weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        made = real(torch.ones_like(weights), keys, positions)
        return weights * kept.setdefault(tuple(weights.shape), made)

    return wrong


def next_position(weights: Tensor, keys: Tensor, positions: Tensor, *rest: Any) -> tuple[Any, ...]:
    return weights, keys, positions + 1, *rest


def strict_triangle(made: Tables) -> Tables:
    assert made.sums is not None
    return Tables(made.sums - torch.eye(len(made.sums)))


EXACT = Rule(Exact(), "aggregate", None, None)


def fields_of(found: Accepted) -> tuple[Tensor, ...]:
    return tuple(getattr(found, one.name) for one in fields(found))


def filters_of(given: Any) -> Filters:
    return Filters(Sampling(top_k=given.top_k), given.temperature, 1.0)


def generous_walk(real: Any) -> Any:
    """Test every draft with a smaller uniform."""

    def wrong(
        tree: Any, logits: Any, given: Any, rule: Any, uniforms: Any, last: Any, masked: bool
    ) -> Any:
        mine = LanternPP(k=rule.k, lam=float(rule.params[0]))
        judged = Rule(mine, rule.residual, rule.neighbours, rule.params)
        filters = filters_of(given)
        return fields_of(accept(tree, logits, filters, judged, uniforms / 2, last, masked=masked))

    return wrong


def late_walk(real: Any) -> Any:
    """Race with the noise of the position before."""

    def wrong(tree: Any, logits: Any, given: Any, keys: Any, length: Any) -> Any:
        choices = TokenChooser(keys, filters_of(given), False)
        return fields_of(accept_invariant(tree, logits, choices, length - 1))

    return wrong


def idle_step(real: Any) -> Any:
    """Say that a step was done, and leave every buffer as it was."""
    return lambda plan: FusedStep(lambda logits: True, lambda: True)


def stale_keys(real: Any) -> Any:
    """Record the first request's keys of noise, and replay every other request with them."""

    def capture(step: Any, name: str) -> Replay:
        made: Replay = real(step, name)
        keys = step.__self__.state.keys
        kept = keys.clone()

        def wrong() -> None:
            now = keys.clone()
            keys.copy_(kept)
            made()
            keys.copy_(now)

        return Replay(wrong)

    return capture


def shifted_write(buffer: Any, dim: int, index: Any, values: Any) -> tuple[Any, ...]:
    return buffer, dim, (index + 1) % buffer.flatten(dim, dim + 1).shape[dim], values


def wider_step(real: Any) -> Any:
    def wrong(weight: Any, form: Any = None, drafts: bool = False) -> Any:
        made = real(weight, form, drafts)
        return replace(made, step=made.step.roll(1, 0)) if isinstance(made, Rounded) else made

    return wrong


def at_once(real: Any) -> Any:
    def wrong(weight: Any, form: Any = None, drafts: bool = False) -> Any:
        return real(weight if form is None else weight * 1.1, form, drafts)

    return wrong


FAULTS = [
    # Products.
    Fault("products a tenth too large", "linear", "operation.linear", "a factor: every value is 1.1",
          after(lambda out: out * 1.1)),
    Fault("products of the other sign", "linear", "operation.linear", "the sign", after(torch.neg)),
    Fault("a row left out", "linear", "operation.linear", "the last row is not computed",
          after(rows_dropped)),
    Fault("inputs behind whole blocks left out", "linear", "operation.linear", "linear of 100 inputs",
          whole_blocks),
    Fault("a bias that is forgotten", "linear", "operation.linear", "the bias is left out", without_bias),
    Fault("a result that is kept", "linear", "operation.linear", "linear of", stale),
    Fault("a residual that is lost", "linear_add", "operation.linear", "the residual is left out",
          lambda real: lambda x, w, residual, bias=None: real(x, w, torch.zeros_like(residual), bias)),
    Fault("a product that is taken off", "linear_add", "operation.linear", "the product is taken off",
          lambda real: lambda x, w, residual, bias=None: 2 * residual - real(x, w, residual, bias)),
    Fault("a residual written over unsaid", "linear_add", "operation.linear", "not say sums_in_place",
          lambda real: lambda x, w, r, bias=None: r.copy_(real(x, w, r, bias))),
    Fault("logits one code too far", "linear", "operation.logits", "outputs stand one place too far",
          after(lambda out: out.roll(1, -1))),
    Fault("packed rows in another order", "pack", "operation.linear", "a packed matrix, dense",
          after(lambda weight: weight.roll(1, 0))),
    Fault("steps of the next row", "pack", "operation.fewer_bits", "int8 weights", wider_step),
    Fault("a matrix rounded a tenth too large", "pack", "operation.fewer_bits", "a factor", at_once),
    # Norms, gates, rotations.
    Fault("epsilon a thousand times too large", "rms_norm", "operation.rms_norm",
          "eps is 0.01, not 1e-05", before(lambda x, w, eps: (x, w, eps * 1000))),
    Fault("no epsilon", "rms_norm", "operation.rms_norm", "eps is left out",
          before(lambda x, w, eps: (x, w, 1e-30))),
    Fault("another model's epsilon", "rms_norm", "operation.rms_norm", "eps is 1e-05, not 1e-06",
          before(lambda x, w, eps: (x, w, 1e-5))),
    Fault("a norm that centres", "rms_norm", "operation.rms_norm", "the mean is taken off first",
          before(without_mean)),
    Fault("gates of the other half", "swiglu", "operation.swiglu", "the halves are exchanged",
          before(lambda x: (x.roll(x.shape[-1] // 2, -1),))),
    Fault("a gate that is a GELU", "swiglu", "operation.swiglu", "the gate is a GELU",
          lambda real: lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    Fault("a rotation the other way", "rotary", "operation.rotate", "the sign of the rotation",
          before(lambda cos, sin: (cos, -sin))),
    Fault("every row's angles the first one's", "rotary", "operation.rotate",
          "every row has the first one's angles",
          before(lambda cos, sin: (cos[:1].expand_as(cos), sin[:1].expand_as(sin)))),
    Fault("pairs half a head apart", "rotate", "operation.rotate", "pairs are (i, i + d/2)", halves),
    Fault("the next position's angles", "rotate_write", "operation.rotate_write",
          "angles are those of the next position", next_angles),
    Fault("values that turn", "rotate_write", "operation.rotate_write", "values are rotated as well",
          rotated_values),
    # Caches.
    Fault("a layout one slot short", "kv_layout", "kv.round_trip", "",
          lambda real: lambda layers, rows, capacity, *rest: real(layers, rows, capacity - 1, *rest)),
    Fault("one tensor of all layers", "allocate", "kv.separate", "are a view of a larger tensor",
          lambda real: one_cache_tensor(real.__self__)),  # type: ignore[attr-defined]
    Fault("an address one slot too far", "address", "kv.sentinels", "writing two slots",
          before(lambda kv, slots: (kv, (slots + 1) % kv.layout.capacity))),
    Fault("a write that spills", "write", "kv.sentinels", "changed others", spilling),
    Fault("a layer that is lost", "write", "kv.round_trip", "does not come back",
          before(lambda kv, layer, *rest: (kv, 0, *rest))),
    Fault("a write to the next entry", "put", "operation.put", "put in", before(shifted_write)),
    Fault("a buffer held too late", "snapshot", "operation.put", "is not what the buffer holds",
          after(torch.zeros_like)),
    # Attention.
    Fault("a mask one slot off", "mask", "attention.float64", "each slot has the one before's",
          before(lambda seen, dtype: (seen.roll(1, -1), dtype))),
    Fault("a mask one slot short", "mask", "attention.float64", "each slot has the next one's",
          before(lambda seen, dtype: (seen.roll(-1, -1), dtype))),
    Fault("hidden slots that leak", "mask", "attention.float64", "hidden slots are not hidden enough",
          shallow_mask),
    Fault("a mask turned round", "mask", "attention.float64", "the mask is turned round",
          before(lambda seen, dtype: (~seen, dtype))),
    Fault("a mask without effect", "attend", "attention.float64", "the mask is not used",
          before(lambda q, kv, layer, mask: (q, kv, layer, torch.zeros_like(mask)))),
    Fault("scores that are not scaled", "attend", "attention.float64", "not divided by the root",
          before(lambda q, *rest: (q * q.shape[-1] ** 0.5, *rest))),
    Fault("another layer's cache", "attend", "attention.float64", "another layer's cache is read",
          before(lambda q, kv, layer, mask: (q, kv, 0, mask))),
    Fault("attention in double precision", "attend", "attention.float64",
          "the dtype is float64, expected", after(torch.Tensor.double)),
    Fault("attention of one row", "attend", "attention.float64", "the shape is [1, 1, 3, 16], expected",
          after(lambda out: out[:1])),
    Fault("attention without a number", "attend", "attention.float64", "some values are not finite",
          after(lambda out: out * float("nan"))),
    Fault("causal attention that sees ahead", "attend_dense", "attention.dense", "the mask is not used",
          not_causal),
    Fault("a stack without its last norm", "trunk", "attention.trunk", "trunk of", without_norm),
    Fault("blocks in the other order", "trunk", "attention.trunk", "trunk of", last_layer_first),
    # Draws.
    Fault("sums that fall", "scan", "draw.scan", "the running sums fall", falling),
    Fault("a triangle without its edge", "tables", "draw.codes", "", after(strict_triangle)),
    Fault("guidance with its branches exchanged", "guide", "draw.guidance", "",
          before(lambda logits, *rest: (logits.flip(0), *rest))),
    Fault("a filter that keeps one code more", "filter", "draw.filter", "codes stay or go otherwise",
          before(lambda x, f: (x, replace(f, top_k=f.top_k + bool(f.top_k))))),
    Fault("a draw one code too far", "sample", "draw.codes", "",
          after(lambda codes: (codes - 1).clamp(min=0))),
    Fault("a draw that forgets what it took", "sample", "draw.codes", "took a code twice",
          forgetful),
    Fault("largest codes in the other order", "best", "draw.likeliest", "of 48 codes: values",
          after(lambda both: tuple(one.flip(-1) for one in both))),
    Fault("the unluckiest codes", "likeliest", "draw.likeliest", "with noise",
          lambda real: lambda w, n, luck=None: real(w, n, None if luck is None else 1 / luck)),
    # Noise.
    Fault("an addition that saturates", "perturb", "draw.noise", "additions of 32-bit words saturate",
          saturating),
    Fault("the next position's noise", "perturb", "draw.noise", "noise is that of the next position",
          before(next_position)),
    Fault("a contracted multiply-add", "perturb", "draw.noise", "has other bits in", contracted),
    Fault("the first request's noise", "perturb", "draw.noise", "one over the noise of the", stale_noise),
    Fault("one image's noise for all", "perturb", "draw.noise", "every image has the first one's noise",
          before(lambda w, keys, at: (w, keys * torch.tensor([1, 1, 0], dtype=torch.int32), at))),
    Fault("a race one position late", "race", "draw.race", "weight over noise of the drawn codes",
          before(next_position)),
    # Acceptance.
    Fault("a draft accepted too many", "accept", "accept.decisions", "decisions differ", generous_walk),
    Fault("a walk one position late", "accept_invariant", "accept.invariant", "images differ", late_walk),
    Fault("a step that does nothing", "fused_step", "decode.drawn", "after 24 replays",
          idle_step),
    # What runs a step, and meters.
    Fault("a stale replay", "capture", "replay.eager", "differs from the eager one", stale_keys),
    Fault("a replay that is claimed", "support", "replay.kind", "says that it captures steps",
          lambda real: lambda name: Support(True) if name == "capture" else real(name)),
    Fault("a copy that outlives its request", "host_copy", "decode.interrupted", "",
          lambda real: Remembers),
    Fault("a rule against an operator", "conformance", "static.operators", "too hot",
          after(lambda none: Conformance(
              {"operators": lambda func, a, k: "too hot" * ("argmax" in func.name())}))),
    Fault("a graph compiled every time", "counters", "replay.stable", "after warm-up rose",
          lambda real: rising()),
    Fault("a clock that does not wait", "stopwatch", "device.stopwatch", "", lambda real: Hasty),
    Fault("a meter that stands still", "memory", "device.memory", "grew by 0 MiB",
          after(lambda none: MemoryUse(in_use=1, peak=1))),
    Fault("a meter that never moves", "energy_mj", "device.energy", "the meter shows 0.0 W",
          after(lambda none: 5)),
    Fault("noise whose words are exchanged", "noise", "draw.noise", "the two words of a counter are",
          after(lambda out: out.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))),
]  # fmt: skip

#: Methods of the interface without a fault here, and why.
WITHOUT = {
    "phase": "marks a part of a step for a profiler",
    "facts": "describes the device",
    "compute_dtypes": "lists dtypes; each is checked",
    "inference": "a mode without gradients; decode.weights_from_outside decodes in it",
    "after_fork": "runs in a child of fork alone, where a pipeline asks for nothing else",
    "flush": "launches what a lazy device has gathered",
    "synchronize": "waits; device.stopwatch shows on a card whether it does",
    "explain": "words for a vendor's error",
    "trim_memory": "gives memory back",
    "conditions": "clocks and temperatures, for reports",
    "close": "gives back what the backend holds",
}
