"""No picture is made from numbers that are infinite or none: an error says when and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lantern_accel
from lantern_accel.errors import ModelError, NotFiniteError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import STRATEGIES

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def pipeline(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The pipeline without engines, whose target is whole again afterwards."""
    pipeline.release_engines()
    yield pipeline
    vars(pipeline.model.target).pop("head", None)


@pytest.fixture
def own(tiny_model: Path) -> Iterator[Pipeline]:
    """A pipeline whose weights may be damaged."""
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        yield pipeline


def plant(pipeline: Pipeline, change: Callable[[int, torch.Tensor], Any]) -> list[int]:
    """Let ``change`` damage the target's logits; it gets the number of the call since the last reset."""
    real, calls = pipeline.model.target.head, [0]

    def head(features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = real(features).clone()
        change(calls[0], logits)
        calls[0] += 1
        return logits

    pipeline.model.target.head = head
    return calls


def settings(strategy: str) -> dict[str, Any]:
    return {"k": 3} if strategy.startswith("lantern") else {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_damaged_weights_give_an_error_and_no_picture(
    pipeline: Pipeline, strategy: str, temperature: float
) -> None:
    given = {"temperature": temperature, "seed": 1, **settings(strategy)}
    plant(pipeline, lambda call, logits: logits[..., 7].fill_(NAN))
    handed: list[Any] = []
    with pytest.raises(
        NotFiniteError, match=r"logits of image 0 \(row 0\) are not finite in the p"
    ):
        pipeline.generate(
            "red heart", strategy=strategy, on_images=lambda *one: handed.append(one), **given
        )
    assert not handed


class Damaged:
    """Guidance that damages one logit of the second image, in one pass: the third after the prefill."""

    def __init__(self, real: Any, value: float) -> None:
        self.real, self.value, self.passes = real, value, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, *given: Any) -> torch.Tensor:
        logits: torch.Tensor = self.real(*given).clone()
        if self.passes == 3:
            logits[1, 0, 4] = self.value
        self.passes += 1
        return logits


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("vanilla", {}),
        ("vanilla", {"temperature": 0.0}),
        ("vanilla", {"top_k": 5, "top_p": 0.9}),
        ("lantern++", {"k": 3}),
        ("eagle2", {"temperature": 0.0}),
        # A window that nobody chose would depend on the batch, and with it the engine.
        ("scd", {"window": 8}),
        ("sjd", {"window": 8, "coupling": "maximal"}),
    ],
)
def test_the_error_names_the_step_and_the_image(
    pipeline: Pipeline, strategy: str, more: dict[str, Any], value: float
) -> None:
    request = pipeline.request(["red heart", "dog face"], strategy=strategy, seed=2, **more)
    ready = pipeline.engine(2, request.strategy, request.sampling)
    verifying: Any = ready.engine.verifying
    verifying.guidance = Damaged(verifying.guidance, value)
    with pytest.raises(NotFiniteError) as told:
        pipeline.generate(
            ["red heart", "dog face"], strategy=strategy, seed=2, batch_size=2, **more
        )
    assert (told.value.row, told.value.step) == (1, 3)
    assert "image 1 (row 1)" in str(told.value) and "at step 3" in str(told.value)


def test_images_of_earlier_batches_are_kept_and_the_next_request_is_clean(
    pipeline: Pipeline,
) -> None:
    asked: dict[str, Any] = {"strategy": "lantern++", "seed": 3, "k": 3, "num_images": 2}
    asked["batch_size"] = 1
    want, handed = pipeline.generate("red heart", **asked).tokens, list[int]()
    plant(pipeline, lambda call, logits: logits.fill_(INF) if handed == [0] else None)
    with pytest.raises(NotFiniteError, match="image 1 "):
        pipeline.generate(
            "red heart", **asked, on_images=lambda first, images: handed.append(first)
        )
    assert handed == [0]
    handed.clear()
    assert torch.equal(pipeline.generate("red heart", **asked).tokens, want)


def test_a_damaged_drafter_costs_steps_and_no_token_is_drawn_from_it(own: Pipeline) -> None:
    for name, weight in own.model.drafter.named_parameters():
        if "embed" not in name:
            weight.fill_(NAN)
    for strategy in ("eagle", "eagle2"):
        drawn = own.generate("red heart", strategy=strategy, seed=3, temperature=0.0).tokens
        plain = own.generate("red heart", strategy="vanilla", seed=3, temperature=0.0).tokens
        assert torch.equal(drawn, plain)


def test_a_tokenizer_that_overflows_makes_no_picture(own: Pipeline) -> None:
    next(iter(own.model.vq.decoder.parameters())).fill_(3e38)
    with pytest.raises(ModelError, match="pixels are not finite"):
        own.generate("red heart", seed=3, strategy="vanilla")


@pytest.mark.parametrize(
    "change", [{"cfg_scale": 1000}, {"temperature": 100}, {"temperature": 1e-3}]
)
def test_the_largest_settings_that_are_taken_do_not_overflow(
    pipeline: Pipeline, change: dict[str, float]
) -> None:
    assert (
        len(pipeline.generate("red heart", strategy="lantern++", seed=3, k=3, **change).images) == 1
    )
