"""What a step needs agrees with what torch counts while it runs."""

from __future__ import annotations

import pytest
import torch
from support.runs import invented_run
from torch.utils.flop_counter import FlopCounterMode

from lantern_accel.device.backend import Backend, DeviceFacts
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import projections, rounded_copy
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing import tiny
from lantern_accel_profiles.measure import work
from lantern_accel_profiles.measure.record import STEP_PHASES as PHASES


class Plain(Backend):
    """The reference operations, attention as products that torch's counter sees."""

    name, version = "plain", "1"

    def facts(self):
        return DeviceFacts(backend="plain", device="cpu", name="plain", torch="2")

    def synchronize(self):
        pass

    def scan(self, weights):  # without the products that the reference adds up by
        return weights.cumsum(-1)

    def attend_dense(self, q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        return torch.matmul((scores + mask).softmax(-1), v).transpose(1, 2)


@pytest.fixture(scope="module")
def backend():
    return Plain(torch.device("cpu"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_operations_are_those_that_torch_counts(backend, strategy, batch):
    engine = tiny.tiny_engine(backend, strategy, batch=batch, temperature=1.0)
    tiny.load(engine, 0)
    with torch.inference_mode():
        engine.prefill()
        with FlopCounterMode(display=False) as counter:
            engine.step()
    g = engine.geometry
    # A static step attends to every slot of its caches, the drafter's own number of them.
    seen = g.target_slots - g.nodes
    found = work.step_needs(engine, seen=seen)
    matrices = found["draft"][0] + found["verify"][0]
    if engine.geometry.drafted:
        nodes = g.depth + 1 + sum(work.drafted_levels(engine))
        layers = len(engine.session.drafter.layers)
        matrices += 4 * g.rows * nodes * (g.drafter_slots - seen) * g.dim * layers
    assert matrices == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("batch", [1, 3])
def test_operations_of_a_draft_head_are_those_that_torch_counts(backend, monkeypatch, batch):
    engine = tiny.tiny_engine(backend, tiny.BY_HEAD, batch=batch, temperature=1.0)
    tiny.load(engine, 0)
    after, counter = engine.source.after, FlopCounterMode(display=False)

    def counted(*given):
        with counter:
            after(*given)

    monkeypatch.setattr(engine.source, "after", counted)
    with torch.inference_mode():
        engine.prefill()
        engine.step()
    operations, size = work.step_needs(engine)["commit"]
    head = engine.verifying.target.draft_head
    assert operations == counter.get_total_flops()
    assert size > 4 * head.head.numel()


def test_operators_are_counted_without_views(backend):
    x = torch.zeros(4, 4)
    with work.LaunchCounter() as counter:
        x.view(16).t()
        x[1:].transpose(0, 1)
        assert counter.count == 0
        x.add_(1)
        torch.mm(x, x)
    assert counter.count == 2


def test_a_floor_is_what_binds():
    ceilings = invented_run().ceilings
    rate = ceilings.matmul_flops["bfloat16"]
    assert work.floor_of(2 * rate, 4e10, ceilings, "bfloat16") == pytest.approx(2)
    # The better of copying (4e10) and reading (3e10).
    assert work.floor_of(0, 4e10, ceilings, "bfloat16") == pytest.approx(1)
    assert work.floor_of(0, 4e10, ceilings, "float16") == "not measured: no matmuls in float16"


def test_phases_are_timed_on_a_device_that_is_waited_for(backend, monkeypatch):
    waits = []
    monkeypatch.setattr(backend, "synchronize", lambda: waits.append(1))
    with work.timed_phases(backend) as sums, backend.phase("draft"):
        pass
    assert len(waits) == 2
    assert set(sums) == set(PHASES)
    assert backend.listener is None


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4.5)])
def test_weights_in_fewer_bits_are_read_as_such(backend, weights, bits):
    engine = tiny.tiny_engine(backend, "vanilla", batch=1, temperature=1.0)
    whole = work.step_needs(engine, seen=3)["verify"]
    target = engine.verifying.target
    copy = rounded_copy(target, backend, rounding(weights))
    engine.verifying.target = copy
    fewer = work.step_needs(engine, seen=3)["verify"]
    read = sum(p.weight.numel() for p in (*projections(target.layers), target.output))
    assert fewer[0] == whole[0]
    assert whole[1] - fewer[1] == pytest.approx(read * (32 - bits) / 8)


def test_drafts_of_a_copy_read_it_once_a_pass(backend):
    engine = tiny.tiny_engine(backend, "self", batch=1, temperature=1.0)
    needs = work.step_needs(engine, seen=3)
    assert engine.source.passes == 4
    assert 0.2 < needs["draft"][1] / (4 * needs["verify"][1]) < 0.5
