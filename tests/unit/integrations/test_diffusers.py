"""A ``GlmImagePipeline`` of tiny random parts: its own prior, ours, and its own again."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")
pytest.importorskip("diffusers", minversion="0.37")

from support.contexts import CONTEXTS, set_now
from support.glm_image import write_glm_image
from support.hub_models import glm, glm_pipeline, glm_processor

import lantern_accel
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.glm_image.grids import large_codes, prior_token_ids
from lantern_accel.integrations import accelerate, restore
from lantern_accel.integrations.adapter import InterruptedDecodingError
from lantern_accel.integrations.diffusers import accelerate as accelerate_pipeline

PROMPTS = ["a red cube", "two  cats,\n asleep 'on' a sphere"]


@pytest.fixture(scope="module")
def parts() -> Any:
    return glm(2), glm_processor()


@pytest.fixture
def pipe(parts: Any) -> Any:
    made = glm_pipeline(*parts)
    parts[0].generation_config.top_k = 144
    yield made
    restore(made)


def pictures(
    pipe: Any, prompt: Any, seed: Any = 3, size: tuple[int, int] = (64, 96), **more: Any
) -> Any:
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return pipe(
        prompt=prompt, height=size[0], width=size[1], num_inference_steps=2, guidance_scale=1.5,
        generator=generator, output_type="np", **more,
    ).images  # fmt: skip


@pytest.mark.parametrize(
    ("size", "strategy", "prompt"),
    [((32, 32), "vanilla", PROMPTS), ((64, 96), "scd", PROMPTS), ((96, 32), "sjd", PROMPTS[0])],
)
def test_pictures_are_bit_equal_greedily(
    pipe: Any, size: tuple[int, int], strategy: str, prompt: Any
) -> None:
    pipe.vision_language_encoder.generation_config.top_k = 1  # what sampling at temperature 0 is
    want = pictures(pipe, prompt, size=size)
    assert accelerate(pipe, strategy=strategy) is pipe
    assert type(pipe).__name__ == "GlmImagePipeline"
    made = pictures(pipe, prompt, size=size)
    assert np.array_equal(made, want)
    pipe.restore()
    assert np.array_equal(pictures(pipe, prompt, size=size), want)


@pytest.mark.parametrize("name", ["autocast float16", "default cpu", "everything"])
def test_priors_are_its_own_whatever_is_set(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    priors: list[torch.Tensor] = []

    def keep(tokens: torch.Tensor, *_: int) -> None:
        priors.append(tokens)
        raise InterruptedDecodingError("painting is the pipeline's own")

    monkeypatch.setattr("lantern_accel.integrations.diffusers.prior_token_ids", keep)
    for one in ("gradients", name):
        with CONTEXTS[one]():
            before = set_now()
            accelerate(pipe, strategy="scd")
            with pytest.raises(InterruptedDecodingError):
                pictures(pipe, PROMPTS, size=(32, 32))
            assert set_now() == before
        restore(pipe)
    assert torch.equal(*priors)


def test_temperature_0_is_a_setting_of_ours(pipe: Any) -> None:
    inner = pipe.vision_language_encoder
    inner.generation_config.top_k = 1
    want = pictures(pipe, PROMPTS)
    inner.generation_config.top_k = 144
    accelerate(pipe, temperature=0)
    assert np.array_equal(pictures(pipe, PROMPTS), want)


def test_global_randomness_is_not_touched_and_the_generator_fixes_all(pipe: Any) -> None:
    accelerate(pipe, strategy="scd")
    torch.manual_seed(8)
    before = torch.get_rng_state()
    first = pictures(pipe, PROMPTS[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(pictures(pipe, PROMPTS[0]), first)
    assert not np.array_equal(pictures(pipe, PROMPTS[0], seed=4), first)
    torch.manual_seed(8)
    one = pictures(pipe, PROMPTS[0], seed=None)
    torch.manual_seed(8)
    assert np.array_equal(pictures(pipe, PROMPTS[0], seed=None), one)


def test_every_image_has_a_prior_of_its_own(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate(pipe, strategy="vanilla")
    seen: list[torch.Tensor] = []
    inside = type(pipe.transformer).forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        seen.append(named["prior_token_id"])
        return inside(self, *given, **named)

    monkeypatch.setattr(type(pipe.transformer), "forward", forward)
    made = pictures(pipe, PROMPTS, num_images_per_prompt=3)
    assert made.shape[0] == 6
    priors = {tuple(row.tolist()) for row in seen[0]}
    assert len(seen[0]) == 6 and len(priors) == 6
    first = tuple(seen[0][0].tolist())
    pictures(pipe, PROMPTS[0])
    assert tuple(seen[-1][0].tolist()) == first  # alone it has the same prior
    each = [torch.Generator().manual_seed(seed) for seed in (5, 6, 5)]
    seen.clear()
    pictures(pipe, PROMPTS[0], seed=each, num_images_per_prompt=3)
    assert torch.equal(seen[0][0], seen[0][2]) and not torch.equal(seen[0][0], seen[0][1])
    with pytest.raises(RequestError, match="there are 3 generators for 2 images"):
        pictures(pipe, PROMPTS, seed=each)


def test_progress_and_interruption_in_the_prior(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate(pipe, strategy="vanilla")
    told: list[int] = []

    class Bar:
        n = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int = 1) -> None:
            self.n += count
            told.append(self.n)
            if len(told) == 3 and stopping:
                pipe._interrupt = True

    totals: list[int] = []
    monkeypatch.setattr(
        type(pipe), "progress_bar", lambda self, total: (totals.append(total), Bar())[1]
    )
    stopping = False
    want = pictures(pipe, PROMPTS[0])
    assert totals == [13 * 19 + 2 * 3, 2]  # the prior's tokens, then the painter's steps
    assert told[-2:] == [1, 2] and told[:-2] == sorted(told[:-2]) and 200 < told[-3] <= totals[0]
    told.clear()
    stopping = True
    with pytest.raises(InterruptedDecodingError, match="the prior was interrupted"):
        pictures(pipe, PROMPTS[0])
    assert len(told) == 3
    stopping = False
    assert np.array_equal(pictures(pipe, PROMPTS[0]), want)


def test_other_arguments_go_through(pipe: Any) -> None:
    accelerate(pipe, strategy="vanilla")
    steps: list[int] = []

    def note(_: Any, step: int, __: Any, given: Any) -> Any:
        steps.append(step)
        return given

    pictures(pipe, PROMPTS[0], callback_on_step_end=note)
    assert steps == [0, 1]
    prior = torch.randint(0, 128, (1, 24), generator=torch.Generator().manual_seed(1))
    made = pictures(pipe, PROMPTS[0], prior_token_ids=prior)
    restore(pipe)
    assert np.array_equal(pictures(pipe, PROMPTS[0], prior_token_ids=prior), made)


def test_a_pipeline_that_was_loaded_without_its_prior(parts: Any, tmp_path: Path) -> None:
    folder = write_glm_image(tmp_path / "GLM-Image")
    pipe = glm_pipeline(None, None)
    with pytest.raises(ModelError, match="was loaded without its prior"):
        accelerate(pipe)
    # Of the dtype that the folder is loaded in.
    with lantern_accel.load(folder, device="cpu") as ours:
        for prior in (ours, folder):
            accelerate_pipeline(pipe, prior=prior, strategy="scd", temperature=0)
            made = pictures(pipe, PROMPTS[0])
            with pytest.warns(UserWarning, match="there are no images"):
                drawn = ours.generate(PROMPTS[0], size=(96, 64), temperature=0, strategy="scd")
            ids = prior_token_ids(drawn.tokens, 2, 3)
            assert large_codes(drawn.tokens, 2, 3).shape == (1, 2, 3)
            pipe.restore()
            assert np.array_equal(pictures(pipe, PROMPTS[0], prior_token_ids=ids), made)


@pytest.mark.parametrize("special", ["<|dit_token_129|>", "<|image|>", "<sop>"])
def test_special_strings_are_refused(pipe: Any, special: str) -> None:
    accelerate(pipe)
    with pytest.raises(RequestError, match="reads as a token of its own"):
        pictures(pipe, f"a cube {special}")


def test_sizes_and_other_pipelines_are_refused(pipe: Any) -> None:
    accelerate(pipe, strategy="vanilla")
    with pytest.raises(RequestError, match="multiples of 32 pixels"):
        pictures(pipe, PROMPTS[0], size=(64, 100))
    with pytest.raises(RequestError, match="height and width must be given"):
        pipe(prompt=PROMPTS[0])

    class FluxPipeline:
        pass

    with pytest.raises(ModelError, match="FluxPipeline cannot be accelerated"):
        accelerate(FluxPipeline())


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"guidance": 2.0}, TypeError, "guidance"),
        ({"num_images_per_prompt": 0}, RequestError, "num_images_per_prompt is 0"),
        ({"num_images_per_prompt": -1}, RequestError, "num_images_per_prompt is -1"),
        ({"num_images_per_prompt": 1.5}, RequestError, "num_images_per_prompt is 1.5"),
    ],
)
def test_wrong_arguments_are_refused_before_a_prior_is_drawn(
    pipe: Any, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    accelerate(pipe)
    with pytest.raises(error, match=message):
        pictures(pipe, PROMPTS[0], **asked)
    assert pipe.vision_language_encoder._lantern_accel.pipeline is None  # nothing was made


def test_a_prior_in_anothers_place_is_the_one_that_decodes(pipe: Any) -> None:
    accelerate(pipe, strategy="vanilla")
    inner, size = pipe.vision_language_encoder, (32, 32)
    pictures(pipe, PROMPTS[0], size=size)
    other = glm(7)
    other.generation_config.top_k = 1
    want = pictures(glm_pipeline(other, pipe.processor), PROMPTS[0], size=size)
    pipe.vision_language_encoder = other
    assert np.array_equal(pictures(pipe, PROMPTS[0], size=size), want)
    pipe.restore()
    assert "_lantern_accel" not in vars(other)
    pipe.vision_language_encoder = inner


def test_an_accelerated_pipeline_is_not_copied(pipe: Any) -> None:
    accelerate(pipe, strategy="vanilla")
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ModelError, match=r"call restore\(\) first"):
            make(pipe)
    assert type(copy.deepcopy(restore(pipe))) is type(pipe)


def test_an_untested_release_is_refused(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel.families import releases

    monkeypatch.setattr(releases, "find_release", lambda library: "0.99.0")
    with pytest.raises(ModelError, match=r"diffusers 0\.99\.0 is installed, but only releases"):
        accelerate(pipe)


def test_the_release_paints_with_its_own_diffusion_half(parts: Any, tmp_path: Path) -> None:
    folder = write_glm_image(tmp_path / "GLM-Image")
    half = glm_pipeline(None, None)
    for name in ("transformer", "vae", "scheduler", "text_encoder", "tokenizer"):
        getattr(half, name).save_pretrained(folder / name)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as ours:
        monkey: Any = ours.model.text
        first = ours.model.family.render_images(
            ours.model, torch.zeros(1, 254, dtype=torch.int64), (64, 2, 3), ["a cube"], [1]
        )
        assert first is not None and first[0].size == (96, 64)
        assert monkey.renderer is not None
        done = ours.generate("a cube", size=(96, 64), num_images=2, seed=4, strategy="scd")
        assert [one.size for one in done.images] == [(96, 64)] * 2
        assert done.save(tmp_path / "a.png")[0].is_file()
