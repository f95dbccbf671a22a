"""Every door computes as it does where nobody has set anything of torch, and leaves what is set."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.contexts import CONTEXTS, set_now

import lantern_accel
from lantern_accel.training.anymodel import run_model_drafter
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTrainConfig

PROMPTS = ["red heart", "dog face"]
ASKED: dict[str, Any] = {"seed": 5, "num_images": 2, "batch_size": 3}
#: bfloat16 in an autocast of float16, on torch's operators and on kernels.
HOW = {
    "kernels": {"dtype": "float32"},
    "operators": {"dtype": "bfloat16", "options": {"native": "off", "compile": "off"}},
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def drawn(model: Path, how: str) -> dict[str, Any]:
    """Load, generate, stream, decode pixels and warm up, and return what came of it."""
    with lantern_accel.load(model, device="cpu", **HOW[how]) as pipeline:
        made = pipeline.generate(PROMPTS, strategy="lantern++", **ASKED)
        window = pipeline.generate(PROMPTS[0], strategy="scd", seed=3)
        streamed = [e for e in pipeline.stream(PROMPTS, strategy="eagle", **ASKED) if e.done]
        pipeline.warm_up(1, "vanilla")
        return {
            "tokens": made.tokens.tolist(),
            "images": [one.tobytes() for one in (*made.images, *window.images)],
            "memory": [one.memory for one in made.stats.decision.parts],
            "windows": window.tokens.tolist(),
            "stream": [(e.index, e.tokens.tolist(), e.image.tobytes()) for e in streamed],
            "pixels": digest(pipeline.pixels(made.tokens)),
            "conditions": digest(pipeline.conditions(PROMPTS).condition),
        }


@pytest.fixture(scope="module")
def alone(tiny_model):
    return {how: drawn(tiny_model, how) for how in HOW}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_pipeline_draws_as_outside(tiny_model, alone, name, how):
    with CONTEXTS[name]():
        before = set_now()
        made = drawn(tiny_model, how)
        assert set_now() == before
    assert made == alone[how]


def test_nothing_is_set_between_events_and_after_errors(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        want = pipeline.generate(PROMPTS[0], seed=5)
        plain, events = set_now(), pipeline.stream(PROMPTS[0], seed=5, partials=3)
        with CONTEXTS["float64"](), CONTEXTS["a block on meta"]():
            inside = set_now()
            next(events)
            assert set_now() == inside
        assert set_now() == plain
        with CONTEXTS["autocast float16"](), CONTEXTS["default meta"]():
            (last,) = [one for one in events if one.done]
            assert torch.equal(last.tokens, want.tokens[0].cpu())
            inside = set_now()

            def fail(known: int, total: int) -> None:
                assert set_now() == inside  # a caller's function runs in what the caller has set
                raise KeyError("mine")

            with pytest.raises(KeyError, match="mine"):
                pipeline.generate(PROMPTS[0], on_progress=fail)
            with pytest.raises(lantern_accel.LanternError):
                pipeline.generate("", size=(3, 3))
            assert set_now() == inside


def test_what_comes_out_is_the_callers_own(tiny_model):
    table = torch.nn.Embedding(256, 2)
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        made, events = pipeline.generate(PROMPTS[0], seed=1), pipeline.stream(PROMPTS[0], seed=1)
        for tokens in (made.tokens, *(one.tokens for one in events)):
            if len(tokens):
                table(tokens).sum().backward()
                tokens.add_(1)
        pipeline.pixels(made.tokens - 1).add_(1)


def test_requests_of_two_threads_give_the_default_dtype_back(tiny_model):
    """The first to end must not set it while the other computes, nor the last leave float32."""
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        want = pipeline.generate(PROMPTS[0], seed=1).tokens
        inside, go, found = threading.Event(), threading.Event(), []

        def hold(known: int, total: int) -> None:
            inside.set()
            go.wait(20)

        def first() -> None:
            with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as other:
                found.append(other.generate(PROMPTS[0], seed=1, on_progress=hold).tokens)

        with CONTEXTS["float64"]():
            thread = threading.Thread(target=first)
            thread.start()
            assert inside.wait(20)
            found.append(pipeline.generate(PROMPTS[0], seed=1).tokens)
            assert torch.get_default_dtype() == torch.float32  # the other request still runs
            go.set()
            thread.join()
            assert torch.get_default_dtype() == torch.float64
    assert all(torch.equal(one, want) for one in found) and len(found) == 2


def test_the_service_draws_as_outside(tiny_model):
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from support.server import same, serving

    from lantern_accel.serving.scheduler import ServerSettings

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        want = pipeline.generate("red heart", seed=7, strategy="scd").images[0]
    with CONTEXTS["bfloat16"](), CONTEXTS["autocast float16"](), CONTEXTS["default meta"]():
        before = set_now()
        with serving(tiny_model, ServerSettings(slots=2)) as served:
            asked = {"seed": 7, "strategy": "scd"}
            made = served.client().images.generate(prompt="red heart", extra_body=asked)
        assert set_now() == before
    assert same(made.data[0].b64_json, want)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["everything", "autocast bfloat16", "inference"])
def test_training_computes_as_outside(tiny_model, tmp_path, name, precision):
    chosen = DrafterTrainConfig(
        steps=3, batch_size=2, warmup=1, evaluate_every=2, checkpoint_every=2, compile=False,
        precision=precision,
    )  # fmt: skip

    def trained(out: Path) -> tuple[str, Any]:
        with lantern_accel.load(tiny_model, device="cpu", dtype="float32", drafter="none") as one:
            device = TrainDevice(one.backend, precision)
            asked: dict[str, Any] = {"samples": 4, "prompts": PROMPTS}
            report = run_model_drafter(one, chosen, out, device, **asked)
        weights = (out / "drafter.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest(), json.dumps(report["curve"])

    want = trained(tmp_path / "outside")
    with CONTEXTS[name]():
        before = set_now()
        made = trained(tmp_path / "inside")
        assert set_now() == before
    assert made == want
