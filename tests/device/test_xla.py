"""On torch_xla, whichever client serves: the CPU's tokens, and this backend's own promises.

Skipped where torch_xla is not installed; docs/backends.md says how an environment for it is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.noise import exponential, noise_keys
from lantern_accel.device.plugins import backend_specs, open_backend
from lantern_accel.testing import kit, tiny

PROBE = backend_specs()["xla"].probe()

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not PROBE.available, reason=f"no XLA: {PROBE.reason}"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def backend() -> Iterator[Backend]:
    with open_backend("xla") as opened:
        yield opened


def tokens(backend: Backend, strategy: str, *, captured: bool) -> torch.Tensor:
    with backend.inference():
        engine = tiny.tiny_engine(backend, strategy)
        if not captured:
            tiny.start(engine, 3)
            return engine.run().tokens
        prefill = backend.capture(engine.prefill, "prefill")
        step = backend.capture(engine.step, "step")
        tiny.start(engine, 3, prefill)
        return engine.run(step).tokens


@pytest.mark.parametrize("strategy", ["vanilla", "lantern++", "scd"])
def test_a_program_draws_the_tokens_of_the_cpu(backend: Backend, strategy: str) -> None:
    with open_backend("cpu") as cpu:
        want = tokens(cpu, strategy, captured=False)
    assert torch.equal(tokens(backend, strategy, captured=True), want)


def test_noise_has_the_bits_of_the_host_alone_and_in_a_program(backend: Backend) -> None:
    keys, positions = noise_keys([7, 2**63 + 11], [0, 3]), torch.arange(0, 2**16, 4099).repeat(2, 1)
    want = exponential(keys, positions, 4097)
    with backend.inference():
        given = keys.to(backend.device), positions.to(backend.device, backend.index)
        assert torch.equal(backend.noise(*given, 4097).cpu(), want)
        ones = torch.ones(want.shape, device=backend.device)
        out = torch.zeros_like(ones)

        def step() -> None:
            out.copy_(backend.perturb(ones, *given))

        backend.capture(step, "step")()
        assert torch.equal(out.cpu(), 1 / want)


def test_a_step_that_could_not_be_captured_leaves_its_buffers_as_they_were(
    backend: Backend,
) -> None:
    state = torch.ones(2, device=backend.device)

    def reads() -> None:
        state.add_(1)
        state.mul_(float(state.sum()))

    with pytest.raises(Exception, match="value on the host"):
        backend.capture(reads, "step")
    assert state.cpu().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["xla.donation", "xla.refuses", "xla.transfers", "replay.kind"])
def test_its_own_promises_hold(backend: Backend, name: str) -> None:
    found = kit.run_check(backend, name, kit.checks_of(backend)[name])
    assert found.state == "passed", found.detail
