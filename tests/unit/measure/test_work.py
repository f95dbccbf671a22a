"""What a step needs agrees with what torch counts while it runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lantern_accel.device.backend import Backend, DeviceFacts
from lantern_accel.measure import work
from lantern_accel.measure.bench import PHASES
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny


class Plain(Backend):
    """The reference operations, attention as products that torch's counter sees."""

    name, version = "plain", "1"

    def facts(self):
        return DeviceFacts(backend="plain", device="cpu", name="plain", torch="2")

    def synchronize(self):
        pass

    def attend_dense(self, q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        return torch.matmul((scores + mask).softmax(-1), v).transpose(1, 2)


@pytest.fixture(scope="module")
def backend():
    return Plain(torch.device("cpu"))


def _work(engine):
    trunk = engine.model.family.trunk
    drafting = engine.drafting
    return work.step_work(
        trunk(engine.verifying.target.config),
        trunk(drafting.drafter.config) if drafting else None,
        engine.strategy,
        engine.sampling,
        engine.geometry,
        4,
        work.levels_of(engine),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_operations_are_those_that_torch_counts(backend, strategy, batch):
    engine = tiny.tiny_engine(backend, strategy, batch=batch, temperature=1.0)
    tiny.load(engine, 0)
    with torch.inference_mode():
        engine.prefill()
        with FlopCounterMode(display=False) as counter:
            engine.step()
    found = _work(engine)
    matrices = found["draft"][0] + found["verify"][0]
    assert matrices == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_bytes_hold_every_weight_once_a_pass(backend):
    engine = tiny.tiny_engine(backend, "vanilla", batch=1, temperature=1.0)
    target = engine.verifying.target
    weights = sum(p.numel() for p in target.layers.parameters()) + target.output.weight.numel()
    assert _work(engine)["verify"][1] > 4 * weights
    assert _work(engine)["draft"] == (0.0, 0.0)


def test_launches_are_counted_by_phase_without_views(backend):
    engine = tiny.tiny_engine(backend, "eagle", batch=1, temperature=1.0)
    tiny.load(engine, 0)
    with torch.inference_mode():
        counts = work.count_launches(engine)
    assert {"prefill", *PHASES} <= counts.keys()
    assert all(counts[name] > 0 for name in PHASES)
    assert "phase" not in vars(backend)

    counter = work.LaunchCounter()
    x = torch.zeros(4, 4)
    with counter:
        x.view(16).t()
        x[1:].transpose(0, 1)
        assert counter.counts == {}
        x.add_(1)
        torch.mm(x, x)
    assert counter.counts == {"other": 2}
