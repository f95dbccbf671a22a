"""How many kernels a step launches: none of these numbers may grow without somebody's knowing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import engine_of
from support.processes import Run, passes
from torch import Tensor

from lantern_accel.device.capture import Replay
from lantern_accel.device.plan import Refused
from lantern_accel.device.plugins import open_backend
from lantern_accel.device.preferences import Preferences
from lantern_accel.families.random_weights import manifest_of_size, random_model, with_head
from lantern_accel.generation.engines import Engines
from lantern_accel.generation.measurements import Measurements
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import AUTO, Sampling, Strategy, Window, named_strategy
from lantern_accel.testing import static
from lantern_accel.testing.trace import OpRecorder
from lantern_accel_cuda import attention
from lantern_accel_hpu.bridge import Kernels
from lantern_accel_hpu.kernels import HPUOps
from lantern_accel_null.backend import DeviceBackend as Null

#: Of a tiny model with two blocks and one image, with the operations of a device; float32, sampled. A
#: race by the reference is about 185 of them, one of a kernel of its own, 6 where noise is looked up.
TINY = {
    "null": {"vanilla": 357, "lantern++": 538, "eagle2": 891, "scd": 616},
    "hpu": {"vanilla": 163, "lantern++": 548, "eagle2": 504, "scd": 218, "self": 854},
}
#: Of LlamaGen's sizes and one image, sampled with top-k, with a GPU's layout and Triton's kernels: the
#: race is two, a walk down a tree is one behind one that filters, the rest one each. Passes of at most 64
#: rows are five a layer, what stands before them in plain steps and windows is one, and what follows them
#: is two, or four where drafts are drawn.
#: ``auto`` by the length of its steps, 1 being plain decoding; ``guessed``: by a draft head, which takes
#: three kernels for each of L - 1 places of a window.
SIZES: dict[str, dict[tuple[str, int | None], int]] = {
    "llamagen-b-256": {
        ("vanilla", None): 67,
        ("auto", 1): 67,
        ("auto", 16): 69,
        ("guessed", 16): 139,
        ("lantern++", None): 285,
        ("eagle2", None): 447,
    },
    "llamagen-xl-384": {
        ("vanilla", None): 187,
        ("auto", 1): 187,
        ("auto", 16): 189,
        ("guessed", 16): 259,
        ("guessed", 32): 307,
        ("lantern++", None): 501,
        ("eagle2", None): 663,
    },
    "llamagen-3b-384": {
        ("vanilla", None): 127,
        ("auto", 1): 127,
        ("auto", 16): 129,
        ("lantern++", None): 393,
        ("eagle2", None): 555,
    },
}


#: Of LlamaGen-XL and one image with a Gaudi's fused kernels, sampled with top-k 2,000: what computes, and
#: that with casts and copies of what was computed.
GAUDI: dict[tuple[str, int | None], tuple[int, int]] = {
    ("vanilla", None): (617, 764),
    ("auto", 1): (606, 754),
    ("auto", 16): (669, 826),
    ("lantern++", None): (1439, 1610),
    ("eagle2", None): (1168, 1356),
}


#: Operators of several kernels, and those of each (``test_steps`` compares them with what is launched).
SEVERAL: dict[str, Callable[[Any], int]] = {
    "choose_tokens": lambda given: 2,
    "draft_tokens": lambda given: 2,
    "guess_tokens": lambda given: (
        3 * (given[11][0][1] - 1)
    ),  # behind the head's six: the window [B, L]
}


class Fused(Null):
    """Shapes alone; what a GPU launches is an operator, of one kernel or of :data:`SEVERAL`."""

    preferences = Preferences(sums_in_place=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: None = None) -> Tensor:
        assert bias is None
        residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return residual

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * up

    def rotary(self, cos: Tensor, sin: Tensor) -> Any:
        return cos, sin

    def rotate_write(self, qkv: Tensor, *rest: Any) -> Tensor:
        return qkv[:, :, 0] * 1.0

    kv_layout = staticmethod(attention.layout)

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        return visible.to(torch.int8)

    def guide(self, logits: Tensor, token: Tensor, *rest: Any) -> Tensor:
        return logits[: len(token)] * 1.0

    def filter(self, logits: Tensor, *rest: Any) -> Tensor:
        return logits * 1.0

    def sample(self, weights: Tensor, uniforms: Tensor, *rest: Any) -> Tensor:
        if uniforms.dim() < weights.dim():
            return weights[..., 0].to(self.index)
        return weights[..., : uniforms.shape[-1]].to(self.index)

    def race(self, weights: Tensor, keys: Tensor, at: Tensor, count: int | None = None) -> Tensor:
        best = weights[..., 0] if count is None else weights[..., :count]
        return (best * 1.0).to(self.index)

    def perturb(self, weights: Tensor, *rest: Any) -> Tensor:
        return weights * 1.0

    def accept(self, tree: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        weights = self.filter(logits)[:, 0] * 1.0  # the walk, one kernel
        images, depth = len(logits), len(tree.max_children)
        path = tree.tokens.new_empty(images, depth + 1)
        length, bonus = tree.tokens.new_empty(images), tree.tokens.new_empty(images)
        return path, length, bonus, weights, weights.new_empty(images, depth)

    def attend(self, q: Tensor, *rest: Any) -> Tensor:
        return q * 1.0

    def shape_of(self, stage: str, weight: Tensor, rows: int) -> int | None:
        return 0

    def serves_few(self, x: Tensor) -> bool:
        return x.shape[0] * x.shape[1] <= 64

    def fused_step(self, plan: Any) -> Any:
        from lantern_accel_cuda import steps

        why = steps.explain_refusal(plan)
        return Refused(why) if why else steps.fused_step(self, plan, 132)

    def trunk(self, blocks: Any, x: Tensor, at: Any, taps: Any = (), norm: Any = None) -> Tensor:
        from lantern_accel_cuda import layers

        out = layers.run(self, 132, blocks, x, at, taps, norm)
        return out if out is not None else super().trunk(blocks, x, at, taps, norm)

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, sums: bool = False
    ) -> Tensor:
        if not sums:
            return super().linear(x, weight, bias)
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(
            *x.shape[:-1], -1
        )


class Gaudi(HPUOps, Null):
    """Shapes alone, with the operations of a Gaudi; each of its fused kernels is one operator."""

    kernels = Kernels(
        sdpa=SimpleNamespace(apply=lambda q, *rest: q * 1.0),
        rms_norm=SimpleNamespace(apply=lambda x, weight, eps: x * weight),
        rotary=lambda x, *rest: x * 1.0,
        pairwise=0,
    )


def step_of(
    backend: Any,
    strategy: str,
    size: str = "llamagen-xl-384",
    length: int | None = None,
    top_k: int = 1000,
) -> OpRecorder:
    """Return what a step of one image launches."""
    manifest, name = manifest_of_size(size), "auto" if strategy == "guessed" else strategy
    asked = named_strategy(name, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    if strategy == "guessed" and length is not None:
        manifest = with_head(manifest)
        asked = asked.model_copy(update={"drafts": Window.over((1, length), fresh="head")})
    model = random_model(manifest, backend, torch.bfloat16)
    engine = engine_of(
        (model.target, model.drafter),
        asked,
        Sampling(cfg_scale=7.5, top_k=top_k),
        ops=backend,
        neighbours=model.neighbours,
    )
    if length is not None:
        engine.now = length
    recorder = OpRecorder(backend.device)
    with torch.inference_mode(), recorder:
        engine.step()
    return recorder


def launched(*given: Any) -> int:
    pytest.importorskip("triton")  # whose kernels are operators here
    seen = step_of(*given)
    names = [str(one[0]).removeprefix("lantern_accel_cuda::") for one in seen.signature]
    further = (
        SEVERAL[name](one) - 1
        for name, one in zip(names, seen.signature, strict=True)
        if name in SEVERAL
    )
    return seen.launched + sum(further)


@pytest.mark.parametrize(
    ("size", "strategy", "length"),
    [(size, *case) for size, counts in SIZES.items() for case in counts],
)
def test_a_step_of_a_real_size_stays_within_its_kernels(
    size: str, strategy: str, length: int | None
) -> None:
    most = SIZES[size][strategy, length]
    assert most - 10 < launched(Fused(0), strategy, size, length) <= most


@pytest.mark.parametrize(("strategy", "length"), GAUDI)
def test_a_step_on_a_gaudi_stays_within_its_kernels(strategy: str, length: int | None) -> None:
    seen = step_of(Gaudi(0), strategy, "llamagen-xl-384", length, 2000)
    moved = sum(one[0] in ("aten::_to_copy", "aten::clone") for one in seen.signature)
    most, most_with_moves = GAUDI[strategy, length]
    assert most - 20 < seen.launched - moved <= most
    assert seen.launched <= most_with_moves
    # Noise is looked up: no word is shifted.
    assert not any("shift" in one[0] for one in seen.signature)


class Compiling(Gaudi):
    """Notes what is captured."""

    def __init__(self) -> None:
        super().__init__(0)
        self.captured: list[str] = []

    def capture(self, step: Any, name: str = "step") -> Replay:
        self.captured.append(name)
        return Replay(step)


def test_the_first_image_of_a_large_model_waits_for_three_graphs() -> None:
    """``auto`` on LlamaGen-XL: prefill, plain decoding and one window; the device compiles no move."""
    backend = Compiling()
    model = random_model(manifest_of_size("llamagen-xl-384"), backend, torch.bfloat16)
    engines = Engines(model, backend, torch.bfloat16)
    sampling = model.manifest.defaults.sampling
    windows = Measurements(engines).windows(Strategy(name=AUTO), 1, sampling)
    with torch.inference_mode():
        engines.get(1, windows, sampling)
    assert backend.captured == ["prefill", "step 1", "step 16", "widen 16"]
    # A batch of 8 has 128 rows at 8 tokens an image, which is what a pass has at the cost of one.
    assert Measurements(engines).windows(Strategy(name=AUTO), 8, sampling).drafts.size == (8, 7)


@pytest.mark.parametrize("strategy", TINY["null"])
def test_a_tiny_step_launches_no_more_than_it_did(strategy: str) -> None:
    with open_backend("null") as backend:
        count = static.trace_shapes(backend, strategy, 1, 1.0, torch.float32).launched
    assert TINY["null"][strategy] // 2 < count <= TINY["null"][strategy]


ON_HPU = """
import sys
from lantern_accel.device.backend import dtype_policy
from lantern_accel.device.plan import Refused
from lantern_accel.device.plugins import open_backend
from lantern_accel.testing import static
with open_backend("hpu", {"software": "on"}) as backend:
    for strategy in sys.argv[1:]:
        seen = static.trace_shapes(backend, strategy, 1, 1.0, dtype_policy(backend).compute)
        print(strategy, seen.launched)
"""


@pytest.mark.long
def test_a_tiny_step_launches_no_more_on_gaudi_than_it_did(on_software_hpu: Run) -> None:
    shown = passes(on_software_hpu(*TINY["hpu"], script=ON_HPU))
    counts = dict(line.split() for line in shown.splitlines())
    assert counts.keys() == TINY["hpu"].keys()
    for strategy, most in TINY["hpu"].items():
        assert most // 2 < int(counts[strategy]) <= most, strategy


def test_a_kernel_more_is_counted() -> None:
    class Further(Fused):
        def attend(self, q: Tensor, *rest: Any) -> Tensor:
            return super().attend(q) + 1.0

    assert launched(Further(0), "vanilla") == launched(Fused(0), "vanilla") + 36
