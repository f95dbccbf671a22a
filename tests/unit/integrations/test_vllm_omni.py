"""vLLM-Omni's own registry, loader and runner, where it is installed, on the recorded tiny models."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("the release of vLLM-Omni is in an environment of its own", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, while it is imported
    import vllm_omni  # noqa: F401  # where it cannot be imported, its tests fail

from support.glm_image import write_glm_image
from support.hub_models import glm_draws_fairly, glm_inputs, glm_pipeline, glm_processor
from support.janus import write_janus
from vllm_omni.diffusion.cancellation import RequestCancellationRegistry
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

import lantern_accel
from lantern_accel.errors import ModelError
from lantern_accel.families import releases
from lantern_accel.families.glm_image.grids import prior_token_ids
from lantern_accel.integrations import vllm_omni as ours

pytestmark = pytest.mark.long
NAME = "lantern_accel.integrations.vllm_omni.JanusPipeline"
GLM_NAME = "lantern_accel.integrations.vllm_omni_glm_image.GlmImagePipeline"
PROMPT = "a red cube"


def config_of(folder: Path, name: str = NAME, **more: Any) -> Any:
    given = {"pipeline_class": name, "lantern_accel": {"strategy": "scd", **more}}
    made = OmniDiffusionConfig(
        model=str(folder), dtype=torch.float32, custom_pipeline_args=given, enforce_eager=True
    )
    if name == GLM_NAME:
        made.enrich_config()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_janus(tmp_path_factory.mktemp("models") / "Janus-Pro-1B")


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_glm_image(tmp_path_factory.mktemp("models") / "GLM-Image")
    parts = glm_pipeline(None, None)
    for name in ("vae", "transformer", "text_encoder", "tokenizer", "scheduler"):
        getattr(parts, name).save_pretrained(made / name)
    return made


@pytest.fixture(scope="module")
def engine() -> Any:
    """Return vLLM's configuration; its platform without a card leaves out some answers."""
    import vllm.platforms
    from vllm.config import DeviceConfig, VllmConfig
    from vllm_omni.diffusion.attention.backends import sdpa
    from vllm_omni.platforms import current_omni_platform

    answers = {
        "get_current_memory_usage": 0, "max_memory_reserved": 0, "max_memory_allocated": 0,
        "reset_peak_memory_stats": None, "synchronize": None, "is_available": False,
        "set_device": None, "get_device_count": 1,
        "get_diffusion_attn_backend_cls": f"{sdpa.__name__}.SDPABackend",
    }  # fmt: skip
    for one in (vllm.platforms.current_platform, current_omni_platform):
        for name, answer in answers.items():
            setattr(type(one), name, lambda *given, answer=answer, **named: answer)
    sdpa.SDPAImpl.forward = sdpa.SDPAImpl.forward_hip  # torch's, on each platform
    return VllmConfig(device_config=DeviceConfig(device="cpu"))  # no card says what the device is


def runner_of(engine: Any, config: Any) -> Any:
    """Return vLLM-Omni's runner with the pipeline that a configuration names."""
    made = DiffusionModelRunner(engine, config, torch.device("cpu"))
    name = config.custom_pipeline_args["pipeline_class"]
    made.load_model(load_format="custom_pipeline", custom_pipeline_name=name)
    assert f"{type(made.pipeline).__module__}.{type(made.pipeline).__name__}" == name
    return made


@pytest.fixture(scope="module")
def runner(folder: Path, engine: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        return runner_of(engine, config_of(folder))


@pytest.fixture(scope="module")
def glm_runner(
    glm_folder: Path, engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.forward_context import set_forward_context

    config, meet = config_of(glm_folder, GLM_NAME, top_k=1), tmp_path_factory.mktemp("meet") / "of"
    with (
        warnings.catch_warnings(),
        set_forward_context(vllm_config=engine, omni_diffusion_config=config),
        set_current_vllm_config(engine),
    ):
        warnings.simplefilter("ignore")  # vLLM's own
        parallel_state.init_distributed_environment(1, 0, f"file://{meet}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        yield runner_of(engine, config)
        parallel_state.destroy_distributed_env()


def asked(prompt: Any = PROMPT, count: int = 1, seed: int = 5, **more: Any) -> Any:
    extra = {"lantern_accel": more.pop("lantern_accel", {}), **more.pop("more", {})}
    params = OmniDiffusionSamplingParams(
        num_outputs_per_prompt=count, seed=seed, extra_args=extra, **more
    )
    return OmniDiffusionRequest(prompt=prompt, sampling_params=params, request_id="one")


def pictures(output: Any) -> list[np.ndarray]:
    assert output.error is None, output.error
    return [np.asarray(one) for one in output.output["payload"]["image"]]


def test_the_registries_find_both_by_the_entry_point(glm_folder: Path, tmp_path: Path) -> None:
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.diffusion.registry import DiffusionModelRegistry
    from vllm_omni.plugins import load_omni_plugins_by_group

    load_omni_plugins_by_group("vllm_omni.general_plugins")["lantern_accel"]()
    for name in ours.JANUS:
        assert DiffusionModelRegistry._try_load_model_cls(name) is ours.JanusPipeline
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"pipeline: {ours.GLM_IMAGE}\nstages:\n  - stage_id: 0\n", encoding="utf-8")
    (stage,) = resolve_omni_config(
        str(glm_folder), trust_remote_code=None, deploy_config_path=str(deploy), cli_overrides={},
        stage_overrides=None, strategy_config_path=None,
    ).stage_configs  # fmt: skip
    named = stage.stage_pipeline_config.model_arch
    assert DiffusionModelRegistry._try_load_model_cls(named).__name__ == "GlmImagePipeline"


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 0}])
def test_pictures_times_and_memory_come_back_in_the_engine_s_form(
    runner: Any, folder: Path, settings: dict[str, float]
) -> None:
    out = runner.execute_model(asked(count=2, lantern_accel=settings, guidance_scale=3.0))
    with lantern_accel.load(folder, device="cpu", dtype="float32") as own:
        given = {"seed": [5, 6], "cfg_scale": 3.0, "strategy": "vanilla", **settings}
        want = own.generate(PROMPT, num_images=2, **given)
    assert len(want.tokens.unique()) > 5  # not a model that draws one code
    for made, one in zip(pictures(out), want.images, strict=True):
        assert np.array_equal(made, np.asarray(one))
    assert set(out.stage_durations) == {"JanusPipeline.prior", "JanusPipeline.pixels"}
    assert all(seconds > 0 for seconds in out.stage_durations.values())
    assert out.peak_memory_mb >= 0 and out.output["metadata"]["lantern_accel"]


def test_requests_that_wait_together_are_drawn_together(runner: Any) -> None:
    both = [asked(seed=5), asked("two cats", seed=9)]
    alone = [
        pictures(runner.execute_model(asked(one.prompt, seed=one.sampling_params.seed)))[0]
        for one in both
    ]
    batch = runner._execute_request_list(
        both, od_config=runner.od_config, allow_single_output=False,
        require_request_batch_support=True, record_name="batch",
    )  # fmt: skip
    for one, want in zip(batch.runner_outputs, alone, strict=True):
        assert np.array_equal(pictures(one.result)[0], want)
    wrong = {"prompt": "a cube", "multi_modal_data": {"image": Image.new("RGB", (8, 8))}}
    batch = runner._execute_request_list(
        [asked(seed=5), asked(wrong)], od_config=runner.od_config, allow_single_output=False,
        require_request_batch_support=True, record_name="batch",
    )  # fmt: skip
    first, second = (one.result for one in batch.runner_outputs)
    assert np.array_equal(pictures(first)[0], alone[0])
    assert (second.error_status_code, "images as input" in second.error) == (400, True)


def cancelled(
    when: Callable[[list[int]], bool], runner: Any, request: Any, module: Any, patch: Any
) -> tuple[Any, list[int]]:
    """Execute a request that is cancelled at a check; return what was known of the tokens at each."""
    signals, own = RequestCancellationRegistry(), module.stop_if_cancelled
    request.cancellation_signal = signals.create("one")
    calls: list[int] = []

    def stop(*known: int) -> None:
        calls.append(known[0] if known else -1)  # -1: no token is being drawn
        if when(calls):
            signals.cancel(["one"])
        own()

    with patch.context() as patched:
        patched.setattr(module, "stop_if_cancelled", stop)
        out = runner.execute_model(request)
    signals.close()
    assert out.aborted
    return out, calls


def test_a_cancelled_request_ends_while_its_tokens_are_drawn(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calls = cancelled(lambda calls: len(calls) == 2, runner, asked(), ours, monkeypatch)
    assert len(calls) == 2
    assert pictures(runner.execute_model(asked()))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"width": 64, "height": 32}, "size"),
        ({"lantern_accel": {"temprature": 1}}, "temperature"),
        ({"lantern_accel": 3}, "an object of settings"),
    ],
)
def test_what_a_request_cannot_have_is_a_client_s_error(
    runner: Any, more: dict[str, Any], message: str
) -> None:
    out = runner.execute_model(asked(**more))
    assert out.error_status_code == 400 and message in out.error


def test_stages_that_are_not_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config_of(folder)
    for name, value in (
        ("quantization_config", "fp8"), ("lora_path", "x"), ("enable_cpu_offload", True),
    ):  # fmt: skip
        changed = SimpleNamespace(**{**vars(made), name: value})
        with pytest.raises(ModelError, match=name):
            ours.JanusPipeline(od_config=changed)
    spread = SimpleNamespace(**{**vars(made), "parallel_config": SimpleNamespace(world_size=2)})
    with pytest.raises(ModelError, match="spread over 2 devices"):
        ours.JanusPipeline(od_config=spread)
    monkeypatch.setattr(releases, "find_release", lambda library: "0.31.0")
    with pytest.raises(ModelError, match=r"vllm-omni 0\.31\.0 is installed"):
        ours.JanusPipeline(od_config=made)


def test_glm_image_is_drawn_and_painted_in_one_stage(glm_runner: Any, glm_folder: Path) -> None:
    from transformers import GlmImageForConditionalGeneration
    from vllm_omni.diffusion.registry import get_diffusion_post_process_func

    sizes = {"height": 70, "width": 96, "num_inference_steps": 2}  # rounded down to 64
    out = glm_runner.execute_model(asked(count=2, seed=5, **sizes))
    assert out.error is None and out.stage_durations["GlmImagePipeline.prior"] > 0
    given = glm_inputs(glm_processor(), [PROMPT], 64, 96)
    prior = GlmImageForConditionalGeneration.from_pretrained(
        glm_folder / "vision_language_encoder", dtype=torch.float32
    ).eval()
    drawn = glm_runner.pipeline.ours.last.tokens
    want = prior.generate(**given, do_sample=True, top_k=1, max_new_tokens=drawn.shape[1])
    assert torch.equal(drawn[:1], want[:, given["input_ids"].shape[1] :])
    ids = prior_token_ids(drawn, 2, 3)
    for i, picture in enumerate(
        out.output
    ):  # as vLLM-Omni paints ids that it gets from its own prior
        extra = {"prior_token_ids": ids[i : i + 1]}
        alone = glm_runner.execute_model(asked(seed=5 + i, more=extra, **sizes))
        assert torch.equal(alone.output[0], picture)
    ours.plugin()  # as vLLM-Omni does in each process, more than once
    glm_runner.od_config.model_class_name = ours.GLM_IMAGE
    made = get_diffusion_post_process_func(glm_runner.od_config)(out.output)
    assert [one.size for one in made] == [(96, 64)] * 2


@pytest.mark.parametrize(("checks", "pictures_begun"), [(2, 0), (None, 2)])
def test_glm_image_is_cancelled_while_tokens_are_drawn_and_between_pictures(
    glm_runner: Any, checks: int | None, pictures_begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel.integrations import vllm_omni_glm_image as module

    def when(calls: list[int]) -> bool:
        return len(calls) == checks or calls.count(-1) == 2

    given = {"height": 64, "width": 64, "num_inference_steps": 1}
    _, calls = cancelled(when, glm_runner, asked(count=2, **given), module, monkeypatch)
    assert calls.count(-1) == pictures_begun and calls[0] >= 0
    assert glm_runner.execute_model(asked(**given)).error is None


def test_sampled_tokens_of_glm_image_follow_the_law_of_the_model(
    glm_runner: Any, glm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GlmImageForConditionalGeneration

    from lantern_accel.integrations import vllm_omni_glm_image as module

    law = {"top_k": 30, "top_p": 1.0, "temperature": 1.0}
    for name, value in law.items():
        monkeypatch.setitem(glm_runner.pipeline.ours.overrides, name, value)
    request = asked(count=200, height=32, width=32)
    cancelled(lambda calls: calls[-1] == -1, glm_runner, request, module, monkeypatch)  # unpainted
    prior = GlmImageForConditionalGeneration.from_pretrained(
        glm_folder / "vision_language_encoder", dtype=torch.float32
    ).eval()
    inputs = glm_inputs(glm_processor(), [PROMPT], 32, 32)
    tokens = glm_runner.pipeline.ours.last.tokens
    assert len(tokens) == 200
    glm_draws_fairly(prior, inputs, tokens, **law)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [({"prompt": PROMPT, "multi_modal_data": {"image": 1}}, "as input"), ("a <sop>", "<sop>")],
)
def test_what_glm_image_cannot_have_is_a_client_s_error(
    glm_runner: Any, prompt: Any, message: str
) -> None:
    out = glm_runner.execute_model(asked(prompt, height=64, width=64))
    assert out.error_status_code == 400 and message in out.error
