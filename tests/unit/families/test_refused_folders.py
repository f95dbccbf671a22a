"""Folders of released layouts that cannot be used, and requests that their models cannot serve.

One table each: the input, the error's type, its field, and a fragment that a user acts on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chameleon import (
    random_drafter_weights,
    tiny_vq,
    write_anole,
    write_drafter,
    write_vqgan,
)
from support.emu3 import weights_of, write_emu3
from support.glm_image import write_glm_image
from support.golden import golden
from support.janus import SPECIAL, write_janus, write_tokenizer
from support.janus import weights_of as janus_of
from support.lumina2 import write_lumina2

import lantern_accel
from lantern_accel.errors import CheckpointError, LanternError, RequestError
from lantern_accel.models.check import check

#: What is done to a folder that is as it should be.
Change = Callable[[Path], None]
Weights = dict[str, torch.Tensor]
MODEL, VISION = "model.safetensors", "vision_tokenizer/model.safetensors"
MOVQ, TOKENIZER, SETTINGS = (
    "movqgan/270M/movqgan_270M.ckpt",
    "tokenizer.json",
    "tokenizer_config.json",
)
GLM = "vision_language_encoder/config.json"
WORDS, NAMES = "emu3.tiktoken", "emu3_vision_tokens.txt"


def says(name: str = "config.json", table: str = "", **values: Any) -> Change:
    """Let a JSON file, or a table in it, say other values."""

    def change(folder: Path) -> None:
        path = folder / name
        said = json.loads(path.read_text("utf-8"))
        (said[table] if table else said).update(values)
        path.write_text(json.dumps(said), "utf-8")

    return change


def rope(**values: Any) -> Change:
    return says(GLM, "text_config", rope_parameters=values)


def llm(**values: Any) -> Change:
    return says(table="language_config", **values)


def without(*names: str) -> Change:
    """Let files or folders be absent."""

    def change(folder: Path) -> None:
        for path in (folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(name: str) -> Change:
    """Let a file end in its middle."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def holds(name: str, given: str | Weights, edit: Callable[[Weights], object] = dict.copy) -> Change:
    """Let a file hold other tensors, recorded ones by their name, once they were edited."""

    def change(folder: Path) -> None:
        edit(weights := dict(golden(given) if isinstance(given, str) else given))
        save = torch.save if name.endswith(".ckpt") else save_file
        save({key: value.clone() for key, value in weights.items()}, folder / name)

    return change


def tensors(edit: Callable[[Weights], object]) -> Change:
    """Let the model's file be edited."""

    def change(folder: Path) -> None:
        home = folder if (folder / MODEL).is_file() else folder / "vision_language_encoder"
        holds(MODEL, load_file(home / MODEL), edit)(home)

    return change


def lines(name: str, edit: Callable[[list[str]], list[str]]) -> Change:
    """Let a text have other lines."""

    def change(folder: Path) -> None:
        written = (folder / name).read_text("utf-8").splitlines()
        (folder / name).write_text("\n".join(edit(written)), "utf-8")

    return change


def token(name: str, number: object = None) -> Change:
    """Let an added token of a tokenizer have another id, or be absent."""

    def change(folder: Path) -> None:
        said = json.loads((folder / TOKENIZER).read_text("utf-8"))
        (one,) = (one for one in said["added_tokens"] if one["content"] == name)
        one["id"] = number
        if number is None:
            said["added_tokens"].remove(one)
        (folder / TOKENIZER).write_text(json.dumps(said), "utf-8")

    return change


def drop(weights: Weights, *names: str) -> None:
    """Take out the tensors with one of these in their name."""
    for key in [key for key in weights if any(name in key for name in names)]:
        del weights[key]


def drops(*names: str) -> Change:
    return tensors(lambda weights: drop(weights, *names))


def only_reads(weights: Weights) -> None:
    drop(weights, "gen_")
    weights["vision_model.x"] = torch.ones(1)


def drafter(edit: Callable[[Weights], object], dim: int = 32) -> Change:
    """Let an Anole's drafter have other tensors."""

    def change(folder: Path) -> None:
        tokens = len(load_file(folder / SHARDS[0])["model.embed_tokens.weight"])
        edit(weights := random_drafter_weights(13, dim=dim, tokens=tokens))
        write_drafter(folder / "drafter", weights)

    return change


def doubled(weights: Weights) -> None:
    weights |= {k.replace("layers.0", "layers.1"): v for k, v in weights.items()}


def lumina2_mixed(weights: Weights) -> None:
    norm = weights["model.layers.0.self_attn.q_norm.weight"]
    weights["layers.0.attention.q_normalization.weight"] = norm[0]


def smaller(weights: Weights) -> None:
    weights["quantize.embedding.weight"] = weights["quantize.embedding.weight"][:32]


C, R = CheckpointError, RequestError
VQGAN = "tokenizer/vqgan.ckpt"
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
#: The layout, what is wrong with its folder, the error and a fragment; a folder has no field.
FOLDERS: list[tuple[str, str, Change, type[LanternError], str]] = [
    # --- parts of several releases
    ("lumina2", "mixed layouts", tensors(lumina2_mixed), C, "original and Hugging Face"),
    ("lumina2", "video codes", holds(MOVQ, "emu3/vision_tokenizer"), C, "on video"),
    ("lumina2", "plain VQ", holds(MOVQ, "chameleon_vq/weights"), C, "read the codes"),
    ("lumina2", "the model as VQ", holds(MOVQ, "lumina2/model"), C, "not MoVQGAN"),
    ("lumina2", "fewer codes", holds(MOVQ, "lumina2/movqgan", smaller), C, "has 32 codes"),
    ("lumina2", "layers", says(num_hidden_layers=4), C, "not of one model"),
    ("lumina2", "another type", says(model_type="llama"), C, "not of one model"),
    ("official", "mixed layouts", tensors(lambda w: w.update(weights_of("hf"))), C, "of two layouts"),
    ("official", "plain VQ", holds(VISION, "chameleon_vq/weights"), C, "is not Emu3's"),
    ("official", "no video", holds(VISION, "lumina2/movqgan"), C, "is not Emu3's"),
    ("official", "fewer codes", holds(VISION, "emu3/vision_tokenizer", smaller), C, "another codebook"),
    ("3.5", "MoVQ", holds(VISION, "emu3/vision_tokenizer"), C, "read the codes"),
    ("official", "layers", says(num_hidden_layers=4), C, "num_hidden_layers 3 by its shapes"),
    ("official", "names", lines(NAMES, lambda names: names[:-1]), C, "names 63 codes"),
    ("janus", "mixed layouts", tensors(lambda w: w.update(janus_of("hf"))), C, "keys of two layouts"),
    ("anole", "drafter's width", drafter(dict.copy, dim=64), C, "dim is 64 and the model's 32"),
    ("anole", "LlamaGen's drafter", drafter(lambda w: drop(w, "_norm.")), C, "not a drafter for Anole"),
    ("anole", "two blocks", drafter(doubled), C, "only drafters of one"),
    ("anole", "more codes", lambda at: write_vqgan(at / VQGAN, tiny_vq(1, 24)), C, "24 codes"),
    ("anole", "another VQ", holds(VQGAN, {"decoder.weight": torch.zeros(1)}), C,
     "not Chameleon's VQGAN"),
    ("anole", "MoVQGAN", holds(VQGAN, "lumina2/movqgan"), C, "attention outside"),
    # --- models that generate no images
    ("janus", "only reads", tensors(only_reads), C, "only the half of Janus that reads images"),
    ("janus", "JanusFlow", tensors(lambda w: w.update({"vision_gen_dec_model.x": torch.ones(1)})), C,
     "flow matching"),
    ("official", "Chat", says(max_position_embeddings=131072), C, "is Emu3-Chat"),
    ("official", "Stage1", says(image_area=262144), C, "is Emu3-Stage1"),
    ("official", "its VQ", says(model_type="Emu3VisionVQ"), C, "is the image tokenizer of Emu3"),
    # --- what is absent
    ("lumina2", "no tokenizer", without(TOKENIZER), R, f"put the model's {TOKENIZER} into"),
    ("lumina2", "no settings", without(SETTINGS), R, f"put the model's {SETTINGS} into"),
    ("lumina2", "no decoder", without("movqgan"), C, "put movqgan_270M.ckpt"),
    ("lumina2", "VQ lacks", holds(MOVQ, "lumina2/movqgan", lambda w: w.pop("decoder.conv_out.weight")),
     C, "1 key is missing"),
    ("lumina2", "lacks", tensors(lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), C,
     "layers.1.feed_forward.w13.weight"),
    ("lumina2", "no norm", tensors(lambda w: w.pop("model.layers.0.self_attn.q_norm.weight")), C,
     "of no layout that is known"),
    ("lumina2", "no end of turn", token("<reserved08706>"), C, "lacks '<reserved08706>'"),
    ("lumina2", "no image start", token("<racm3:break>"), C, "lacks '<racm3:break>'"),
    ("lumina2", "no code", token("<MOVQGAN7>"), C, "one after the other"),
    ("lumina2", "no size token", token("<reserved08801>"), C, "a size token"),
    ("official", "no names", without(NAMES), R, NAMES),
    ("official", "no words", without(WORDS, NAMES), R, WORDS),
    ("official", "no VQ", without("vision_tokenizer"), C, "BAAI/Emu3-VisionTokenizer"),
    ("3.5", "no eps", says(rms_norm_eps=None), C, "lacks rms_norm_eps"),
    ("janus", "no tokenizer", without(TOKENIZER), R, f"put the model's {TOKENIZER}"),
    ("janus", "no image tags", lambda at: write_tokenizer(at, next(iter(SPECIAL))), C,
     "cannot prompt Janus for an image"),
    ("janus", "lacks", drops("layers.1.mlp.up_proj"), C, "is missing"),
    ("janus", "no head", drops("vision_head.bias"), C, "output.bias"),
    ("janus", "no decoder", drops("conv_blocks"), C, "fetch it again"),
    ("glm", "lacks", drops("layers.0.post_self_attn_layernorm"), C, "a part is absent"),
    ("glm", "no head", drops("lm_head"), C, "lacks lm_head.weight"),
    ("glm", "no codebook", drops("vqmodel.quantize.embedding"), C, "lacks the codebook"),
    ("glm", "no processor", without("processor"), R, "put the released processor"),
    ("anole", "no shard", without(SHARDS[1]), C, SHARDS[1]),
    ("anole", "no tokenizer", without("tokenizer/text_tokenizer.json"), R, "text_tokenizer.json"),
    ("anole", "drafter lacks", drafter(lambda w: w.pop("layers.0.mlp.down_proj.weight")), C,
     "lacks layers.0.feed_forward.w2"),
    # --- what is damaged
    ("lumina2", "cut model", cut(MODEL), C, "fetch it again"),
    ("lumina2", "cut decoder", cut(MOVQ), C, "fetch it again"),
    ("lumina2", "cut tokenizer", cut(TOKENIZER), C, "cannot be read as a tokenizer"),
    ("lumina2", "cut settings", cut(SETTINGS), C, "cannot be read as JSON"),
    ("lumina2", "cut config", cut("config.json"), C, "cannot be read as JSON"),
    ("lumina2", "NaN", tensors(lambda w: w["model.norm.weight"].fill_(float("nan"))), C, "damaged"),
    ("lumina2", "id", token("<racm3:break>", "x"), C, "'x' is not an id"),
    ("lumina2", "no first token", says(SETTINGS, bos_token=None, eos_token=None), C, "bos_token"),
    ("lumina2", "a first token", says(SETTINGS, bos_token="<zz>"), C, "lacks '<zz>'"),
    ("official", "cut model", cut(MODEL), C, "fetch it again"),
    ("official", "cut words", cut(WORDS), C, "fetch it again"),
    ("official", "other names", lines(NAMES, lambda names: names[1:]), C, "does not name"),
    ("official", "a word less", lines(WORDS, lambda words: words[1:]), C, "lacks words"),
    ("official", "no base64", lines(WORDS, lambda words: ["%% 1"]), C, "cannot be read as words"),
    ("official", "other ids", lines(WORDS, lambda words: words[:-1]), C, "and the model at"),
    # --- values of a configuration
    ("anole", "width", says(hidden_size=64), C, "hidden_size 32 by its shapes"),
    ("anole", "eps", says(rms_norm_eps="small"), C, "rms_norm_eps 'small'"),
    ("anole", "base", says("drafter/config.json", rope_theta="wide"), C, "rope_theta 'wide'"),
    ("lumina2", "eps", says(rms_norm_eps="small"), C, "rms_norm_eps 'small'"),
    ("lumina2", "eps below 0", says(rms_norm_eps=-1.0), C, "rms_norm_eps -1.0"),
    ("lumina2", "eps is a flag", says(rms_norm_eps=True), C, "rms_norm_eps True"),
    ("lumina2", "eps is NaN", says(rms_norm_eps=float("nan")), C, "rms_norm_eps nan"),
    ("lumina2", "base", says(rope_theta=0), C, "rope_theta 0"),
    ("lumina2", "positions", says(max_position_embeddings=512.5), C, "max_position_embeddings 512.5"),
    ("lumina2", "few positions", says(max_position_embeddings=12), R, "ask for a smaller image"),
    ("lumina2", "vocabulary", says(vocabulary_map=[1]), C, "vocabulary_map [1]"),
    ("lumina2", "ids", says(vocabulary_map={"<MOVQGAN0>": "a"}), C, "not a table of ids"),
    ("lumina2", "width", says(hidden_size="48"), C, "hidden_size '48'"),
    ("lumina2", "heads", says(num_attention_heads=3), C, "num_attention_heads 4 by its shapes"),
    ("lumina2", "norms", says(swin_norm="yes"), C, "swin_norm 'yes'"),
    ("lumina2", "rotation", says(rope_scaling={"factor": 2.0}), C, "asks for rope_scaling"),
    ("official", "row ends", says(eol_token_id=482), C, "says eol_token_id 482"),
    ("official", "image ends", says(eoi_token_id=90), C, "has no place for Emu3's tokens"),
    ("official", "area", says(image_area="large"), C, "image_area 'large'"),
    ("official", "area below 0", says(image_area=-5), C, "image_area -5"),
    ("official", "positions", says(max_position_embeddings="9"), C, "max_position_embeddings '9'"),
    ("hf", "vocabulary", says(vocabulary_map=[1]), C, "vocabulary_map [1]"),
    ("hf", "text", says(text_config=["x"]), C, "text_config ['x']"),
    ("glm", "sections", rope(mrope_section="8,4,4"), C, "mrope_section '8,4,4'"),
    ("glm", "a section", rope(mrope_section=["8", 4, 4]), C, "mrope_section ['8', 4, 4]"),
    ("glm", "one section", rope(mrope_section=16), C, "mrope_section 16"),
    ("glm", "other sections", rope(mrope_section=[2, 3, 4]), C, "are not the 16 pairs that turn"),
    ("glm", "share", rope(partial_rotary_factor="half"), C, "partial_rotary_factor 'half'"),
    ("glm", "a list of shares", rope(partial_rotary_factor=[0.5]), C, "partial_rotary_factor [0.5]"),
    ("glm", "no share", rope(partial_rotary_factor=-0.5), C, "partial_rotary_factor -0.5"),
    ("glm", "more than all", rope(partial_rotary_factor=2.0), C, "cannot turn in pairs"),
    ("glm", "rotation", rope(rope_type="yarn"), C, "asks for rope_type 'yarn'"),
    ("glm", "heads", says(GLM, "text_config", num_attention_heads=3), C, "not 3 heads of one width"),
    ("glm", "heads in words", says(GLM, "text_config", num_attention_heads="4"), C, "heads '4'"),
    ("glm", "width", says(GLM, "text_config", hidden_size=64), C, "hidden_size 128 by its shapes"),
    ("glm", "codes", says(GLM, vq_config={"num_embeddings": "128"}), C, "num_embeddings '128'"),
    ("glm", "text", says(GLM, text_config=[1]), C, "text_config [1]"),
    ("glm", "image start", says(GLM, image_end_token_id="x"), C, "image_end_token_id 'x'"),
    ("janus", "text", says(language_config="x"), C, "language_config 'x'"),
    ("janus", "eps", llm(rms_norm_eps=[1]), C, "rms_norm_eps [1]"),
    ("janus", "patches", says(vision_config={"num_image_tokens": 575}), C, "not a square"),
    ("janus", "sight", says(vision_config=[1]), C, "vision_config [1]"),
    ("janus", "heads", llm(num_attention_heads=3), C, "not 3 heads of one width"),
    ("janus", "heads in words", llm(num_attention_heads="four"), C, "num_attention_heads 'four'"),
    ("janus", "layers", llm(num_hidden_layers=4), C, "num_hidden_layers 3 by its shapes"),
    ("janus", "scaling", llm(rope_scaling={"rope_type": "yarn"}), C, "asks for rope_scaling"),
    ("janus", "rotation", llm(rope_parameters=[1]), C, "rope_parameters [1]"),
    ("janus", "activation", llm(hidden_act="gelu"), C, "asks for hidden_act 'gelu'"),
    ("hf", "time", says(vq_config={"temporal_downsample_factor": 0}), C, "downsample_factor 0"),
]  # fmt: skip

TWO = "Generate a dual-panel image of 512x1024 where the <lower half> displays a <depth map>: a cat"
#: The layout, what is asked of it, the error, its field and a fragment.
REQUESTS: list[tuple[str, dict[str, Any], type[LanternError], str | None, str]] = [
    ("lumina2", {"cfg_scale": 3.0}, R, "cfg_scale", "cfg_scale 3 is below 4"),
    ("lumina2", {"cfg_scale_image": 2.0}, R, "cfg_scale_image", "two-way guidance"),
    ("lumina2", {"prompt": "fox " * 400}, R, None, "shorten the prompt"),
    ("lumina2", {"prompt": "a <MOVQGAN3> fox"}, R, None, "<MOVQGAN3>"),
    ("lumina2", {"prompt": TWO}, R, None, "asks for two panels of 512x1024"),
    ("lumina2", {"size": (12, 8)}, R, "size", "multiples of 8"),
    ("lumina2", {"size": (40, 8)}, R, "size", "one at most 4 times the other"),
    ("lumina2", {"size": (1600, 1600)}, R, "size", "no more pixels"),
    ("official", {"negative_prompt": "<|visual token 000001|>"}, R, None, "reads as a token"),
    ("official", {"size": (11, 10)}, R, "size", "sides are multiples of 2"),
    ("official", {"size": (60, 60)}, R, "size", "with fewer than 512 tokens"),
    ("official", {"prompt": "a cat " * 200}, R, None, "shorten the prompt to 482 tokens"),
    ("official", {"negative_prompt": "a cat " * 200}, R, None, "shorten the prompt to 482 tokens"),
    ("janus", {"size": (24, 12)}, R, "size", "12x12 pixels only, not 24x12"),
    ("janus", {"prompt": "a long text " * 60}, R, None, "shorten the prompt"),
    ("janus", {"prompt": 3}, R, None, "the prompt 3 is a number"),
    ("janus", {"cfg_scale_image": 1.5}, R, "cfg_scale_image", "two-way guidance"),
    ("glm", {"size": (260, 256)}, R, "size", "multiples of 32 pixels, not 260x256"),
    ("glm", {"size": (32 * 300, 32)}, R, "size", "it is too narrow"),
    ("glm", {"prompt": "a red cube " * 9000}, R, "prompt", "characters"),
    ("glm", {"cfg_scale": 3.0}, R, "cfg_scale", "decodes without guidance"),
    ("official", {"cfg_scale_image": 1.5}, R, "cfg_scale_image", "two-way guidance"),
]


def write(folder: Path, layout: str) -> Path:
    makers: dict[str, Callable[[Path], Path]] = {
        "lumina2": write_lumina2,
        "glm": write_glm_image,
        **dict.fromkeys(("janus", "original"), write_janus),
        "janus_hf": lambda folder: write_janus(folder, "hf"),
        "anole": lambda folder: write_anole(folder, layout="hf"),
    }
    return makers[layout](folder) if layout in makers else write_emu3(folder, layout)


def usual(layout: str) -> dict[str, Any]:
    sizes = {"lumina2": {"size": (8, 8)}, "glm": {"size": (256, 256)}}
    return {"prompt": "a fox", "strategy": "vanilla", **sizes.get(layout, {})}


@pytest.mark.parametrize(
    ("family", "layout", "below"),
    [
        ("emu3", "official", ""), ("emu3", "hf", ""), ("emu3", "3.5", ""), ("janus", "original", ""),
        ("janus", "janus_hf", ""), ("lumina2", "lumina2", ""), ("glm_image", "glm", ""),
        ("glm_image", "glm", "vision_language_encoder"),
    ],
)  # fmt: skip
def test_check_says_what_is_there(family: str, layout: str, below: str, tmp_path: Path) -> None:
    report = check(write(tmp_path / "model", layout) / below)
    assert report.family == family and report.usable
    assert {one.part: one.state for one in report.parts} == {
        "target": "found", "vq": "found", "text_tokenizer": "found", "drafter": "missing",
    }  # fmt: skip
    Path(next(one.path for one in report.parts if one.part == "text_tokenizer")).unlink()
    assert not check(Path(report.path)).usable


def check_sizes(
    error: LanternError, kind: type[LanternError], field: str | None, part: str
) -> None:
    text = str(error)
    assert type(error) is kind and error.exit_code == 2 and error.field == field, text
    assert part in text and "\n" not in text and len(text) < 700
    assert any(way in text for way in ("; ", ": put ", ": fetch "))  # a way out


@pytest.mark.parametrize(
    ("layout", "what", "change", "kind", "part"),
    FOLDERS,
    ids=[f"{layout}-{what}" for layout, what, *_ in FOLDERS],
)
def test_a_folder_is_refused_in_one_sentence(
    layout: str, what: str, change: Change, kind: type[LanternError], part: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", layout)
    change(folder)
    with (
        pytest.raises(LanternError) as caught,
        lantern_accel.load(folder, device="cpu", dtype="float32") as pipe,
    ):
        pipe.generate(**usual(layout))
    check_sizes(caught.value, kind, None, part)


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    made = {}
    for layout in ("lumina2", "official", "janus", "glm"):
        folder = write(tmp_path_factory.mktemp("asked") / "model", layout)
        made[layout] = lantern_accel.load(folder, device="cpu", dtype="float32")
    yield made
    for pipe in made.values():
        pipe.close()


@pytest.mark.parametrize(("layout", "asked", "kind", "field", "part"), REQUESTS)
def test_a_request_is_refused_with_its_field(
    layout: str, asked: dict[str, Any], kind: type[LanternError], field: str | None, part: str,
    pipes: dict[str, Any],
) -> None:  # fmt: skip
    with pytest.raises(LanternError) as caught:
        pipes[layout].generate(**{**usual(layout), **asked})
    check_sizes(caught.value, kind, field, part)
