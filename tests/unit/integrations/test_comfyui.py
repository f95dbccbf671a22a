"""ComfyUI's nodes, with a double in ComfyUI's place: inputs, images, errors, interrupts and memory."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import types

import numpy as np
import pytest
import torch
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import LanternError, ModelError, RequestError, StrategyError
from lantern_accel.generation.batch import Batch
from lantern_accel.generation.settings import Settings

NAME = "lantern_accel.integrations.comfyui"


class Interrupted(Exception):
    """Stands for ComfyUI's own exception."""


class Patcher:
    """What the nodes take from ComfyUI's ``ModelPatcher``."""

    def __init__(self, model, load_device, offload_device, size=0):
        self.model, self.size = model, size
        self.load_device, self.offload_device = load_device, offload_device


class Bar:
    """A progress bar that keeps its updates."""

    said: list[tuple] = []  # noqa: RUF012, one list that every bar clears

    def __init__(self, total):
        self.said.clear()

    def update_absolute(self, value, total, preview=None):
        self.said.append((value, total, preview))


@pytest.fixture
def comfy(monkeypatch):
    """The nodes inside a ComfyUI; ``steps_left``: the steps before somebody interrupts."""
    double = types.SimpleNamespace(loads=lambda models: [m.partially_load(None) for m in models])
    double.steps_left = 10**9

    def check():
        double.steps_left -= 1
        if double.steps_left < 0:
            raise Interrupted

    management = types.ModuleType("comfy.model_management")
    management.load_models_gpu = lambda models: double.loads(models)
    double.management = management
    management.get_torch_device = lambda: torch.device("cpu")
    management.throw_exception_if_processing_interrupted = check
    patcher, utils = types.ModuleType("comfy.model_patcher"), types.ModuleType("comfy.utils")
    patcher.ModelPatcher, utils.ProgressBar = Patcher, Bar
    whole = types.ModuleType("comfy")
    whole.model_management = management
    for module in (whole, management, patcher, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in (NAME, f"{NAME}.nodes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    double.nodes = importlib.import_module(NAME).NODE_CLASS_MAPPINGS
    yield double
    for name in (NAME, f"{NAME}.nodes"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def defaults(node):
    """Return what a workflow sends where the user changes nothing, without inputs from other nodes."""
    found = {}
    for group in node.INPUT_TYPES().values():
        for name, (kind, *more) in group.items():
            if isinstance(kind, list):
                found[name] = kind[0]
            elif more:
                found[name] = more[0]["default"]
    return found


def run(node, **given):
    """Call a node as ComfyUI does."""
    return getattr(node(), node.FUNCTION)(**defaults(node) | given)


@pytest.fixture
def model(comfy, folder):
    (made,) = run(comfy.nodes["LanternLoadModel"], folder=folder, device="cpu", dtype="float32")
    yield made
    made.detach()


def test_inputs_are_what_the_functions_take(comfy):
    for node in comfy.nodes.values():
        asked = [name for group in node.INPUT_TYPES().values() for name in group]
        taken = list(inspect.signature(getattr(node, node.FUNCTION)).parameters)[1:]
        if taken[-1] == "given":  # settings of a request
            taken[-1:] = asked[len(taken) - 1 :]
            names = importlib.import_module(f"{NAME}.nodes").NAMES
            assert {names.get(name, name) for name in taken[2:]} <= set(Settings.model_fields)
        assert asked == taken
        assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    load = comfy.nodes["LanternLoadModel"].INPUT_TYPES()["required"]
    assert "lantern-emoji" in load["model"][0]
    draw = comfy.nodes["LanternGenerateImage"].INPUT_TYPES()["required"]
    assert draw["strategy"][0][0] == "auto"
    assert draw["seed"][1]["control_after_generate"]
    assert draw["relaxed"][1]["default"] is False


def test_the_installed_package_names_the_nodes():
    (entry,) = importlib.metadata.entry_points(group="comfyui.custom_nodes", name="lantern_accel")
    assert entry.value == NAME


@pytest.mark.parametrize("own", [{}, {"temperature": 0.0, "top_k": 5}])
def test_images_are_those_of_generate(comfy, model, folder, own):
    pixels, measured = run(
        comfy.nodes["LanternGenerateImage"],
        model=model,
        prompt="red heart",
        seed=7,
        number=2,
        **own,
    )
    images = lantern_accel.generate(
        "red heart", model=folder, device="cpu", dtype="float32", seed=7, num_images=2, **own
    ).images
    assert pixels.dtype == torch.float32
    assert pixels.shape == (2, 8, 8, 3)
    assert pixels.min() >= 0
    assert pixels.max() <= 1
    # ComfyUI writes its PNG so.
    written = np.clip(255.0 * pixels.numpy(), 0, 255).astype(np.uint8)
    assert np.array_equal(written, np.stack([np.asarray(one) for one in images]))
    assert "total variation per token: 0: exact" in measured
    value, total, preview = Bar.said[-1]
    assert value == total == 32
    assert preview[1].size == (8, 8)
    assert any(one[2] and one[0] < total for one in Bar.said), "no partial image was shown"


def test_an_interrupt_ends_before_the_next_step_and_the_model_stays(comfy, model):
    node, loaded = comfy.nodes["LanternGenerateImage"], model.pipeline
    given = {"model": model, "prompt": "red heart", "strategy": "vanilla"}
    before, _ = run(node, **given)
    comfy.steps_left = 5
    with pytest.raises(Interrupted):
        run(node, **given)
    assert comfy.steps_left == -1, "steps ran after the interrupt"
    assert model.pipeline is loaded
    comfy.steps_left = 10**9
    assert torch.equal(run(node, **given)[0], before)


def test_comfyui_frees_a_model_and_the_next_run_loads_it(comfy, model):
    assert model.loaded_size() == model.size > 0
    first = model.pipeline
    model.detach(unpatch_all=False)
    assert model.pipeline is first, "ComfyUI only moves it in its list"
    assert model.partially_unload(None, 1) == 0
    assert model.partially_load(None) == 0
    model.detach()
    assert model.loaded_size() == 0
    assert first.request_lock.closed
    run(comfy.nodes["LanternGenerateImage"], model=model, prompt="red heart")
    assert model.pipeline is not first
    last = model.pipeline
    model.__del__()
    assert last.request_lock.closed


@pytest.mark.parametrize(
    ("given", "kind", "early"),
    [
        ({"prompt": " "}, RequestError, True),
        ({"prompt": "x" * 9000}, RequestError, True),
        ({"size": "wide"}, RequestError, True),
        ({"size": "64x64"}, RequestError, False),
        ({"strategy": "lantern++"}, StrategyError, False),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_wrong_input_is_one_sentence(comfy, model, given, kind, early):
    model.detach()
    with pytest.raises(kind) as raised:
        run(comfy.nodes["LanternGenerateImage"], **{"model": model, "prompt": "red heart"} | given)
    assert not early or model.pipeline is None, "it was loaded"
    assert "\n" not in str(raised.value)


def test_an_interrupt_ends_before_the_pass_over_a_prompt(comfy, model, monkeypatch):
    comfy.steps_left = 0
    monkeypatch.setattr(Batch, "join", lambda *given: pytest.fail("the prompt was run"))
    with pytest.raises(Interrupted):
        run(comfy.nodes["LanternGenerateImage"], model=model, prompt="red heart")


def test_an_interrupt_ends_loading(comfy, folder):
    comfy.steps_left = 2
    with pytest.raises(Interrupted):
        run(comfy.nodes["LanternLoadModel"], folder=folder, device="cpu")
    assert comfy.steps_left == -1, "tensors were read after the interrupt"
    comfy.steps_left = 10**9
    run(comfy.nodes["LanternLoadModel"], folder=folder, device="cpu")[0].detach()


def test_an_absent_model_is_one_sentence(comfy, tmp_path):
    for absent in ("/nowhere/at/all", str(tmp_path)):
        with pytest.raises(LanternError) as raised:
            run(comfy.nodes["LanternLoadModel"], folder=absent)
        assert "\n" not in str(raised.value)


def test_an_absent_device_is_told_before_a_model_is_fetched(comfy, monkeypatch):
    nodes = importlib.import_module(f"{NAME}.nodes")
    monkeypatch.setattr(nodes, "find_model", lambda model: pytest.fail("it was looked for"))
    with pytest.raises(LanternError, match="toaster"):
        run(comfy.nodes["LanternLoadModel"], device="toaster")


def test_a_model_on_the_processor_takes_no_place_on_the_card(comfy, folder, monkeypatch):
    nodes = importlib.import_module(f"{NAME}.nodes")
    monkeypatch.setattr(nodes, "get_torch_device", lambda: torch.device("meta"))
    made = nodes.Managed(folder, "cpu", "auto", "full")
    assert made.load_device == torch.device("cpu")
    card = types.SimpleNamespace(spec=types.SimpleNamespace(scheduled_as="GPU"))
    monkeypatch.setattr(nodes, "choose_device", lambda device: card)
    made = nodes.Managed(folder, "cpu", "auto", "full")
    assert made.load_device == torch.device("meta")


def test_a_comfyui_that_loads_nothing_is_too_old(comfy, folder):
    comfy.loads = lambda models: None
    with pytest.raises(ModelError, match="update ComfyUI"):
        run(comfy.nodes["LanternLoadModel"], folder=folder)


def test_a_comfyui_that_lacks_a_function_is_too_old(comfy, monkeypatch):
    monkeypatch.delattr(comfy.management, "load_models_gpu")
    monkeypatch.delitem(sys.modules, f"{NAME}.nodes")
    with pytest.raises(ImportError, match=r"newer ComfyUI.*load_models_gpu"):
        importlib.import_module(f"{NAME}.nodes")


def test_a_model_that_makes_tokens_only_is_one_sentence(comfy, model, monkeypatch):
    monkeypatch.setattr(model.pipeline.runtime, "decode_images", lambda *given: [])
    with pytest.raises(RequestError, match="tokens here and no images"):
        run(comfy.nodes["LanternGenerateImage"], model=model, prompt="red heart")
