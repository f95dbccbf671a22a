"""The contract of ``capture`` suffices for a runtime that runs functions of values, never in place.

What is missing for one whose memory is not torch's: the engine loads a request into torch's buffers and
reads lengths and tokens from them, and nothing tells the replay when; so it copies its state in and out
at every call.
"""

from __future__ import annotations

import pytest
import torch
from support.engines import engine_of
from support.functional import FunctionalBackend

from lantern_accel.errors import BackendError
from lantern_accel.strategy.values import Sampling, Strategy, Window
from lantern_accel.testing import tiny


@pytest.mark.parametrize(
    "strategy",
    ["scd", *(pytest.param(s, marks=pytest.mark.long) for s in ("vanilla", "lantern++"))],
)
def test_images_of_two_prompts_are_those_of_the_eager_steps(strategy: str) -> None:
    backend = FunctionalBackend()
    with backend.inference():
        engine = tiny.tiny_engine(backend, strategy, batch=2)
        tiny.start(engine, 9)
        prefill = backend.capture(engine.prefill, "prefill")
        step = backend.capture(engine.step, "step")
        for seed in (0, 1):
            tiny.start(engine, seed)
            want = engine.run().tokens
            tiny.start(engine, seed, prefill)
            assert torch.equal(engine.run(step).tokens, want)


def test_a_program_s_inputs_are_named_state_and_constants_alone() -> None:
    backend = FunctionalBackend()
    with backend.inference():
        engine = tiny.tiny_engine(backend, "lantern++")
        tiny.start(engine, 1)
        backend.capture(engine.step, "step")
        (replay,) = backend.replays
        finite = engine.finite
        names = {id(tensor) for tensor in engine.state.buffers.values()}
        names |= {id(tensor) for tensor in (finite.count, finite.holds, finite.report)}
        caches = {id(tensor) for cache in engine.caches for tensor in cache.buffers}
        weights = {t.untyped_storage()._cdata for t in vars(engine)["model"].target.parameters()}
    assert {id(tensor) for tensor in replay.state.values()} <= names | caches
    # Every key and value of every layer changes, and each is an input and an output of its own.
    assert caches <= {id(tensor) for tensor in replay.state.values()}
    assert len(weights & set(replay.constants)) > 10
    assert not any(call.operator._schema.is_mutable for call in replay.program.calls)


def test_a_plain_step_of_a_window_names_what_it_changes() -> None:
    backend = FunctionalBackend()
    with backend.inference():
        model = tiny.tiny_model(backend, backend.device, torch.float32)
        strategy = Strategy(drafts=Window.over((1, 8)))
        sampling = Sampling(cfg_scale=2.5, top_k=32)
        engine = engine_of((model.target, None), strategy, sampling, ops=backend)
        vars(engine)["model"] = model
        tiny.start(engine, 1)
        found = engine.host_functions()
        backend.capture(found["step 1"], "step 1")
        backend.capture(found["widen 8"], "widen 8")
    assert backend.replays[0].state and backend.replays[1].state


def test_a_step_that_changes_what_is_not_named_is_refused() -> None:
    backend = FunctionalBackend()
    hidden = torch.zeros(3)
    with pytest.raises(BackendError, match=r"changes buffers of \[\[3\]\], which its contract"):
        backend.capture(lambda: hidden[1:].add_(1), "step")
