"""The code that Inductor generates for a step as the CUDA backend lays it out: caches stay in place.

Generated for the double's tensors, which lie in host memory: the passes that keep a write in place come
before a device's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.cuda_double import doubled_backend
from support.generated import generated, plain_engine, whole_caches

from lantern_accel.device.kv_cache import KVCache, KVLayout
from lantern_accel.testing.tiny import start, tiny_engine


def copied(backend: Any, monkeypatch: pytest.MonkeyPatch, step: str = "eagle") -> list[str]:
    with torch.inference_mode():
        if step == "whole":
            engine = tiny_engine(backend, "lantern++")
            start(engine, 1)
        else:
            engine = plain_engine(backend, monkeypatch, step)
        code = generated(engine.step, monkeypatch)
    layouts = [cache.layout for cache in engine.caches]
    stacked = [(2, one.layers, *one.shape) for one in layouts]
    return whole_caches(code, [*(one.shape for one in layouts), *stacked])


@pytest.mark.long
def test_a_compiled_step_copies_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    assert not copied(backend, monkeypatch, "whole")


@dataclass(frozen=True)
class Stacked(KVCache):
    """All layers in one tensor, ``[2, layers, ...]``, as a cache once was."""

    whole: Any = None


@pytest.mark.long
def test_a_cache_that_is_one_tensor_is_copied_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer's write into one tensor of all layers becomes: a copy of all of it."""
    backend, _ = doubled_backend(monkeypatch)

    def stacked(layout: KVLayout) -> KVCache:
        whole = torch.zeros(2, layout.layers, *layout.shape, dtype=layout.dtype)
        return Stacked(layout, tuple(whole[0]), tuple(whole[1]), whole=whole)

    def write(kv: Any, layer: int, address: Any, k: Any, v: Any) -> None:
        for side, new in ((kv.whole[0, layer], k), (kv.whole[1, layer], v)):
            flat = torch.nn.functional.pad(new, (0, kv.layout.head_dim - new.shape[-1]))
            side.index_copy_(0, address, flat.reshape(-1, *side.shape[1:]))

    def by_head(kv: Any, layer: int, count: int) -> tuple[Any, Any]:
        at = kv.layout
        shape = (at.rows, at.heads, at.capacity, at.head_dim)
        k, v = (kv.whole[side, layer].view(shape)[:, :, :count] for side in (0, 1))
        return k, v

    for name, method in (("allocate", stacked), ("write", write)):
        monkeypatch.setattr(backend, name, method)
    assert copied(backend, monkeypatch, "vanilla")
