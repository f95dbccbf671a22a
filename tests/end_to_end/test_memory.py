"""Memory is static: a thousand images take what a hundred take."""

from __future__ import annotations

import gc

import pytest

import lantern_accel


@pytest.mark.long
def test_a_thousand_images_take_no_more_memory_than_a_hundred(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipe:

        def make_hundred() -> int:
            # Not auto: on a busy machine it times its drafts again, and may then choose others.
            pipe.generate("dog face", num_images=100, batch_size=100, strategy="eagle", seed=7)
            gc.collect()
            return pipe.backend.memory().in_use or 0

        make_hundred()
        engines = [(id(r.engine), r.engine.nbytes) for r in pipe.engines.ready]
        before = make_hundred()
        for _ in range(9):
            after = make_hundred()
        assert [(id(r.engine), r.engine.nbytes) for r in pipe.engines.ready] == engines
    # Less than 2 KiB an image: what the host's allocator leaves lying between two requests.
    assert after - before < 9 * 100 * 2 * 1024
