"""Quantized weights and adapters are refused by name, before anything is read; plain ones are not."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chameleon import write_anole
from support.emu3 import write_emu3
from support.glm_image import write_glm_image
from support.janus import write_janus
from support.official import class_folder
from torch import Tensor

import lantern_accel
from lantern_accel.checkpoints import weights as files
from lantern_accel.errors import CheckpointError, LanternError, LanternWarning, ModelError
from lantern_accel.models.check import check

State = dict[str, Tensor]
#: What a kind of quantization writes in place of a matrix ``w``: tensors by the end of their keys.
KINDS: dict[str, Callable[[Tensor], State]] = {
    "float8_e5m2": lambda w: {"weight": w.to(torch.float8_e5m2), "scale_weight": w[0, 0]},
    "fp8 weight_scale": lambda w: {
        "weight": w.to(torch.float8_e4m3fn), "weight_scale": w[:, :1], "input_scale": w[0, 0],
    },
    "GPTQ": lambda w: {
        "qweight": w.T.int()[: len(w.T) // 8], "qzeros": w[:1].int(), "scales": w[:1].half(),
        "g_idx": torch.zeros(w.shape[1], dtype=torch.int32),
    },
    "AWQ": lambda w: {
        "qweight": w.T.int()[:, : len(w) // 8], "qzeros": w[:1].int(), "scales": w[:1].half(),
    },
    "bitsandbytes int8": lambda w: {
        "weight": w.to(torch.int8), "SCB": w[:, 0], "weight_format": torch.tensor(0, dtype=torch.uint8),
    },
    "bitsandbytes nf4": lambda w: {
        "weight": w.reshape(-1, 1)[::2].to(torch.uint8), "weight.absmax": w[0], "weight.quant_map": w[0],
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
    },
    "compressed-tensors": lambda w: {
        "weight_packed": w.int(), "weight_scale": w[:, :1], "weight_shape": torch.tensor(w.shape),
    },
    "HQQ": lambda w: {"W_q": w.to(torch.uint8), "scale": w[:, :1], "zero": w[:, :1]},
    "torchao": lambda w: {"_weight_qdata": w.to(torch.int8), "_weight_scale": w[:, 0]},
    "int8": lambda w: {"weight": w.to(torch.int8)},
    "Marlin": lambda w: {"B": w.int(), "s": w[:1].half()},
    "LoRA": lambda w: {"weight": w, "lora_A.weight": w[:2], "lora_B.weight": w[:, :2]},
    "LoRA default": lambda w: {
        "base_layer.weight": w, "lora_A.default.weight": w[:2], "lora_B.default.weight": w[:, :2],
    },
}  # fmt: skip
MODEL = "model.safetensors"
LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llamagen": (class_folder, "*.pt"),
    "janus": (write_janus, MODEL),
    "emu3": (lambda folder: write_emu3(folder, "hf"), MODEL),
    "glm_image": (write_glm_image, f"vision_language_encoder/{MODEL}"),
    "chameleon": (lambda folder: write_anole(folder, layout="hf"), "*.safetensors"),
}
MATRIX = re.compile(r"layers\.\d+\.(self_attn|attention|mlp|feed_forward)\.\w+(?<!norm)\.weight$")


def weights_in(folder: Path, name: str) -> list[Path]:
    """Return the files of a target's weights."""
    for index in folder.rglob("*.index.json"):  # with the keys of before
        index.unlink()
    return [one for one in sorted(folder.rglob(name)) if "vq" not in one.name]


def edit(path: Path, change: Callable[[State], State]) -> None:
    """Change a file's state dict."""
    if path.suffix == ".safetensors":
        made = change(load_file(path))
        save_file({key: tensor.contiguous() for key, tensor in made.items()}, path)
        return
    content = torch.load(path, weights_only=False)
    wrap = content.get("model", content)
    torch.save({"model": {k: v.contiguous() for k, v in change(dict(wrap)).items()}}, path)


def quantize(state: State, kind: str) -> State:
    """Return a state dict with a kind's tensors in place of its matrices."""
    out: State = {}
    for key, value in state.items():
        if MATRIX.search(key):
            made = KINDS[kind](value.float())
            out.update({f"{key.removesuffix('weight')}{end}": t.clone() for end, t in made.items()})
        else:
            out[key] = value
    return out


def refused(folder: Path) -> str:
    """Return the one sentence that loading and checking both say; nothing is read before."""
    with pytest.raises((CheckpointError, ModelError)) as caught:
        lantern_accel.load(folder, device="cpu", options={"threads": 1})
    text = str(caught.value)
    assert [one.detail for one in check(folder).parts if one.state == "unusable"] == [text]
    assert "fetch it again" not in text and "\n" not in text
    return text


@pytest.mark.product("layout", "kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_weights_and_adapters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, kind: str
) -> None:
    write, name = LAYOUTS[layout]
    folder = write(tmp_path / "model") or tmp_path / "model"
    for path in weights_in(folder, name):
        edit(path, lambda state: quantize(state, kind))
    monkeypatch.setattr(files.Checkpoint, "blocks", None)  # reads no weight
    text = refused(folder)
    named = {"float8_e5m2": "float8_e5m2", "fp8": "float8", "LoRA": "LoRA"}
    assert named.get(kind.split()[0], "int") in text
    assert ("merge" if "LoRA" in kind else "--weights int8") in text


def halves(pattern: str, *names: str) -> State:
    return {pattern.format(name): torch.ones(2, 2) for name in names}


#: What makes a whole model's file one that is refused, and what the error names.
OTHERS: dict[str, tuple[Callable[[State], State], str]] = {
    "peft": (lambda s: {f"base_model.model.{key}": value for key, value in s.items()}, "base_model"),
    "adapter alone": (
        lambda s: halves("base_model.model.layers.0.attention.wo.lora_{}.weight", *"AB"), "LoRA"
    ),
    "diffusers' adapter": (lambda s: halves("layers.0.wo.lora.{}.weight", "up", "down"), "LoRA"),
    **{
        end: (lambda s, end=end: s | halves("layers.0.attention.wo.{}", end), end)
        for end in ("hada_w1_a", "lokr_w2", "ia3_l", "vera_lambda_b", "oft_r")
    },
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_adapters_of_several_spellings_are_named(tmp_path: Path, what: str) -> None:
    folder = class_folder(tmp_path / "model")
    change, named = OTHERS[what]
    edit(weights_in(folder, "*.pt")[0], change)
    text = refused(folder)
    assert named in text and "merge" in text


def test_a_configuration_names_the_quantization_where_keys_do_not(tmp_path: Path) -> None:
    folder = write_janus(tmp_path / "model") or tmp_path / "model"
    said = json.loads((folder / "config.json").read_text("utf-8"))
    method = {"quantization_config": {"quant_method": "eetq"}}
    (folder / "config.json").write_text(json.dumps({**said, **method}), "utf-8")
    lantern_accel.load(folder, device="cpu", options={"threads": 1}).close()  # whole: as it is
    edit(
        folder / MODEL,
        lambda s: {k.replace(".q_proj.weight", ".q_proj.q"): v for k, v in s.items()},
    )
    assert "eetq" in refused(folder)


#: Keys that only end like those of quantized weights or adapters, next to a whole model.
STRAYS = dict.fromkeys(("head.weight_scale", "head.SCB", "lora_A", "absmax"), torch.float32)
STRAYS |= {"codes": torch.uint8, "head.qweight": torch.int32}


@pytest.mark.parametrize("key", STRAYS)
def test_a_whole_model_with_a_key_that_ends_like_one_is_loaded(tmp_path: Path, key: str) -> None:
    folder = write_janus(tmp_path / "model") or tmp_path / "model"
    edit(folder / MODEL, lambda s: {**s, f"vision_model.{key}": torch.ones(3, dtype=STRAYS[key])})
    assert check(folder).usable
    lantern_accel.load(folder, device="cpu", options={"threads": 1}).close()


@pytest.mark.parametrize("other", [True, False])
def test_of_two_sets_of_weights_with_other_values_one_is_told(tmp_path: Path, other: bool) -> None:
    folder = write_janus(tmp_path / "model") or tmp_path / "model"
    state = load_file(folder / MODEL)
    torch.save(
        {k: v + 1 if other else v.bfloat16() for k, v in state.items()},
        folder / "pytorch_model.bin",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(folder)
        lantern_accel.load(folder, device="cpu", options={"threads": 1}).close()
    told = {str(one.message) for one in caught if issubclass(one.category, LanternWarning)}
    assert len(told) == other
    assert all(f"{MODEL} is read" in text and "pytorch_model.bin" in text for text in told)


@pytest.mark.parametrize("inside", [True, False])
def test_a_file_of_another_program_is_named(tmp_path: Path, inside: bool) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(99))
    with pytest.raises(LanternError, match="GGUF"):
        lantern_accel.load(tmp_path if inside else path, device="cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda w: w.to_sparse(), "sparse numbers of"),
        (lambda w: w.to("meta"), "no numbers of"),
        (None, "TorchScript"),
    ],
)
def test_a_torch_file_without_plain_tensors_is_named(
    tmp_path: Path, changed: Callable[[Tensor], Tensor] | None, says: str
) -> None:
    folder = class_folder(tmp_path / "model")
    path = weights_in(folder, "*.pt")[0]
    if changed is None:
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), str(path))
    else:
        state = torch.load(path)
        torch.save({k: changed(v) if MATRIX.search(k) else v for k, v in state.items()}, path)
    assert says in refused(folder)
