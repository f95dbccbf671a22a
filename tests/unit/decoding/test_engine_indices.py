"""Engines whose indices are int32, as some devices prefer them."""

from __future__ import annotations

import pytest
import torch

from lantern_accel_hpu.kernels import index_dtype


@pytest.mark.skipif(
    index_dtype() == torch.int64, reason="this torch's operators take int64 indices alone"
)
@pytest.mark.parametrize("strategy", ["vanilla", "eagle", "eagle2", "lantern", "lantern++"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_int32_indices_decide_alike(strategy: str, temperature: float) -> None:
    from lantern_accel.device.plugins import open_backend
    from lantern_accel.testing.tiny import start, tiny_engine

    decoded = []
    with open_backend("cpu") as backend:
        for index in (torch.int64, torch.int32):
            backend.index = index
            engine = tiny_engine(backend, strategy, batch=2, temperature=temperature)
            buffers = {name: v for name, v in engine.state.buffers.items() if name != "keys"}
            integers = {v.dtype for v in buffers.values() if not v.is_floating_point()}
            assert integers == {index, torch.bool}
            with torch.inference_mode():
                start(engine, 3)
                decoded.append(engine.run())
    for name in ("tokens", "steps", "histogram"):
        assert torch.equal(getattr(decoded[0], name), getattr(decoded[1], name)), name
    # A device's own kernel may take one kind of index alone, and adds in its own order.
    torch.testing.assert_close(decoded[0].quality_loss, decoded[1].quality_loss)
