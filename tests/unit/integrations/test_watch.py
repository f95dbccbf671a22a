"""A module that changes behind an accelerated call: tokens are its own, or an error names the part."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.hooks import RemovableHandle

pytest.importorskip("transformers", minversion="5.8")

from support.hub_models import glm, glm_inputs, glm_processor, janus

from lantern_accel.errors import LanternError, ModelError
from lantern_accel.integrations import accelerate, restore
from lantern_accel.integrations.transformers import decode, decoder_of

PROMPTS = torch.tensor([[90, 5, 6, 7, 8, 92], [91, 91, 90, 9, 10, 92]])
ASKED = {
    "attention_mask": (PROMPTS != 91).long(), "generation_mode": "image", "do_sample": False,
    "guidance_scale": 4.0,
}  # fmt: skip


def own(model: Any) -> torch.Tensor:
    """Return the tokens of the model's own loop."""
    return type(model).generate(model, PROMPTS, **ASKED)


def ours(model: Any) -> torch.Tensor:
    return model.generate(PROMPTS, **ASKED)


@pytest.fixture
def model() -> Iterator[Any]:
    made = accelerate(janus(3, grid=3), strategy="vanilla")
    assert torch.equal(ours(made), own(made))
    yield made
    restore(made)


def layer(model: Any) -> Any:
    return model.model.language_model.layers[1]


# --- values ----------------------------------------------------------------------------------------


def roll(weight: torch.Tensor, dim: int) -> None:
    """Move whole words of eight bytes, so that only their places change."""
    weight.data.copy_(weight.data.roll(2, dim))  # as adapters are merged: no version counts it


def train(weight: nn.Parameter) -> None:
    weight.requires_grad_(True).grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assigned": lambda m: m.load_state_dict(janus(4, grid=3).state_dict(), assign=True),
    "one number": lambda m: m.model.generation_head.vision_head.weight.data[7].add_(9.0),
    "rows": lambda m: roll(layer(m).mlp.gate_proj.weight, 0),
    "columns": lambda m: roll(layer(m).mlp.up_proj.weight, 1),
    "trained": lambda m: train(layer(m).mlp.up_proj.weight),
    "replaced": lambda m: setattr(layer(m).self_attn, "o_proj", nn.Linear(48, 48, bias=False)),
    "tied": lambda m: setattr(layer(m).mlp.up_proj, "weight", layer(m).mlp.gate_proj.weight),
    "moved": lambda m: m._apply(torch.clone),  # and back: the same values in other tensors
    "turned": lambda m: m.model.language_model.rotary_emb.inv_freq.mul_(0.7),
    "rounded": lambda m: m.to(torch.bfloat16).float(),  # its rotary frequencies too
}


@pytest.mark.parametrize("what", CHANGES)
def test_tokens_are_those_of_the_module_as_it_is(model: Any, what: str) -> None:
    before = ours(model)
    held = decoder_of(model, "vanilla").ready()
    CHANGES[what](model)
    want = own(model)
    assert torch.equal(ours(model), want)
    assert not torch.equal(want, before) or what in ("rounded", "moved")
    found = decoder_of(model, "vanilla").ready()
    assert found is not held
    assert (found.model.weights_hash == held.model.weights_hash) == (what == "moved")
    assert decoder_of(model, "vanilla").ready() is found  # nothing has changed since


def test_another_dtype_is_taken(model: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert ours(model).shape == (2, 9)
        assert decoder_of(model).ready().model.target.weight.dtype == dtype


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("made", [True, False])
def test_inference_mode_and_its_tensors(made: bool, first: bool) -> None:
    with torch.inference_mode(made):
        model = accelerate(janus(5, grid=3), strategy="scd")
    assert next(model.parameters()).is_inference() == made
    if first:
        with torch.inference_mode():
            assert torch.equal(ours(model), own(model))
    found = ours(model)
    try:
        want = own(model)
    except RuntimeError as error:  # transformers 5.8, whose cache was made in inference mode
        pytest.skip(f"the library's own loop fails: {error}")
    assert torch.equal(found, want)
    with torch.inference_mode():
        layer(model).mlp.down_proj.weight.mul_(-2.0)
        assert torch.equal(ours(model), own(model))
    assert torch.equal(ours(model), own(model))


# --- what computes something else -------------------------------------------------------------------


class QuantLinear(nn.Module):
    """As GPTQ's kernels have it."""

    __module__ = "gptqmodel.nn_modules.qlinear"

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", inner.weight.T.int())
        self.register_buffer("g_idx", torch.zeros(inner.in_features, dtype=torch.int32))
        self.register_buffer("scales", inner.weight[:1].half())


@pytest.mark.parametrize("kind", ["bitsandbytes", "gptq"])
def test_a_module_that_was_loaded_quantized_is_named(kind: str) -> None:
    made = janus(3, grid=3)
    for path, one in list(made.model.language_model.named_modules()):
        if path.endswith("_proj") and kind == "gptq":
            made.model.language_model.set_submodule(path, QuantLinear(one))
        elif path.endswith("_proj"):  # whose scales are the parameter's, not the module's
            one.weight = nn.Parameter(one.weight.to(torch.int8), requires_grad=False)
    made.config.quantization_config = {"quant_method": kind}
    with pytest.raises(LanternError) as caught:
        ours(accelerate(made, strategy="vanilla"))
    text = str(caught.value)
    assert "is quantized" in text and kind in text.lower() and "int8" in text and "\n" not in text


PLACE = r"model\.language_model\.layers\.1"
#: What changes a model, with a handle that undoes it if it is a hook, and how the part is named.
OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "activation": (
        lambda m: setattr(layer(m).mlp, "act_fn", nn.ReLU()),
        rf"{PLACE}\.mlp\.act_fn has the class .*ReLU, where .*SiLU",
    ),
    "parametrization": (
        lambda m: register_parametrization(layer(m).mlp.up_proj, "weight", nn.Identity()),
        rf"{PLACE}\.mlp\.up_proj has the class .*ParametrizedLinear",
    ),
    "hook": (
        lambda m: layer(m).mlp.register_forward_hook(lambda *given: 2 * given[-1]),
        rf"{PLACE}\.mlp has the hooks .*lambda",
    ),
    "pre-hook": (
        lambda m: layer(m).mlp.down_proj.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
        rf"{PLACE}\.mlp\.down_proj has the hooks",
    ),
    "global hook": (
        lambda m: register_module_forward_hook(lambda *given: None),
        "every module has the hooks .*lambda",
    ),
    "forward": (
        lambda m: setattr(m.model.language_model.norm, "forward", lambda x: 2 * x),
        r"model\.language_model\.norm has the forward",
    ),
    "absent": (lambda m: m.model.language_model.layers.pop(1), rf"{PLACE}.* is absent"),
    "number": (
        lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 0.5),
        rf"{PLACE}\.input_layernorm has the variance_epsilon 0\.5, where .* 1e-06",
    ),
    "method": (
        lambda m: setattr(m, "prepare_embeddings_for_image_generation", lambda ids: -2 * ids),
        r"the module has the methods \['prepare_embeddings_for_image_generation'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_part_that_is_not_the_librarys_is_named(what: str, drawn: bool) -> None:
    model = accelerate(janus(3, grid=3), strategy="vanilla")
    want = own(model)
    if drawn:
        ours(model)
    change, message = OTHERS[what]
    hook = change(model)
    try:
        with pytest.raises(ModelError, match=rf"{message}.*restore\(\)"):
            ours(model)
    finally:
        if isinstance(hook, RemovableHandle):
            hook.remove()
            assert torch.equal(ours(model), want)


def test_an_adapter_is_named_until_it_is_merged() -> None:
    peft = pytest.importorskip("peft")
    model = accelerate(janus(3, grid=3), strategy="vanilla")
    before = ours(model)
    asked = {"r": 2, "lora_alpha": 64, "init_lora_weights": False}
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=r".*language_model.*(q_proj|down_proj)", **asked)
    )
    named = r"model\.language_model\.layers\.0\.self_attn\.q_proj has the class peft\..*merge_and_unload"
    with pytest.raises(ModelError, match=named):
        ours(model)
    with pytest.raises(ModelError, match="merge_and_unload"):
        accelerate(wrapped)
    merged = wrapped.merge_and_unload()
    assert merged is model and not torch.equal(own(model), before)
    assert torch.equal(ours(model), own(model))


def test_hooks_of_a_part_that_draws_nothing_are_left_alone(model: Any) -> None:
    model.model.vision_model.register_forward_hook(lambda *given: None)
    assert torch.equal(ours(model), own(model))


# --- copies ----------------------------------------------------------------------------------------


def test_copies_of_an_accelerated_model_are_models(model: Any) -> None:
    want = ours(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(ours(one), want)
        CHANGES["one number"](one)
        assert torch.equal(ours(one), own(one)) and not torch.equal(ours(one), want)
        one.restore()
        assert "generate" not in vars(one)
    assert torch.equal(ours(model), want)


# --- GLM-Image -------------------------------------------------------------------------------------


def test_glm_image_as_a_callable() -> None:
    model = glm(3)
    given = glm_inputs(glm_processor(), ["a red cube"], 32, 32)
    asked = {**given, "max_new_tokens": 40, "do_sample": False}
    decoder_of(model, "vanilla")
    for seed in (3, 4):
        model.load_state_dict(glm(seed).state_dict())
        made = model.generate(**asked, custom_generate=decode)
        assert torch.equal(made, model.generate(**asked))
    change, message = OTHERS["hook"]
    change(model)
    with pytest.raises(ModelError, match=message):
        model.generate(**asked, custom_generate=decode)
