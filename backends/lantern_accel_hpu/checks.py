"""This backend's own conformance checks: what a Gaudi must show beyond what every device must."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_accel.errors import BackendError
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, on_card, within
from lantern_accel_hpu import cards, operators
from lantern_accel_hpu.graphs import Compiled
from lantern_accel_hpu.kernels import HPUOps

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend

#: What a driver says, and what a user must read.
DRIVER_TEXTS = {
    "synStatus=20 [Device already acquired] Device acquire failed.": "another process holds it",
    "synStatus=26 [Generic failure] Device acquire failed.": "another process holds it",
    "synStatus=8 [Device not found] Device acquire failed. No devices found.": "no free Gaudi",
    "Graph compile failed. synStatus=synStatus 26 [Generic failure].": "compiler refused a graph",
    "synStatus=17 [Device reset]": "the Gaudi stopped working",
}

#: Largest difference of a fused kernel from the plain operators, for values of about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
ROWS, NODES, HEADS, WIDTH = 3, 7, 4, 64


# No graph can hold a generator; torch leaves the decorator untyped.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _attention(ops: HPUOps, dtype: torch.dtype) -> Tensor:
    """Attend under a tree's mask, over two blocks of a cache."""
    slots = 2 * 128
    q = _random(1, ROWS, NODES, HEADS, WIDTH).to(dtype).to(ops.device)
    k, v = (_random(n, ROWS, slots, HEADS, WIDTH).to(dtype).to(ops.device) for n in (2, 3))
    visible = torch.zeros(ROWS, 1, NODES, slots, dtype=torch.bool)
    visible[..., :140] = True
    visible[..., 140 : 140 + NODES] = torch.eye(NODES, dtype=torch.bool)
    return ops.attend_dense(q, k, v, ops.mask(visible.to(ops.device), dtype))


def _norm(ops: HPUOps, dtype: torch.dtype) -> Tensor:
    """Normalise on four axes and on three."""
    x = _random(4, ROWS, NODES, HEADS, WIDTH).to(dtype).to(ops.device)
    weight = (1 + 0.1 * _random(5, WIDTH)).to(dtype).to(ops.device)
    wide = (1 + 0.1 * _random(6, HEADS * WIDTH)).to(dtype).to(ops.device)
    four = ops.rms_norm(x, weight, 1e-5)
    return torch.cat((four, ops.rms_norm(x.flatten(2), wide, 1e-5).view(x.shape)))


def _rotary(ops: HPUOps, dtype: torch.dtype) -> Tensor:
    """Turn by angles for all rows, and by each row's own."""
    x = _random(7, ROWS, NODES, 2, HEADS, WIDTH).to(dtype).to(ops.device)
    turned = []
    for rows in (1, ROWS):
        angles = _random(8, rows, NODES, 1, 1, WIDTH // 2).to(ops.device)
        turned.append(ops.rotate(x, ops.rotary(angles.cos(), angles.sin())))
    return torch.cat(turned)


#: What runs each fused kernel as a step does.
KERNELS = {"sdpa": _attention, "rms_norm": _norm, "rotary": _rotary}


def compare(backend: Backend, kernel: str) -> Measured:
    """Run a function with the device's kernel and with the plain operators, in both dtypes."""
    on_card(backend, f"{kernel}: Habana's kernels run on it alone")
    assert isinstance(backend, HPUOps)
    if getattr(backend.kernels, kernel) is None:
        raise NotApplicable(f"this SDK has no fused {kernel}, or fused=false was asked for")
    plain, run = HPUOps(), KERNELS[kernel]
    plain.device = backend.device
    worst, allowed = 0.0, 1.0
    for dtype, tolerance in TOLERANCE.items():
        one, other = run(backend, dtype).float().cpu(), run(plain, dtype).float().cpu()
        error = float((one - other).abs().max())
        within(error, tolerance, f"{kernel} in {dtype}")
        if error / tolerance >= worst / allowed:
            worst, allowed = error, tolerance
    return within(worst, allowed, f"fused {kernel} against plain operators")


def writes(backend: Backend) -> Measured:
    """Write twice to one cache in one captured function: both writes must be there afterwards.

    ``hpu_backend`` loses the second of two ``index_copy_`` to a buffer; see :meth:`.HPUOps.write`.
    """
    layout = replace(backend.kv_layout(1, 2, 64, HEADS, WIDTH, torch.float32), rewritten=True)
    found = []
    for captured in (False, True):
        cache = backend.allocate(layout)
        slots = torch.tensor([[1, 2, 3], [4, 5, 6]], device=backend.device)
        target = torch.tensor([[40, 41], [42, 43]], device=backend.device)
        new = _random(9, 2, 3, HEADS, WIDTH).to(backend.device)

        def step(
            cache: Any = cache, slots: Any = slots, target: Any = target, new: Any = new
        ) -> None:
            backend.write(cache, 0, backend.address(cache, slots), new, new + 1)
            backend.write(cache, 0, backend.address(cache, target), new[:, :2] + 2, new[:, :2] + 3)

        replay = backend.capture(step, "writes") if captured else None
        for buffer in cache.buffers:
            buffer.zero_()
        (replay or step)()
        backend.synchronize()  # what comes after is not part of the step
        found.append(torch.stack([buffer.cpu() for buffer in cache.buffers]))
        if replay is not None:
            replay.release()
    if not torch.equal(*found):
        raise Failed("a captured function that writes to a cache twice loses one of the two writes")
    return Measured("two writes in one captured function are both kept")


def written_once(backend: Backend) -> Measured:
    """Count the writes of prefill and step: more than one only to a cache that says it is rewritten."""
    real = backend.write
    engines = 0
    for family, strategy in tiny.cases(("vanilla", "eagle", "eagle2", "lantern++", "scd", "self")):
        engine = tiny.tiny_engine(backend, strategy, family=family)
        tiny.load(engine, 0)
        for name in ("prefill", "step"):
            count: Counter[tuple[int, int]] = Counter()

            def counting(kv: Any, layer: int, *rest: Any, count: Any = count) -> None:
                count[id(kv), layer] += not kv.layout.rewritten
                real(kv, layer, *rest)

            vars(backend)["write"] = counting
            try:
                getattr(engine, name)()
            finally:
                del vars(backend)["write"]
            if (most := max(count.values(), default=0)) > 1:
                raise Failed(
                    f"{family}, {strategy}: the {name} writes one layer of a cache {most} times, and its "
                    "layout does not say that it is rewritten"
                )
        engines += 1
    return Measured(f"{engines} engines write a cache once, or say that they rewrite it")


def in_place(backend: Any) -> Measured:
    """Read off the generated graph that a step writes the target's cache where it lies."""
    if not backend.simulated:
        raise NotApplicable("a card's bridge shows no graph")
    from lantern_accel_hpu.software import dynamo

    engine = tiny.tiny_engine(backend, "lantern++")
    tiny.start(engine, 0)
    dynamo.writes.clear()
    with torch.inference_mode():
        Compiled(backend.watch, engine.step, "check").release()
    made = dynamo.writes
    layout = engine.caches[0].layout
    drafted = [one.layout for one in engine.caches[1:] if one.layout.shape == layout.shape]
    copied = made["copy_.default", layout.shape] - 2 * sum(one.layers for one in drafted)
    if copied or made["index_copy_.default", layout.shape] != 2 * layout.layers:
        raise Failed(
            f"{max(copied, 0)} of the target's {2 * layout.layers} cache buffers are copied whole in "
            "every step, rather than written in place"
        )
    return Measured(f"{2 * layout.layers} buffers are written in place")


def kernel_traces(backend: Backend) -> Measured:
    """Trace every fused kernel as a step calls it: one that breaks the graph ends the first prefill."""
    assert isinstance(backend, HPUOps)
    found = [name for name in KERNELS if getattr(backend.kernels, name)]
    if not found:
        on_card(backend, "Habana's kernels run on it alone")
        raise NotApplicable("this SDK has no fused kernels, or fused=false was asked for")
    for name in found:
        traced = torch.compile(KERNELS[name], backend="eager", fullgraph=True, dynamic=False)
        try:
            traced(backend, torch.float32)
        except torch._dynamo.exc.TorchDynamoException as error:
            said = " ".join(str(error).splitlines()[:2])
            raise Failed(f"the kernel {name} cannot be part of one graph: {said}") from error
    return Measured(f"{len(found)} kernels traced in one graph each")


def cards_index(backend: Any) -> Measured:
    """Show that torch's hpu:0 is the card that was asked for; torch knows no other index."""
    if backend.device != torch.device("hpu", 0):
        raise Failed(
            f"the device is {backend.device}; torch knows hpu:0 alone, whichever card it is"
        )
    wanted = backend.module
    if wanted is None:
        return Measured("hpu:0, a card of the driver's choice")
    if cards.module(os.environ) != wanted:
        raise Failed(
            f"module {wanted} was asked for, and the driver reads {cards.module(os.environ)}"
        )
    given = getattr(backend.bridge.hpu, "module_id", lambda: wanted)()
    if given != wanted:
        raise Failed(f"module {wanted} was asked for, and this process has module {given}")
    return Measured(f"hpu:0 is module {wanted}")


def cards_errors(backend: Backend) -> Measured:
    """Give the driver's texts about a busy, absent or lost card: each becomes an error with a way out."""
    for text, words in DRIVER_TEXTS.items():
        found = backend.explain(RuntimeError(text))
        if not isinstance(found, BackendError) or words not in str(found):
            raise Failed(f"{text!r} becomes {str(found)!r}; it should say {words!r}")
    return Measured(f"{len(DRIVER_TEXTS)} texts of the driver become errors with a way out")


def fallback(backend: Any) -> Measured:
    """Compile writes around an operator that may have no kernel: it is named, or the order is kept.

    Parts of a graph that is left for an operator can write state before others have read it.
    """
    if backend.bridge.config is None or backend.bridge.lazy:
        raise NotApplicable("this mode of the bridge has no hpu_backend")
    state, seen, other, last = (torch.zeros(4, device=backend.device) for _ in range(4))
    places = torch.tensor([3, 2, 1, 0], device=backend.device)

    def step() -> None:
        seen.copy_(other[places] * 0 + state)
        state.add_(1)
        last.copy_(state[places])

    try:
        with torch.inference_mode():
            replay = Compiled(backend.watch, step, "check")
    except BackendError as error:
        if "fallback" not in str(error):
            raise
        return Measured("an operator without a kernel is named")
    runs = int(state[0].cpu())
    replay.release()
    if not bool((seen.cpu() == runs - 1).all()) or not bool((last.cpu() == runs).all()):
        raise Failed("a step that leaves its graph for an operator reads state that it wrote later")
    return Measured(f"{runs} runs read state before they wrote it")


def dispatched_operators(backend: Backend) -> Measured:
    """Run every strategy on the software HPU and look at what reached the device's dispatch key.

    What torch composes (``zeros``, ``stack``, ...) is seen here as the operators that it is made of.
    """
    if not backend.simulated:
        raise NotApplicable("a card's bridge counts its own fall-backs, see counters()")
    from lantern_accel_hpu.software import hpu

    seen: dict[str, str] = {}
    for strategy in STRATEGIES:
        for temperature in (0.0, 1.0):
            engine = tiny.tiny_engine(backend, strategy, batch=2, temperature=temperature)
            tiny.load(engine, 0)
            hpu.reset_kernels()
            engine.prefill()
            engine.step()
            for name in hpu.kernels():
                seen.setdefault(name, f"{strategy}, temperature {temperature:g}")
    for name, where in seen.items():
        base = name.partition(".")[0]
        if not {base, base.rstrip("_")} & operators.names() and base not in operators.EXCEPTIONS:
            raise Failed(f"{where}: {name} reaches the device, and no kernel is listed for it")
    return Measured(f"{len(seen)} kernels, all listed")


def checks() -> dict[str, Callable[[Backend], Measured]]:
    """Return the checks by name."""
    return {
        "static.kernels": dispatched_operators,
        "kernels.attention": functools.partial(compare, kernel="sdpa"),
        "kernels.norm": functools.partial(compare, kernel="rms_norm"),
        "kernels.rotary": functools.partial(compare, kernel="rotary"),
        "kernels.writes": writes,
        "kernels.written_once": written_once,
        "graphs.in_place": in_place,
        "kernels.traced": kernel_traces,
        "graphs.fallback": fallback,
        "cards.index": cards_index,
        "cards.errors": cards_errors,
    }
