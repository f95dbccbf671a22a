"""Proofs that a step has one shape: same buffers, same operators, no value read by the host."""

from __future__ import annotations

import pytest
import torch
from support.engines import GREEDY, NAMED, SAMPLED, Models, engine_of, finish, start
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing.static import without_data
from lantern_accel.testing.trace import OpRecorder, first_difference


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
    name: str, sampling: Sampling
) -> None:
    """Without data, and with it; a drafter of several blocks reads states of the target."""
    made = tiny_models(0, blocks=2, taps=(1, 2)) if "eagle" in name else tiny_models(0)
    engine = engine_of(made, NAMED[name], sampling, batch=2)
    with torch.inference_mode(), without_data():
        engine.step()
    with OpRecorder(torch.device("cpu")) as prefill:
        start(engine)
    runs, after = list[OpRecorder](), 0
    while after < 3:  # steps after the end are among them
        with OpRecorder(torch.device("cpu")) as recorder, torch.inference_mode():
            engine.step()
        runs.append(recorder)
        after += int(engine.state.length.min()) == 35
    for run in runs:
        assert not run.violations and not first_difference(runs[0], run)
    # A device may have no kernel that looks at the bits of a number.
    used = {str(one[0]) for one in (*prefill.signature, *runs[0].signature)}
    assert len(runs[0].signature) > 50 and "aten::view.dtype" not in used
