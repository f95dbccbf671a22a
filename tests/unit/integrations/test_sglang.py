"""SGLang's own registry, stage and requests, where it is installed, on a random prior."""

from __future__ import annotations

import inspect
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="the release of SGLang is in an environment of its own")
pytest.importorskip("diffusers")

from support.chi_square import misfit
from support.hub_models import glm, glm_inputs, glm_processor

from lantern_accel.families import releases
from lantern_accel.integrations import sglang as ours

pytestmark = pytest.mark.long
SIZE = (64, 96)
ARGS = SimpleNamespace(
    srt_encoder_url=None, comfyui_mode=False, enable_layerwise_nvtx_marker=False,
    pipeline_config=SimpleNamespace(supports_sequential_multi_output_inference=lambda: False),
)  # fmt: skip


@pytest.fixture(scope="module")
def kind() -> Any:
    """Return the stage's class as SGLang's registry makes it, with and without this package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # while it is imported
        return stage_class()


def stage_class() -> Any:
    from sglang.multimodal_gen.runtime.platforms import plugins
    from sglang.multimodal_gen.runtime.server_args import set_global_server_args

    set_global_server_args(ARGS)
    found = plugins.entry_points
    plugins.entry_points = lambda **group: [
        one for one in found(**group) if one.dist.name != "lantern-accel"
    ]
    plugins.apply_plugin_hooks()
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import glm_image

    assert not hasattr(glm_image.GlmImageAR.generate_prior_tokens, "__wrapped__")
    plugins.entry_points = found
    plugins._reset_lifecycle_for_tests()
    plugins.apply_plugin_hooks()
    hooked = {target.rpartition(".")[2] for target in plugins.HookRegistry._patched}
    assert hooked == {"generate_prior_tokens", "forward"}
    return glm_image.GlmImageAR


@pytest.fixture
def stage(kind: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(ours.SETTINGS, '{"strategy": "scd"}')
    made = kind(glm_processor(), glm(2))
    made.vision_language_encoder.generation_config.top_k = 1  # greedily, for its loop and ours
    return made


def asked(size: tuple[int, int] = SIZE, seed: Any = 7, count: int = 1, **more: Any) -> Any:
    from sglang.multimodal_gen.configs.sample.glmimage import GlmImageSamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

    given = {"prompt": "a red cube", "height": size[0], "width": size[1], "seed": seed, **more}
    return Req(sampling_params=GlmImageSamplingParams(num_outputs_per_prompt=count, **given))


def drawn(stage: Any) -> Any:
    return stage.vision_language_encoder._lantern_accel.last


def by_their_own_loop(stage: Any, batch: Any) -> Any:
    """Run a request by the stage's methods as SGLang wrote them."""
    names = ("generate_prior_tokens", "forward")
    own = {name: inspect.unwrap(getattr(type(stage), name)) for name in names}
    plain = type("Plain", (type(stage),), own)(stage.processor, stage.vision_language_encoder)
    return plain(batch, ARGS)


@pytest.mark.parametrize("size", [SIZE, (40, 70), (32, 32)])  # SGLang rounds the second up
def test_greedy_ids_are_those_of_their_own_loop(stage: Any, size: tuple[int, int]) -> None:
    want, made = by_their_own_loop(stage, asked(size)), stage(asked(size), ARGS)
    assert torch.equal(made.prior_token_id, want.prior_token_id)
    assert made.prior_token_id.dtype == want.prior_token_id.dtype
    assert (made.height, made.width, made.extra["usage_by_output"]) == (
        want.height, want.width, want.extra["usage_by_output"],
    )  # fmt: skip
    seconds = drawn(stage).seconds
    assert made.extra["lantern_accel"]["prior_seconds"] == seconds > 0
    shares = stage.vision_language_encoder._lantern_accel.memory
    assert shares.shared + shares.beside > 0


def test_pictures_of_a_request_are_drawn_together(stage: Any) -> None:
    stage.vision_language_encoder.generation_config.top_k = 144
    three = stage(asked(count=3), ARGS).prior_token_id
    assert len(drawn(stage).tokens) == 3 and len(three.unique(dim=0)) == 3
    other = stage(asked(seed=8), ARGS).prior_token_id
    assert torch.equal(other[0], three[1])  # a seed is a picture


def test_sampled_tokens_follow_the_law_of_the_model(stage: Any) -> None:
    model = stage.vision_language_encoder
    model.generation_config.top_k = 30
    stage(asked((32, 32), count=200), ARGS)
    tokens = drawn(stage).tokens
    inputs = glm_inputs(stage.processor, ["a red cube"], 32, 32)
    config, _ = model._prepare_generation_config(None, do_sample=True)
    for known in ([], [int(tokens[:, 0].mode().values)]):
        rows = tokens[(tokens[:, : len(known)] == torch.tensor(known)).all(dim=1)]
        ids = torch.cat((inputs["input_ids"], torch.tensor([known], dtype=torch.int64)), dim=1)
        given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = model.generate(
                **given, max_new_tokens=1, do_sample=True, output_scores=True,
                return_dict_in_generate=True,
            ).scores[0][0]  # fmt: skip
        law = torch.softmax(logits[:128].float(), dim=-1)
        assert abs(misfit(rows[:, len(known)].bincount(minlength=128), law)) < 4, config


@pytest.mark.parametrize("why", ["a hook", "a special string", "an external server", "a setting"])
def test_what_is_not_served_goes_the_old_way_with_one_line(
    stage: Any, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, model = asked(), stage.vision_language_encoder
    want = by_their_own_loop(stage, asked())
    if why == "a hook":  # as a quantised, sharded or adapted module has
        model.model.language_model.norm.register_forward_hook(lambda *given: None)
    elif why == "a special string":
        batch = asked(prompt="a cube <sop>")
    elif why == "a setting":
        monkeypatch.setenv(ours.SETTINGS, '{"temprature": 0}')
    else:
        stage.vision_language_encoder = "http://127.0.0.1:9"
        with pytest.raises(AttributeError):  # SGLang's own loop was asked, which has no module
            stage(batch, ARGS)
        return
    with caplog.at_level(logging.WARNING, "lantern_accel"):
        made = stage(batch, ARGS)
    assert len([one for one in caplog.records if "itself" in one.message]) == 1
    if why != "a special string":
        assert torch.equal(made.prior_token_id, want.prior_token_id)


def test_a_module_that_the_engine_moves_is_followed(stage: Any) -> None:
    before = stage(asked(), ARGS).prior_token_id
    first = stage.vision_language_encoder._lantern_accel.pipeline
    stage.vision_language_encoder._apply(torch.clone)  # other tensors, as after a move and back
    assert torch.equal(stage(asked(), ARGS).prior_token_id, before)
    assert stage.vision_language_encoder._lantern_accel.pipeline is not first


@pytest.mark.parametrize("wrong", ["release", "settings"])
def test_outside_the_range_nothing_is_hooked(
    kind: Any, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    if wrong == "release":
        monkeypatch.setattr(releases, "installed", lambda library: "0.5.24")
    else:
        monkeypatch.setenv(ours.SETTINGS, "scd")
    monkeypatch.setattr(HookRegistry, "register", lambda *given: pytest.fail("it was hooked"))
    with caplog.at_level(logging.WARNING, "lantern_accel"):
        ours.plugin()
    assert ("0.5.24" if wrong == "release" else "JSON") in caplog.text
