"""What the modelled compiler does to a graph: the order of nodes, writes in place, refusals."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lantern_accel.device.kv_cache import KVCache
from lantern_accel.errors import BackendError
from lantern_accel_hpu.kernels import HPUOps
from lantern_accel_hpu.software import lowering

OPTIONS = {"use_eager_fallback": False, "reassign_copy_": False, "use_inplace_index_copy": True}
RELEASES = {"1.19": False, "1.24": True}


def lowered(
    function: Callable[..., Any], *given: Tensor, release: str = "1.24", **options: bool
) -> Any:
    """Return a function as the modelled compiler runs it, on tensors of the CPU."""
    flat = torch.func.functionalize(function)
    module = make_fx(flat, tracing_mode="fake")(*(one.clone() for one in given))
    settings = {**OPTIONS, **options}
    return lowering.lower(module, {**settings, "use_generic_reinplacer": RELEASES[release]})


def changed(function: Callable[..., Any], *given: Tensor) -> list[list[float]]:
    copies = [one.clone() for one in given]
    function(*copies)
    return [one.tolist() for one in copies]


def by_copy(state: Tensor, other: Tensor, seen: Tensor) -> None:
    """Reads the state behind a long chain of operators, and writes it by a short one."""
    seen.copy_(other.exp().exp().log() * state)
    state.copy_(other)


def by_add(state: Tensor, other: Tensor, seen: Tensor) -> None:
    seen.copy_(other.exp().exp().log() * state)
    state.add_(other)


def held(step: Callable[..., None]) -> Callable[..., None]:
    """Return a step that reads the state first, by the backend's own way."""

    def run(state: Tensor, other: Tensor, seen: Tensor) -> None:
        before = HPUOps().snapshot(state)
        seen.copy_(other.exp().exp().log() * before)
        step(state, other, torch.empty_like(seen))

    return run


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("step", [by_copy, by_add])
def test_a_short_way_to_a_write_overtakes_a_long_way_to_a_reader(
    step: Callable[..., None], release: str
) -> None:
    given = torch.arange(3.0), torch.ones(3), torch.zeros(3)
    wanted = changed(step, *given)
    got = changed(lowered(step, *given, release=release), *given)
    assert got[0] == wanted[0] and got[2] != wanted[2]
    assert changed(lowered(held(step), *given, release=release), *given) == wanted


@pytest.mark.parametrize("release", RELEASES)
def test_an_add_writes_over_a_buffer_in_the_newer_release_alone(release: str) -> None:
    def step(state: Tensor, other: Tensor) -> None:
        state.add_(other)
        other.copy_((state * 2 + state) + 1)

    given = torch.arange(3.0), torch.ones(3)
    module = lowered(step, *given, release=release)
    made = [str(node.target) for node in module.graph.nodes if "add" in str(node.target)]
    assert made.count("aten.add_.Tensor") == (release == "1.24")
    assert changed(module, *given) == changed(step, *given)


@pytest.mark.product("release", "rewritten")
@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_every_write_to_a_cache_is_kept_and_made_in_place(release: str, rewritten: bool) -> None:
    """What ``compile_options`` relies on.

    Release 1.19 loses the second ``index_copy_`` to a buffer, so that one that is rewritten is scattered
    into there.
    """
    ops = HPUOps()
    ops.reinplaces = RELEASES[release]
    layout = replace(ops.kv_layout(1, 1, 128, 2, 4, torch.float32), rewritten=rewritten)

    def step(keys: Tensor, values: Tensor, new: Tensor, slots: Tensor) -> None:
        cache = KVCache(layout, (keys,), (values,))
        for at in slots[: 1 + rewritten]:
            ops.write(cache, 0, ops.address(cache, at), new, new + 1)

    cache, new = ops.allocate(layout), torch.arange(16.0).view(1, 2, 2, 4)
    slots = torch.tensor([[[1, 2]], [[2, 5]]], dtype=torch.int32)
    given = *cache.buffers, new, slots
    module = lowered(step, *given, release=release)
    assert changed(module, *given) == changed(step, *given) != [one.tolist() for one in given]
    made = Counter(str(node.target) for node in module.graph.nodes)
    in_place = 0 if rewritten and release == "1.19" else 2 + 2 * rewritten
    assert made["aten.index_copy_.default"] == in_place
    assert made["aten.copy_.default"] == (0 if in_place else 2)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: x * F.pad(x > 0, (0, 0), value=1), "constant_pad_nd requires fallback"),
        (lambda x: x * F.pad(x.int(), (0, 0), value=1), "constant_pad_nd requires fallback"),
        (lambda x: x * (x > 0).gather(1, x.int()), "gather.*gives it bool"),
        (lambda x: x * torch.cat((x > 0, x > 1), 1)[:, :1], "cat.*gives it bool"),
        (lambda x: x.to(torch.int8).sum(0, dtype=torch.int32) + x, "sum.*gives it int8"),
        (lambda x: x.view(1, 1, 1, 1, 1, -1).sum() + x, "more than 5 axes"),
        (lambda x: (x + 1).view(3), "Eager fallback in nodes.*view"),
    ],
    ids=["pad of bool", "pad of another kind", "gather", "cat", "by name", "rank", "leaf view"],
)
def test_what_no_kernel_is_known_to_take_is_refused(
    function: Callable[[Tensor], Tensor], told: str
) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=told):
        lowered(function, torch.zeros(3, 1))


def test_a_release_that_is_not_modelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_SOFTWARE_RELEASE", "1.25")
    with pytest.raises(BackendError, match=r"choose 1\.19 or 1\.24"):
        runpy.run_module("lantern_accel_hpu.software.config")
