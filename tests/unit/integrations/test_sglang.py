"""SGLang's own registry, stage and requests, where it is installed, on a random prior."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="the release of SGLang is in an environment of its own")
pytest.importorskip("diffusers")

from support.hub_models import glm, glm_draws_fairly, glm_inputs, glm_processor
from support.janus import write_janus

import lantern_accel
from lantern_accel.errors import ModelError, RequestError
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
    assert hooked == {"generate_prior_tokens", "forward", "load_external_model_package"}
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
    inputs = glm_inputs(stage.processor, ["a red cube"], 32, 32)
    glm_draws_fairly(model, inputs, drawn(stage).tokens)


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


@pytest.mark.parametrize("wrong", ["release", "settings"])
def test_outside_the_range_nothing_is_hooked(
    kind: Any, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    if wrong == "release":
        monkeypatch.setattr(releases, "find_release", lambda library: "0.5.24")
    else:
        monkeypatch.setenv(ours.SETTINGS, "scd")
    monkeypatch.setattr(HookRegistry, "register", lambda *given: pytest.fail("it was hooked"))
    with caplog.at_level(logging.WARNING, "lantern_accel"):
        ours.plugin()
    assert ("0.5.24" if wrong == "release" else "JSON") in caplog.text


@pytest.fixture(scope="module")
def server(kind: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a server's arguments for a folder of Janus, in a world of one process."""
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args

    folder = write_janus(tmp_path_factory.mktemp("models") / "Janus-Pro-1B")
    made = ServerArgs.from_kwargs(model_path=str(folder), num_gpus=1, log_level="error")
    set_global_server_args(made)
    meet = f"file://{tmp_path_factory.mktemp('meet') / 'of'}"
    parallel_state.maybe_init_distributed_environment_and_model_parallel(
        1, 1, distributed_init_method=meet
    )
    yield made
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    set_global_server_args(ARGS)


@pytest.fixture(scope="module")
def janus(server: Any) -> Iterator[Any]:
    """Return the pipeline that SGLang's registry builds for the folder."""
    from sglang.multimodal_gen.runtime.pipelines_core import build_pipeline

    made = build_pipeline(server)
    assert type(made).__module__ == "lantern_accel.integrations.sglang_janus"
    yield made
    made.ours.close()


@pytest.fixture(scope="module")
def own(server: Any) -> Iterator[Any]:
    with lantern_accel.load(server.model_path, device="cpu") as made:
        yield made


def janus_asked(server: Any, **given: Any) -> Any:
    """Return a request as SGLang's entry points make one, with the defaults of the registered class."""
    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

    params = SamplingParams.from_user_sampling_params_args(
        model_path=server.model_path, server_args=server, **{"prompt": "a cube", "seed": 5, **given}
    )
    made = Req(sampling_params=params)
    params.apply_request_extra(made)
    return made


GREEDY = {"temperature": 0.0}


def same(outputs: Any, want: Any) -> bool:
    pairs = zip(outputs.output, want.images, strict=True)
    return all(np.array_equal(one, np.asarray(other)) for one, other in pairs)


def test_janus_is_drawn_as_by_our_own_loop(
    server: Any, janus: Any, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    draws = janus.ours.generate_images
    monkeypatch.setattr(
        janus.ours, "generate_images", lambda *given: results.append(draws(*given)) or results[-1]
    )
    batch = janus_asked(server, width=1024, height=1024, lantern_accel=GREEDY)  # the API's own size
    out = janus.forward(batch, server)
    want = own.generate("a cube", seed=5, strategy="vanilla", **GREEDY)
    assert torch.equal(results[0].tokens, want.tokens) and same(out, want)
    assert len(want.tokens.unique()) > 5  # not a model that draws one code
    assert {"JanusStage.prior", "JanusStage.pixels"} <= set(out.metrics.stages)
    assert out.metrics.stages["JanusStage.prior"] > 0
    assert out.usage["completion_tokens"] == want.tokens.numel()
    assert out.usage["prior_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"num_outputs_per_prompt": 3}, {"num_images": 3, "seed": [5, 6, 7]}),
        ({"num_outputs_per_prompt": 2, "seed": [9, 4]}, {"num_images": 2, "seed": [9, 4]}),
        (
            {"guidance_scale": 2.0, "negative_prompt": "a cube"},
            {"cfg_scale": 2.0, "negative_prompt": "a cube", "seed": 5},
        ),
    ],
)
def test_what_a_request_to_janus_asks_for_is_passed_on(
    server: Any, janus: Any, own: Any, given: dict[str, Any], settings: dict[str, Any]
) -> None:
    out = janus.forward(janus_asked(server, **given), server)
    assert same(out, own.generate("a cube", strategy="vanilla", **settings))


def test_requests_that_the_scheduler_merges_are_drawn_together(
    server: Any, janus: Any, own: Any
) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="the scheduler imports it")
    from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

    scheduler = object.__new__(Scheduler)
    scheduler.server_args = server
    both = [janus_asked(server), janus_asked(server, prompt="two cats", seed=9)]
    merged = scheduler._try_merge_generation_reqs(both)
    assert merged.prompt == ["a cube", "two cats"]
    want = own.generate(["a cube", "two cats"], seed=[5, 9], strategy="vanilla")
    assert same(janus.forward(merged, server), want)
    more = janus_asked(server, lantern_accel=GREEDY)
    assert scheduler._try_merge_generation_reqs([both[0], more]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 64, "height": 32}, "size"),
        ({"lantern_accel": {"temprature": 1}}, "temperature"),
        ({"lantern_accel": 3}, "an object of settings"),
    ],
)
def test_what_a_request_to_janus_cannot_have(
    server: Any, janus: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        janus.forward(janus_asked(server, **given), server)
    with pytest.raises(ValueError, match="input_reference"):  # SGLang's own, for text to image
        janus_asked(server, image_path="a.png")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_gpus": 2}, "spread over 2 devices"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"lora_path": "x"}, "--lora-path"),
    ],
)
def test_servers_that_janus_is_not_served_by(
    server: Any, given: dict[str, Any], message: str
) -> None:
    changed = SimpleNamespace(
        **{"num_gpus": 1, **given}, is_arg_explicitly_set=lambda name: name in given
    )
    with pytest.raises(ModelError, match=message):
        server.pipeline_config.validate_server_args(changed)


def test_another_package_s_janus_stays(janus: Any, caplog: pytest.LogCaptureFixture) -> None:
    from lantern_accel.integrations import sglang_janus

    with caplog.at_level(logging.WARNING, "lantern_accel"):
        sglang_janus.register.__wrapped__()  # as if another package had been first
    assert "already registered" in caplog.text
