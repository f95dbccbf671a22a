"""The native trunk against the blocks one by one, in decoding and alone; its threads' manners."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import native
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plugins import open_backend
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import Pass, pack, rounded_copy
from lantern_accel.strategy.values import STRATEGIES
from lantern_accel.testing.tiny import start, tiny_engine
from lantern_accel_cpu.native import build
from lantern_accel_cpu.native.backend import NativeCpu

pytestmark = native.needs_native
LENGTH = 40


def _target(ops: TensorOps, dtype: torch.dtype, heads: int, dim: int, hidden: int) -> LlamaGenGPT:
    config = LlamaGenConfig(
        dim=dim, n_layer=3, n_head=heads, ffn_dim=hidden, vocab_size=16, grid=6, prefix_length=4,
        caption_dim=8,
    )  # fmt: skip
    target = LlamaGenGPT(config, ops=ops).eval().requires_grad_(False)
    tables = target.rope_cos, target.rope_sin
    generator = torch.Generator().manual_seed(3)
    for name, weight in target.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * drawn if "norm" in name else drawn * weight.shape[-1] ** -0.5)
    target.to(dtype)
    target.rope_cos, target.rope_sin = tables
    return target


def _run(
    target: LlamaGenGPT, backend: Backend, dtype: torch.dtype, taps: tuple[int, ...]
) -> Tensor:
    """Run a prompt of 4, then a tree of 7 nodes, on two rows; the tree's states, and the cache's keys."""
    c = target.config
    layout = backend.kv_layout(3, 2, LENGTH, c.n_head, c.head_dim, dtype)
    kv: KVCache = backend.allocate(layout)
    out = torch.empty(0)
    for first, count in ((0, 4), (4, 7)):
        x = native.draw(first, 2, count, c.dim, dtype=dtype)
        seen = torch.zeros(2, 1, count, LENGTH, dtype=torch.bool)
        seen[..., :first] = True
        seen[..., first : first + count] = torch.ones(count, count, dtype=torch.bool).tril()
        seen[:, :, 1:, first] = False
        place = torch.arange(first, first + count).expand(2, -1)
        shape = (1, count, 1, -1)
        cos = target.rope_cos[first : first + count].view(shape)
        sin = target.rope_sin[first : first + count].view(shape)
        at = Pass(cos, sin, backend.mask(seen, dtype), kv, backend.address(kv, place))
        out = target(x, at, taps)
    slots = torch.arange(11).expand(2, -1)
    kept = [side.flatten() for layer in range(3) for side in kv.read(layer, slots)]
    return torch.cat((out.flatten(), *kept)).double()


TILES = [pytest.param(n, marks=pytest.mark.long) for n in native.units() if n.startswith("amx")]


@pytest.mark.parametrize("unit", TILES)
@pytest.mark.parametrize("weights", ["full", "int8", "int6"])
@pytest.mark.parametrize("hidden", [96, 50])
def test_a_trunk_by_tiles_has_the_bits_of_vectors(unit: str, weights: str, hidden: int) -> None:
    dtype, heads, dim = torch.bfloat16, 2, 128
    how = None if weights == "full" else ROUNDINGS[weights]
    with open_backend("cpu", {"native": "off"}) as plain, torch.inference_mode():
        target = _target(plain, dtype, heads, dim, hidden)
        exact = _target(plain, dtype, heads, dim, hidden).float()
        if how:
            exact = rounded_copy(exact, plain, how)
        want = _run(exact, plain, torch.float32, (1, 3))
        ops = NativeCpu(0, native.kernels(unit), 2)
        target.ops = ops
        pack(target, ops, how)
        found = []
        for border in (1, 1000):  # rows from which on tiles multiply
            ops.kernels.library.tiles_from(border)
            found.append(_run(target, ops, dtype, (1, 3)))
        ops.kernels.library.tiles_from(0)
        assert torch.equal(*found)
        assert float((found[0] - want).abs().max()) < 8e-2


def test_threads_change_no_bit_of_a_trunk() -> None:
    with (
        open_backend("cpu", {"native": "on", "threads": 1}) as backend,
        torch.inference_mode(),
    ):
        target = _target(backend, torch.float32, 4, 256, 768)
        pack(target, backend)
        alone = _run(target, backend, torch.float32, (1, 3))
        for count in (2, 3, 11):
            with native.threads(count):
                for _ in range(5):
                    assert torch.equal(_run(target, backend, torch.float32, (1, 3)), alone)


@pytest.mark.parametrize("blind", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_are_left_out(dtype: torch.dtype, blind: tuple[int, ...]) -> None:
    def states(hidden: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        kv = backend.allocate(backend.kv_layout(3, 3, LENGTH, 2, 64, dtype))
        seen = torch.ones(3, 1, 2, LENGTH, dtype=torch.bool)
        seen[..., 6:] = False
        seen[0, ..., 3] = False  # rows see different slots
        for row in hidden:
            seen[row] = False
        place = torch.arange(4, 6).expand(3, -1).contiguous()
        angles = [t[place.flatten()].view(3, 2, 1, -1) for t in (target.rope_cos, target.rope_sin)]
        at = Pass(*angles, backend.mask(seen, dtype), kv, backend.address(kv, place))
        out = target(native.draw(1, 3, 2, 128, dtype=dtype), at, (2,))
        kept = [side for layer in range(3) for side in kv.read(layer, place)]
        return out, torch.stack(kept)

    with open_backend("cpu", {"native": "on"}) as backend, torch.inference_mode():
        target = _target(backend, dtype, 2, 128, 96)
        pack(target, backend)
        assert backend.preferences.skips_finished_rows
        want, kept_there = states(())
        got, kept = states(blind)
    for row in range(3):
        if row in blind:
            assert not got[row].any() and not kept[:, row].any()
        else:
            assert torch.equal(got[row], want[row])
            assert torch.equal(kept[:, row], kept_there[:, row])


@pytest.mark.parametrize("strategy", ["scd", "sjd"])
def test_complete_images_are_left_out_and_no_token_changes(strategy: str) -> None:
    tokens = []
    for skips in (False, True):
        with open_backend("cpu", {"native": "on"}) as backend, torch.inference_mode():
            backend.preferences = replace(backend.preferences, skips_finished_rows=skips)
            engine = tiny_engine(backend, strategy, batch=3, dtype=torch.float32)
            start(engine, 5)
            found = engine.run()
            tokens.append(found.tokens)
            assert len(set(found.steps.tolist())) > 1  # some image was complete before the last
    assert torch.equal(*tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_decodes_the_same_tokens(strategy: str) -> None:
    tokens = []
    for option in ("off", "on"):
        with open_backend("cpu", {"native": option}) as backend, torch.inference_mode():
            engine = tiny_engine(backend, strategy, batch=2, dtype=torch.float32)
            start(engine, 5)
            tokens.append(engine.run().tokens)
    assert torch.equal(*tokens)


@pytest.mark.long
def test_the_bundled_model_decodes_the_same_tokens() -> None:
    from lantern_accel import generate

    found = []
    for native_, count in (("off", 1), ("on", 2)):
        options = {"native": native_, "threads": count}
        made = generate(
            "dog face",
            device="cpu",
            dtype="float32",
            seed=11,
            strategy="lantern++",
            drafts="0,1,00,01,000",  # not the device's own: relaxed images depend on it
            options=options,
        )
        found.append(made.tokens)
    assert torch.equal(*found)


def test_in_a_step_torch_leaves_the_cores_to_native_threads() -> None:
    seen: list[tuple[int, int]] = []
    asked: list[int] = []
    with open_backend("cpu", {"native": "on"}) as backend, native.threads(2):
        assert isinstance(backend, NativeCpu)
        kernels = backend.kernels
        kernels.library = SimpleNamespace(threads=asked.append)

        def step(fails: bool = False) -> None:
            kernels.threads()
            seen.append((torch.get_num_threads(), asked[-1]))
            if fails:
                raise ValueError("a step that fails")

        replay = backend.capture(step)
        replay()
        with pytest.raises(ValueError, match="a step that fails"):
            backend.capture(lambda: step(True))()
        assert torch.get_num_threads() == 2
        with native.threads(1):
            replay()
        assert seen == [(1, 2), (1, 2), (1, 1)] and asked == [2, 1]


def test_threads_sleep_when_there_is_no_work() -> None:
    kernels = native.kernels()
    packed = kernels.pack(native.draw(1, 1024, 1024))
    x = native.draw(2, 4, 1024)
    with native.threads(2):
        for _ in range(5):
            kernels.linear(x, packed, None)
        time.sleep(0.05)
        began = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - began < 0.03


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    kernels = native.kernels()
    packed = kernels.pack(native.draw(1, 1024, 1024))
    x = native.draw(2, 4, 1024)
    with native.threads(2):
        want = kernels.linear(x, packed, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            os._exit(0 if torch.equal(kernels.linear(x, packed, None), want) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert build.family() is not None
