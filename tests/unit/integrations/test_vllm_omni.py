"""vLLM-Omni's own registry, loader and runner, where it is installed, on the recorded tiny Janus."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm_omni", reason="the release of vLLM-Omni is in an environment of its own")

from support.chi_square import misfit
from support.golden import golden
from support.janus import write_janus
from vllm_omni.diffusion.cancellation import RequestCancellationRegistry
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

import lantern_accel
from lantern_accel.errors import ModelError
from lantern_accel.families import releases
from lantern_accel.integrations import vllm_omni as ours

pytestmark = pytest.mark.long
NAME = "lantern_accel.integrations.vllm_omni.JanusPipeline"
PROMPT = "a red cube"


def config_of(folder: Path, **more: Any) -> Any:
    given = {"pipeline_class": NAME, "lantern_accel": {"strategy": "scd"}}
    return OmniDiffusionConfig(
        model=str(folder),
        dtype=torch.float32,
        custom_pipeline_args=given,
        enforce_eager=True,
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_janus(tmp_path_factory.mktemp("models") / "Janus-Pro-1B")


def runner_of(folder: Path) -> Any:
    """Return vLLM-Omni's runner with our pipeline; its platform without a card leaves out six answers."""
    import vllm.platforms
    from vllm.config import DeviceConfig, VllmConfig
    from vllm_omni.platforms import current_omni_platform

    answers = {
        "get_current_memory_usage": 0, "max_memory_reserved": 0, "max_memory_allocated": 0,
        "reset_peak_memory_stats": None, "synchronize": None, "is_available": False,
    }  # fmt: skip
    for one in (vllm.platforms.current_platform, current_omni_platform):
        for name, answer in answers.items():
            setattr(type(one), name, lambda *given, answer=answer, **named: answer)
    whole = VllmConfig(device_config=DeviceConfig(device="cpu"))  # no card says what the device is
    made = DiffusionModelRunner(whole, config_of(folder), torch.device("cpu"))
    made.load_model(load_format="custom_pipeline", custom_pipeline_name=NAME)
    assert type(made.pipeline) is ours.JanusPipeline
    return made


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        return runner_of(folder)


def asked(prompt: Any = PROMPT, count: int = 1, seed: int = 5, **more: Any) -> Any:
    extra = {"lantern_accel": more.pop("lantern_accel", {})}
    params = OmniDiffusionSamplingParams(
        num_outputs_per_prompt=count, seed=seed, extra_args=extra, **more
    )
    return OmniDiffusionRequest(prompt=prompt, sampling_params=params, request_id="one")


def pictures(output: Any) -> list[np.ndarray]:
    assert output.error is None, output.error
    return [np.asarray(one) for one in output.output["payload"]["image"]]


def test_the_registry_finds_janus_by_the_entry_point() -> None:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry
    from vllm_omni.plugins import load_omni_plugins_by_group

    load_omni_plugins_by_group("vllm_omni.general_plugins")["lantern_accel"]()
    for name in ours.JANUS:
        assert DiffusionModelRegistry._try_load_model_cls(name) is ours.JanusPipeline


def test_pictures_times_and_memory_come_back_in_the_engine_s_form(
    runner: Any, folder: Path
) -> None:
    greedy = {"temperature": 0.0}
    out = runner.execute_model(asked(count=2, lantern_accel=greedy))
    with lantern_accel.load(folder, device="cpu", dtype="float32") as own:
        want = own.generate(PROMPT, num_images=2, seed=[5, 6], temperature=0, strategy="vanilla")
    for made, one in zip(pictures(out), want.images, strict=True):
        assert np.array_equal(made, np.asarray(one))
    assert set(out.stage_durations) == {"JanusPipeline.prior", "JanusPipeline.pixels"}
    assert all(seconds > 0 for seconds in out.stage_durations.values())
    assert out.peak_memory_mb >= 0 and out.output["metadata"]["lantern_accel"]


def test_greedy_tokens_are_those_that_the_model_s_own_loop_drew(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, pipeline = golden("janus/io"), runner.pipeline.ours.pipeline
    model = pipeline.model  # the recorded prompt is ids, of deepseek-ai's own program
    made = model.family.conditions_of(model, [io["p0.ids"].tolist()], torch.device("cpu"))
    monkeypatch.setattr(pipeline.runtime, "conditions", lambda *given: made)
    seen: list[Any] = []
    own = pipeline.generate
    monkeypatch.setattr(pipeline, "generate", lambda *a, **k: seen.append(own(*a, **k)) or seen[-1])
    runner.execute_model(asked(lantern_accel={"temperature": 0.0}, guidance_scale=5.0))
    assert seen[-1].tokens.tolist() == [io["p0.greedy"].tolist()]
    runner.execute_model(asked(count=400, lantern_accel={"top_k": 0}, guidance_scale=5.0))
    known, other = io["p0.step_logits"].transpose(0, 1)[:, 0].double()
    law = torch.softmax(other + 5 * (known - other), dim=-1)
    assert abs(misfit(seen[-1].tokens[:, 0].bincount(minlength=len(law)), law)) < 4


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
    assert (second.error_status_code, "pictures as input" in second.error) == (400, True)


def test_a_cancelled_request_ends_while_its_tokens_are_drawn(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, request, own = RequestCancellationRegistry(), asked(), ours._stop_if_cancelled
    request.cancellation_signal = signals.create("one")
    calls: list[int] = []

    def stop(known: int, total: int) -> None:
        calls.append(known)
        if len(calls) == 2:
            signals.cancel(["one"])
        own()

    monkeypatch.setattr(ours, "_stop_if_cancelled", stop)
    out = runner.execute_model(request)
    signals.close()
    assert out.aborted and len(calls) == 2
    monkeypatch.undo()
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
    monkeypatch.setattr(releases, "installed", lambda library: "0.31.0")
    with pytest.raises(ModelError, match=r"vllm-omni 0\.31\.0 is installed"):
        ours.JanusPipeline(od_config=made)
