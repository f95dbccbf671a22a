"""This backend's own conformance checks: what XLA must show beyond what every device must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lantern_accel.device.capture import buffers_of
from lantern_accel.errors import BackendError
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing
from lantern_accel_xla.programs import Program

#: Steps of different content, in requests of different prompts.
STEPS = 200


def texts(backend: Any) -> Iterator[tuple[str, str]]:
    """Go through every case; prefill and step as one HLO program, which is traced and not compiled."""
    runtime = backend.runtime
    for family, strategy in tiny.cases(STRATEGIES, turn=0):
        for temperature in (1.0, 0.0):
            where = f"{family}, {strategy}, temperature {temperature:g}"
            doing(where)
            engine = tiny.tiny_engine(backend, strategy, family=family, temperature=temperature)
            tiny.load(engine, 0)
            backend.synchronize()
            with backend.capturing(), runtime.tracing("text"):
                engine.prefill()
                engine.step()
            buffers = list(engine.changes.values())
            waits = runtime.pending(buffers)
            text = runtime.text([one for one, wait in zip(buffers, waits, strict=True) if wait])
            runtime.forget()
            yield where, text


def float64(backend: Any) -> Measured:
    """Look through the programs' text for double precision, which a Python float can introduce."""
    lines = 0
    for where, text in texts(backend):
        for line in text.splitlines():
            lines += 1
            if "f64[" in line:
                raise Failed(
                    f"{where}: the program has double precision: {line.strip()[:200]}; make a float32 "
                    "tensor of the Python float that is compared"
                )
    return Measured(f"no f64 in {lines} lines of HLO")


def donation(backend: Any) -> Measured:
    """Count the buffers that a step writes where they lie: every cache must be among them."""
    if backend.options.mode != "program":
        raise NotApplicable(
            "donations are this backend's own in the mode 'program'; the runtime's else"
        )
    found = []
    for strategy in ("lantern++", "scd"):
        doing(strategy)
        engine = tiny.tiny_engine(backend, strategy)
        tiny.start(engine, 0)
        replay = backend.capture(engine.step, "step")
        assert isinstance(replay, Program)
        names = {id(one): name for name, one in buffers_of(engine.step).items()}
        caches = {id(one) for cache in engine.caches for one in cache.buffers}
        lost = [names[key] for key in caches - replay.donors]
        found.append(f"{strategy}: {len(replay.donors)} of {len(replay.changed)} buffers")
        replay.release()
        if lost:
            raise Failed(f"{strategy}: {', '.join(sorted(lost))} copied in every step, not donated")
    return Measured("; ".join(found))


def refuses(backend: Any) -> Measured:
    """Capture a host read and a step that is another one each time: both are refused with a way out."""
    if backend.options.mode == "eager":
        raise NotApplicable("the mode 'eager' captures nothing")
    state = torch.zeros(4, device=backend.device)
    times = [0]

    def reads() -> None:
        state.add_(float(state.sum()))

    def grows() -> None:
        times[0] += 1
        for _ in range(times[0]):
            state.mul_(state)

    def counts() -> None:
        times[0] += 1
        state.add_(1.5 * times[0])

    wrong = [(reads, "value on the host"), (grows, "program")]
    if backend.options.mode == "program":  # one that is traced at each call has the right number
        wrong.append((counts, "program"))
    for function, words in wrong:
        try:
            replay = backend.capture(function, function.__name__)
            replay()
            replay()
        except BackendError as error:
            if words not in str(error):
                raise Failed(f"{function.__name__} is refused with {str(error)!r}") from error
        else:
            raise Failed(
                f"a step that {function.__name__} was captured, and replays the first trace"
            )
    return Measured("a host read, a second program and another number are refused")


def transfers(backend: Any) -> Measured:
    """Run steps of different prompts: none compiles, and none moves anything but the lagged lengths."""
    engine = tiny.tiny_engine(backend, "lantern++")
    copy = backend.host_copy(engine.state.length)
    prefill, step = backend.capture(engine.prefill, "prefill"), backend.capture(engine.step, "step")
    try:
        steps = reads = 0
        moved = dict.fromkeys(("compilations", "transfers.to_device", "transfers.from_device"), 0)
        for seed in range(STEPS):
            tiny.start(engine, seed, prefill)
            backend.synchronize()
            copy.clear()
            if seed < 2:  # what a request moves and compiles the first time
                step()
                copy.post()
                copy.read()
                continue
            before = backend.runtime.metrics()
            for _ in range(10):
                step()
                copy.post()
                steps += 1
                if steps % 10 > copy.lag:
                    copy.read()
                    reads += 1
            backend.runtime.wait()
            after = backend.runtime.metrics()
            moved = {name: moved[name] + after[name] - before[name] for name in moved}
            if steps >= STEPS:
                break
    finally:
        prefill.release()
        step.release()
    if moved["compilations"] or moved["transfers.to_device"]:
        raise Failed(f"in {steps} steps after warm-up: {moved}")
    if moved["transfers.from_device"] != reads:
        raise Failed(
            f"{reads} lengths were read, and {moved['transfers.from_device']} buffers moved"
        )
    return Measured(
        f"{steps} steps: nothing compiled, nothing moved but {reads} lengths that were read"
    )


def copies(backend: Any) -> Measured:
    """Read a counter late, by a copy made before its step was captured and by one made after."""
    for early in (True, False):
        counter = torch.zeros(3, device=backend.device)

        def count(counter: torch.Tensor = counter) -> None:
            counter.add_(1)

        backend.synchronize()
        copies = [backend.host_copy(counter)] if early else []
        step = backend.capture(count, "step")
        copies.append(backend.host_copy(counter))
        try:
            for copy in copies:
                start = int(counter.cpu()[0])
                for _ in range(4):
                    step()
                    copy.post()
                read = [int(copy.read()[0]) for _ in range(4)]
                if read != [start + one for one in (1, 2, 3, 4)]:
                    raise Failed(f"four steps from {start} on were read as {read}")
        finally:
            step.release()
    return Measured("copies made before and after capture read every step's value")


CHECKS: dict[str, Callable[[Any], Measured]] = {
    "xla.float64": float64,
    "xla.donation": donation,
    "xla.refuses": refuses,
    "xla.transfers": transfers,
    "xla.copies": copies,
}
