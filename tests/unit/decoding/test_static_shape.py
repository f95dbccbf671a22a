"""Proofs that a step has one shape: same buffers, same operators, no value read by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import (
    GREEDY,
    NAMED,
    SAMPLED,
    Models,
    engine_of,
    finish,
    start,
)
from support.tiny import tiny_models
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.decoding.engine import Engine
from lantern_accel.families.llamagen.drafter import LlamaGenDrafter
from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.strategy.values import (
    Sampling,
    Strategy,
)


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models(0)


def buffers(engine: Engine) -> dict[str, Tensor]:
    found = dict(engine.state.buffers)
    for name, cache in zip(("target", "drafter"), engine.caches, strict=False):
        for i, buffer in enumerate(cache.buffers):
            found[f"{name} cache {i}"] = buffer
    return found


@pytest.mark.parametrize("name", ["vanilla", "eagle2", "lantern++"])
def test_buffers_keep_their_address(models: Models, name: str) -> None:
    engine = engine_of(models, NAMED[name], SAMPLED, batch=2)
    before = {k: v.data_ptr() for k, v in buffers(engine).items()}
    first = finish(engine, seed=1)
    finish(engine, [3, 4], seed=2)
    assert {k: v.data_ptr() for k, v in buffers(engine).items()} == before
    # Nothing of the call between is left.
    assert torch.equal(finish(engine, seed=1).tokens, first.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMED)
def test_steps_after_the_end_change_nothing(models: Models, name: str, sampling: Sampling) -> None:
    engine = engine_of(models, NAMED[name], sampling, batch=3)
    finish(engine)
    skip = {"step", "last_path", "last_length", "tokens"}
    before = {k: v.clone() for k, v in engine.state.buffers.items()}
    g, cache = engine.geometry, engine.verifying.cache
    known = engine.verifying.branches.rows(engine.state.slot_of[:, : g.tokens - 1]) + g.prefix
    kept = cache.read(1, known)
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
    for key, value in engine.state.buffers.items():
        if key not in skip:
            assert torch.equal(value, before[key]), key
    # Column 36 is where finished images write to.
    assert torch.equal(engine.state.tokens[:, :36], before["tokens"][:, :36])
    assert all(map(torch.equal, cache.read(1, known), kept))
    assert (engine.state.last_length == -1).all()


class Recorder(TorchDispatchMode):
    """Lists operators with the shapes they return; refuses those that the host must wait for."""

    BARRED = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "item",
        "unique",
        "equal",
        "bincount",
        "repeat_interleave",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.BARRED:
            raise AssertionError(f"{name} makes the host wait for the device")
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in masks):
            raise AssertionError("an index by mask has a shape that depends on values")
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else (out,)
        shapes = tuple(tuple(r.shape) for r in results if isinstance(r, Tensor))
        self.seen.append((str(func), shapes))
        return out


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, SAMPLED) for name in ("vanilla", "eagle2", "lantern++")),
        *(pytest.param(name, SAMPLED, marks=pytest.mark.long) for name in ("eagle", "lantern")),
        ("vanilla", GREEDY),
        ("lantern++", GREEDY),
    ],
)
def test_every_step_runs_the_same_operators_and_reads_nothing(
    models: Models, name: str, sampling: Sampling
) -> None:
    engine = engine_of(models, NAMED[name], sampling, batch=2)
    start(engine)
    runs, after = [], 0
    while after < 3:  # steps after the end are among them
        with Recorder() as recorder, torch.inference_mode():
            engine.step()
        runs.append(recorder.seen)
        after += int(engine.state.length.min()) == 35
    assert len(runs[0]) > 50
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize("name", ["vanilla", "eagle", "eagle2", "lantern++"])
def test_no_function_looks_at_the_bits_of_a_number(models: Models, name: str) -> None:
    """A device may have no kernel for it."""
    engine = engine_of(models, NAMED[name], SAMPLED)
    start(engine)
    with Recorder() as recorder, torch.inference_mode():
        engine.prefill()
        engine.step()
    assert "aten.view.dtype" not in {operator for operator, _ in recorder.seen}


@pytest.mark.parametrize("wait", [lambda t: t.sum().item(), lambda t: t[t > 0], torch.nonzero])
def test_the_recorder_refuses_reads(wait: Any) -> None:
    with pytest.raises(AssertionError), Recorder():
        wait(torch.ones(3))


@pytest.mark.parametrize(
    ("name", "sampling", "drafter"),
    [
        ("vanilla", GREEDY, {}),
        pytest.param("eagle", SAMPLED, {"n_layer": 2, "taps": (1, 2)}, marks=pytest.mark.long),
        ("eagle2", GREEDY, {"n_layer": 2, "taps": (1, 2)}),
        pytest.param("lantern++", SAMPLED, {}, marks=pytest.mark.long),
    ],
)
def test_a_step_runs_on_tensors_without_values(
    name: str, sampling: Sampling, drafter: dict[str, Any]
) -> None:
    with FakeTensorMode(), torch.no_grad():
        engine = fake_engine(NAMED[name], sampling, **drafter)
        engine.state.length.fill_(3)
        for _ in range(2):
            engine.step()
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            int(engine.state.length.min())


def fake_engine(strategy: Strategy, sampling: Sampling, **drafts: Any) -> Engine:
    """Build an engine from the sizes alone; call it where tensors have no values."""
    target = LlamaGenGPT(CONFIG[0])
    drafter = LlamaGenDrafter(CONFIG[1].model_copy(update=drafts))
    table = torch.zeros(CONFIG[0].vocab_size, 10, dtype=torch.int32)
    made: Engine = engine_of((target, drafter), strategy, sampling, 2, neighbours=table)
    return made


CONFIG = tuple(model.config for model in tiny_models(0))
