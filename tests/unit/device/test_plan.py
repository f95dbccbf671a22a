"""A plan made of plain tensors, without an engine, and what a device makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import native
from torch import Tensor

from lantern_accel.device import plan
from lantern_accel.device.capture import own_step
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import FusedStep, Refused
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel_cpu.backend import DeviceBackend

IMAGES, PREFIX, TOKENS, VOCAB, DIM, HEADS, HIDDEN, LAYERS = 2, 3, 9, 24, 16, 2, 40, 2
FILTER = plan.Filter(torch.tensor([0.9]), top_k=12)
REFERENCE = TensorOps()


class Weights:
    """Random weights of a small model, as matrices; what a plan has of them is packed by a device."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make) / shape[-1] ** 0.5

        self.embedding, self.head = draw(VOCAB, DIM) * DIM**0.5, 3 * draw(VOCAB, DIM)
        self.norms = [1 + 0.1 * draw(DIM) for _ in range(2 * LAYERS + 1)]
        self.blocks = [
            (draw(3 * DIM, DIM), draw(DIM, DIM), draw(2 * HIDDEN, DIM), draw(DIM, HIDDEN))
            for _ in range(LAYERS)
        ]
        angle = torch.arange(PREFIX + TOKENS).unsqueeze(1) * 0.3 ** torch.arange(DIM // HEADS // 2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.prompt = [draw(IMAGES, PREFIX, HEADS, DIM // HEADS) for _ in range(2 * LAYERS)]

    def stack(self, ops: TensorOps) -> plan.Stack:
        def matrix(weight: Tensor) -> plan.Matrix:
            return plan.Matrix(ops.pack(weight), *weight.shape)

        blocks = []
        for i, (wqkv, wo, w13, w2) in enumerate(self.blocks):
            before, between = (plan.Norm(self.norms[2 * i + j], 1e-5) for j in (0, 1))
            blocks.append(
                plan.BlockWeights(
                    HEADS, before, matrix(wqkv), matrix(wo), between, matrix(w13), matrix(w2)
                )
            )
        norm = plan.Norm(self.norms[-1], 1e-5)
        return plan.Stack(self.embedding, tuple(blocks), norm, matrix(self.head))

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` after the last of ``tokens [B, n]``, operator by operator."""
        count, ops = tokens.shape[1], REFERENCE
        x = self.embedding[tokens]
        rows = slice(PREFIX, PREFIX + count)
        rotary = (self.cos[rows, None, :], self.sin[rows, None, :])
        seen = torch.ones(count, PREFIX + count, dtype=torch.bool).tril(PREFIX)
        for i, (wqkv, wo, w13, w2) in enumerate(self.blocks):
            y = ops.rms_norm(x, self.norms[2 * i], 1e-5)
            q, k, v = (y @ wqkv.T).unflatten(-1, (3, HEADS, -1)).unbind(2)
            q, k = (ops.rotate(t, rotary) for t in (q, k))
            k = torch.cat((self.prompt[2 * i], k), dim=1)
            v = torch.cat((self.prompt[2 * i + 1], v), dim=1)
            x = x + ops.attend_dense(q, k, v, seen.expand(IMAGES, 1, -1, -1)).flatten(-2) @ wo.T
            y = ops.rms_norm(x, self.norms[2 * i + 1], 1e-5)
            x = x + ops.swiglu(y @ w13.T) @ w2.T
        last: Tensor = ops.rms_norm(x[:, -1], self.norms[-1], 1e-5) @ self.head.T
        return last

    def cache(self, ops: TensorOps) -> KVCache:
        """Return a cache that holds the prompt's keys and values."""
        layout = ops.kv_layout(
            LAYERS, IMAGES, PREFIX + TOKENS + 1, HEADS, DIM // HEADS, torch.float32
        )
        kv = ops.allocate(layout)
        address = ops.address(kv, torch.arange(PREFIX).repeat(IMAGES, 1))
        for layer in range(LAYERS):
            ops.write(kv, layer, address, *self.prompt[2 * layer : 2 * layer + 2])
        return kv


def buffers() -> plan.Buffers:
    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    return plan.Buffers(
        length=ints(IMAGES),
        tokens=ints(IMAGES, TOKENS + 1),
        prefix_mask=torch.ones(IMAGES, PREFIX, dtype=torch.bool),
        step=torch.ones(1, dtype=torch.int64),
        steps=ints(IMAGES),
        histogram=ints(IMAGES, 3),
        quality_loss=torch.zeros(IMAGES),
        last_length=ints(IMAGES),
        finite=torch.ones(IMAGES, dtype=torch.int64),
        holds=torch.ones(IMAGES, dtype=torch.bool),
        report=ints(2, IMAGES),
        keys=torch.tensor([[11, 0, 0], [11, 0, 1]], dtype=torch.int32),
    )


def plain(target: plan.TargetModel | None = None) -> plan.StepPlan:
    """Return the plan of plain decoding where noise decides."""
    sizes = plan.StepSizes(IMAGES, 1, PREFIX, TOKENS, 1, 0, VOCAB, PREFIX + TOKENS + 1)
    source = plan.NoDrafts(torch.full((IMAGES,), 7))
    given, rule = buffers(), plan.AcceptancePlan()
    given.tokens[:, 0] = 7
    return plan.StepPlan(sizes, source, FILTER, rule, False, given, target)


def chosen(logits: Tensor, keys: Tensor, position: int) -> Tensor:
    """Return the tokens ``[B]`` that noise chooses at a position from logits ``[B, V]``."""
    weights = REFERENCE.filter(logits, FILTER).unsqueeze(1)
    return REFERENCE.race(weights, keys, torch.full((IMAGES, 1), position)).squeeze(1)


@pytest.fixture(scope="module")
def cpu() -> Iterator[DeviceBackend]:
    with open_backend("cpu", {"native": "on"}) as found:
        assert isinstance(found, DeviceBackend)
        yield found


@native.needs_native
def test_a_fused_step_needs_no_engine(cpu: DeviceBackend) -> None:
    weights = Weights()
    target = plan.TargetModel(weights.stack(cpu), weights.cache(cpu), weights.cos, weights.sin)
    given = plain(target)
    given.check(torch.int64)
    step = cpu.fused_step(given)
    assert isinstance(step, FusedStep)
    state = given.buffers
    keys, tokens = state.keys, torch.full((IMAGES, 1), 7)
    assert keys is not None
    for position in range(1, TOKENS):
        assert step.run(None)
        drawn = chosen(weights.logits(tokens), keys, position)
        tokens = torch.cat((tokens, drawn.unsqueeze(1)), dim=1)
        assert torch.equal(state.tokens[:, : position + 1], tokens)
        assert state.length.tolist() == [position] * IMAGES
        assert state.finite.tolist() == [1 + position] * IMAGES
        assert torch.equal(state.report, torch.stack((state.length, state.finite)))
    assert state.steps.tolist() == [TOKENS - 1] * IMAGES
    assert state.histogram[:, 0].tolist() == [TOKENS - 1] * IMAGES
    before = state.tokens.clone()
    assert step.run(None)  # complete images stay as they are
    assert torch.equal(state.tokens[:, :TOKENS], before[:, :TOKENS])
    assert state.steps.tolist() == [TOKENS - 1] * IMAGES


@native.needs_native
def test_what_follows_a_pass_needs_no_engine(cpu: DeviceBackend) -> None:
    span, given = 3, plain()
    state = given.buffers
    assert state.keys is not None
    logits = torch.randn(IMAGES, span, VOCAB, generator=torch.Generator().manual_seed(2))
    drawn = torch.stack([chosen(logits[:, i], state.keys, 1 + i) for i in range(span)], dim=1)
    # The first image's first draft is right, and its second wrong; the other one's are both right.
    drafts = drawn[:, :2].clone()
    drafts[0, 1] = (drafts[0, 1] + 1) % VOCAB
    state.tokens[:, 1:span] = drafts
    source = plan.WindowPlan(
        fresh="given",
        width=3,
        passes=0,
        kept=0,
        fresh_column=0,
        newest=torch.full((IMAGES,), span - 1),
        place=torch.arange(TOKENS + span) % TOKENS,
    )
    sizes = replace(given.sizes, nodes=span, depth=span - 1)
    given = replace(given, sizes=sizes, source=source)
    given.check(torch.int64)
    follow = cpu.fused_step(given)
    assert isinstance(follow, FusedStep) and not follow.run(None) and follow.run(logits)
    assert state.length.tolist() == [2, 3]
    assert torch.equal(state.tokens[:, 1 : span + 1], drawn)
    assert state.histogram.tolist() == [[0, 1, 0], [0, 0, 1]]
    # Drafts behind what a pass saw are another source's to write.
    assert not state.tokens[:, span + 1].any()


@native.needs_native
@pytest.mark.parametrize("changes", [{"version": plan.PLAN_VERSION + 1}, {"greedy": True}])
def test_a_plan_without_a_kernel_is_refused(cpu: DeviceBackend, changes: dict[str, int]) -> None:
    assert isinstance(cpu.fused_step(plain()), FusedStep)
    made = cpu.fused_step(replace(plain(), **changes))  # type: ignore[arg-type]
    assert isinstance(made, Refused) and made.why


def test_the_reference_takes_no_plan_and_its_answer_is_noted() -> None:
    ops = TensorOps()
    assert isinstance(ops.fused_step(plain()), Refused)
    assert own_step(ops, plain()) is None
    (what, why), *_ = ops.own_steps.items()
    assert what.startswith("plain decoding") and why
    assert not TensorOps().own_steps, "another device's answers are its own"


def test_an_answer_that_is_none_is_a_refusal() -> None:
    class Old(TensorOps):
        def fused_step(self, plan: Any) -> Any:
            return None

    ops = Old()
    assert own_step(ops, plain()) is None
    assert "NoneType" in next(iter(ops.own_steps.values()))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("tokens", torch.zeros(IMAGES, TOKENS, dtype=torch.int64), r"index \[B, N\+1\]"),
        ("length", torch.zeros(IMAGES, dtype=torch.int32), r"must be index \[B\]"),
        ("steps", torch.zeros(IMAGES, 1, dtype=torch.int64), r"steps as torch.int64 \[2, 1\]"),
        ("quality_loss", torch.zeros(IMAGES, dtype=torch.float64), "quality_loss as torch.float64"),
    ],
)
def test_a_wrong_buffer_is_named(name: str, wrong: Tensor, said: str) -> None:
    given = plain()
    with pytest.raises(BackendError, match=said):
        replace(given, buffers=replace(given.buffers, **{name: wrong})).check(torch.int64)
