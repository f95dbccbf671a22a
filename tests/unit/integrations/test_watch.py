"""A module that changes behind an accelerated call: tokens are its own, or an error names the part."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.8")

from support.hub_models import glm, glm_inputs, glm_processor, janus

from lantern_accel.errors import LanternError, ModelError
from lantern_accel.integrations import accelerate, restore
from lantern_accel.integrations.transformers import accelerated, decode

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


def loaded(model: Any) -> None:
    model.load_state_dict(janus(4, grid=3).state_dict())


def assigned(model: Any) -> None:
    model.load_state_dict(janus(4, grid=3).state_dict(), assign=True)


def in_place(model: Any) -> None:
    with torch.no_grad():
        layer(model).self_attn.k_proj.weight.mul_(-1.0)


def one_number_by_data(model: Any) -> None:
    model.model.generation_head.vision_head.weight.data[7] += 9.0


def rows_swapped(model: Any) -> None:
    weight = layer(model).mlp.gate_proj.weight.data
    weight.copy_(weight.flip(0))


def columns_swapped(model: Any) -> None:
    weight = layer(model).mlp.up_proj.weight.data
    weight.copy_(weight.flip(1))


def merged(model: Any) -> None:
    weight = layer(model).mlp.down_proj.weight
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 2, generator=generator) for n in weight.shape)
    weight.data += a @ b.t()  # as adapters are merged: no version counts it


def trained(model: Any) -> None:
    weights = [layer(model).mlp.up_proj.weight.requires_grad_(True)]
    weights[0].grad = torch.randn_like(weights[0])
    torch.optim.SGD(weights, lr=1.0).step()


def replaced(model: Any) -> None:
    old = layer(model).self_attn.o_proj
    layer(model).self_attn.o_proj = nn.Linear(*old.weight.shape[::-1], bias=False)


def tied(model: Any) -> None:
    layer(model).mlp.up_proj.weight = layer(model).mlp.gate_proj.weight


def turned_otherwise(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq.mul_(0.7)


def rounded(model: Any) -> None:
    model.to(torch.bfloat16).float()  # its rotary frequencies too


CHANGES = [
    loaded, assigned, in_place, one_number_by_data, rows_swapped, columns_swapped, merged, trained,
    replaced, tied, turned_otherwise, rounded,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_tokens_are_those_of_the_module_as_it_is(model: Any, change: Callable[[Any], None]) -> None:
    before = ours(model)
    held = accelerated(model, "vanilla").ready()
    change(model)
    want = own(model)
    assert torch.equal(ours(model), want)
    assert not torch.equal(want, before) or change is rounded
    found = accelerated(model, "vanilla").ready()
    assert found is not held and found.model.weights_hash != held.model.weights_hash
    assert accelerated(model, "vanilla").ready() is found  # nothing has changed since


def test_another_dtype_is_taken(model: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        assert ours(model).shape == (2, 9)
        assert accelerated(model).ready().model.target.weight.dtype == dtype


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


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


class Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def wrap(model: Any) -> Callable[[], None]:
    attention = layer(model).self_attn
    old = attention.q_proj
    attention.q_proj = Scaled(old)
    return lambda: setattr(attention, "q_proj", old)


def activate(model: Any) -> Callable[[], None]:
    mlp = layer(model).mlp
    old, mlp.act_fn = mlp.act_fn, nn.ReLU()
    return lambda: setattr(mlp, "act_fn", old)


def parametrize(model: Any) -> Callable[[], None]:
    mlp = layer(model).mlp
    nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", Negated())
    return lambda: nn.utils.parametrize.remove_parametrizations(
        mlp.up_proj, "weight", leave_parametrized=False
    )


def hook(model: Any) -> Callable[[], None]:
    return layer(model).mlp.register_forward_hook(lambda *given: 2 * given[-1]).remove


def pre_hook(model: Any) -> Callable[[], None]:
    return layer(model).mlp.down_proj.register_forward_pre_hook(lambda _, x: (2 * x[0],)).remove


def global_hook(model: Any) -> Callable[[], None]:
    return nn.modules.module.register_module_forward_hook(lambda *given: None).remove


def own_forward(model: Any) -> Callable[[], None]:
    norm = model.model.language_model.norm
    norm.forward = lambda x: 2 * x
    return lambda: delattr(norm, "forward")


def taken_out(model: Any) -> Callable[[], None]:
    layers = model.model.language_model.layers
    last = layers[1]
    del layers[1]
    return lambda: layers.append(last)


def number(model: Any) -> Callable[[], None]:
    norm = layer(model).input_layernorm
    old, norm.variance_epsilon = norm.variance_epsilon, 0.5
    return lambda: setattr(norm, "variance_epsilon", old)


def scale(model: Any) -> Callable[[], None]:
    attention = layer(model).self_attn
    old, attention.scaling = attention.scaling, 0.01
    return lambda: setattr(attention, "scaling", old)


def method(model: Any) -> Callable[[], None]:
    usual = model.prepare_embeddings_for_image_generation
    model.prepare_embeddings_for_image_generation = lambda ids: -2 * usual(ids)
    return lambda: delattr(model, "prepare_embeddings_for_image_generation")


class Linear8bitLt(nn.Linear):
    """As bitsandbytes has it: the scales are the parameter's, not the module's."""

    __module__ = "bitsandbytes.nn.modules"


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
        if path.endswith("_proj"):
            new: nn.Module = QuantLinear(one)
            if kind == "bitsandbytes":
                new = Linear8bitLt(one.in_features, one.out_features, bias=False)
                new.weight = nn.Parameter(one.weight.to(torch.int8), requires_grad=False)
            made.model.language_model.set_submodule(path, new)
    made.config.quantization_config = {"quant_method": kind}
    with pytest.raises(LanternError) as caught:
        ours(accelerate(made, strategy="vanilla"))
    text = str(caught.value)
    assert "is quantized" in text and kind in text.lower() and "int8" in text and "\n" not in text


PLACE = r"model\.language_model\.layers\.1"
OTHERS = [
    (wrap, rf"{PLACE}\.self_attn\.q_proj is a .*Scaled"),
    (activate, rf"{PLACE}\.mlp\.act_fn is a .*ReLU"),
    (parametrize, rf"{PLACE}\.mlp\.up_proj is a .*ParametrizedLinear"),
    (hook, rf"{PLACE}\.mlp has the hook .*lambda"),
    (pre_hook, rf"{PLACE}\.mlp\.down_proj has the hook"),
    (global_hook, "every module has the global hook"),
    (own_forward, r"model\.language_model\.norm has the forward"),
    (taken_out, rf"{PLACE}.* is absent"),
    (number, rf"{PLACE}\.input_layernorm has variance_epsilon 0\.5, where .* 1e-06"),
    (scale, rf"{PLACE}\.self_attn has scaling 0\.01"),
    (method, r"the module has another prepare_embeddings_for_image_generation\(\)"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=[one.__name__ for one, _ in OTHERS])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_part_that_is_not_the_librarys_is_named(
    change: Callable[[Any], Callable[[], None]], message: str, drawn: bool
) -> None:
    model = accelerate(janus(3, grid=3), strategy="vanilla")
    want = own(model)
    if drawn:
        ours(model)
    back = change(model)
    with pytest.raises(ModelError, match=rf"{message}.*restore\(\)"):
        ours(model)
    back()
    assert torch.equal(ours(model), want)


def test_an_adapter_is_named_until_it_is_merged() -> None:
    peft = pytest.importorskip("peft")
    model = accelerate(janus(3, grid=3), strategy="vanilla")
    before = ours(model)
    asked = {"r": 2, "lora_alpha": 64, "init_lora_weights": False}
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=r".*language_model.*(q_proj|down_proj)", **asked)
    )
    named = r"model\.language_model\.layers\.0\.self_attn\.q_proj is a peft\..*merge_and_unload"
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
        in_place(one)
        assert torch.equal(ours(one), own(one)) and not torch.equal(ours(one), want)
        one.restore()
        assert "generate" not in vars(one)
    assert torch.equal(ours(model), want)


# --- GLM-Image -------------------------------------------------------------------------------------


def test_glm_image_as_a_callable() -> None:
    model = glm(3)
    given = glm_inputs(glm_processor(), ["a red cube"], 32, 32)
    asked = {**given, "max_new_tokens": 40, "do_sample": False}
    accelerated(model, "vanilla")
    for seed in (3, 4):
        model.load_state_dict(glm(seed).state_dict())
        made = model.generate(**asked, custom_generate=decode)
        assert torch.equal(made, model.generate(**asked))
    hook(model)
    with pytest.raises(ModelError, match=rf"{PLACE}\.mlp has the hook"):
        model.generate(**asked, custom_generate=decode)
