"""A device whose copies lag is looked at where an image can be complete."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend
from support.engines import engine_of

from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, Window, named_strategy
from lantern_accel.testing import tiny


@pytest.mark.long
def test_few_steps_run_behind_an_image_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    with torch.inference_mode():
        model = tiny.tiny_model(backend, backend.device, torch.float32)
        asked = named_strategy("auto", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
        assert isinstance(asked.drafts, Window)
        draft_lengths = tuple(one for one in asked.drafts.draft_lengths if one.length <= 2)
        window = asked.drafts.model_copy(update={"length": 2, "draft_lengths": draft_lengths})
        strategy = asked.model_copy(update={"drafts": window})
        sampling = Sampling(cfg_scale=2.0, top_k=32)
        engine = engine_of((model.target, None), strategy, sampling, ops=backend)
        engine.model = model
        assert engine.session.progress.lag == 1
        honest, calls = engine.step, [0]

        def step() -> None:
            calls[0] += 1
            honest()

        def wasted() -> list[int]:
            found = []
            for seed in range(12):
                calls[0] = 0
                tiny.start(engine, seed)
                done = engine.run(step)
                found.append(calls[0] - int(done.steps.max()))
            return found

        assert max(wasted()) <= engine.session.progress.lag
