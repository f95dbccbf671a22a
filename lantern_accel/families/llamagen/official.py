"""LlamaGen's official files: the GPT, told by keys and shapes, and the parts beside it.

Layouts: FoundationVision/LlamaGen's README (``pretrained_models``), jadohu/LANTERN's (``ckpts``). What
shapes cannot tell (heads, resolution) comes from a configuration beside the weights, from what the file
says about itself, or from the published sizes and file names, in this order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import (
    OWN_CONFIG,
    Candidate,
    check_said,
    config_of,
    drafter_weights,
    examine,
    explained,
    our_sizes,
    read_json,
    search,
    side_of,
    whole,
)
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.image_tokenizer import vq_sizes
from lantern_accel.families.keys import LLAMA, Rule, layer_count, matrix_shape, renamed
from lantern_accel.families.llamagen.drafter import DrafterConfig, misfit
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.families.llamagen.model import SHAPES, LlamaGenConfig, llamagen_config
from lantern_accel.families.manifest import ModelDefaults
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import parts_of, published, released
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.values import Sampling

#: A drafter has one table, of codes.
DRAFTER_RULES: tuple[Rule, ...] = (*LLAMA, (r"^tok_embeddings\.", "embed_tokens."))
RULES = {"target": LLAMA, "drafter": DRAFTER_RULES}


#: What a published model is known by.
_RELEASED = tuple({*LlamaGenConfig.model_fields, "hidden_dim"} - {"ffn_dim"})
#: Tokens along one side by the ``input_type`` of a published drafter, which hard-codes them.
INPUT_TYPES = {"t2i": 16, "c2i": 24, "t2i2": 32}


def classify(checkpoint: Checkpoint) -> str | None:
    """Return which part of a LlamaGen model a checkpoint is; None: of something else."""
    keys = set(renamed(checkpoint, LLAMA))
    if "fc.weight" in keys and any(".attention." in key for key in keys):
        return None if any("q_norm" in key for key in keys) else "drafter"
    if any(key.startswith("cls_embedding.") for key in keys):
        return "target"
    if any(key.endswith(".attention.wqkv.weight") for key in keys):
        return None if any("q_normalization" in key for key in keys) else "target"
    if "quantize.embedding.weight" in keys and any("decoder.conv_blocks." in k for k in keys):
        return "vq"
    return None


#: What each kind of checkpoint is, and what to call a part that should be of one.
_ARE = {"target": "a GPT", "drafter": "a drafter", "vq": "an image tokenizer"}
_WANTED = {"vq": "LlamaGen's image tokenizer", "drafter": "a LANTERN drafter for LlamaGen"}


def candidates_for(kind: str, named: Path | None, folders: Iterable[Path]) -> list[Candidate]:
    """Return the checkpoints of one kind: the one that a user named, or all that lie in the folders.

    Raises :class:`CheckpointError` for one of another kind, and for one that cannot be opened.
    """
    if named is not None:
        one = examine(named, classify)
        if one.opened() and one.kind != kind:
            held = f"it is {_ARE[one.kind]}" if one.kind else "its keys are of something else"
            raise CheckpointError(
                f"{named} is not {_WANTED[kind]} ({held}); name another with --{kind}"
            )
        return [one]
    seen = search(folders, classify)
    found = [one for one in seen if one.kind == kind]
    broken = [one for one in seen if one.error is not None and kind in one.path.name]
    if broken and (kind == "drafter" or not found):
        broken[0].opened()
    return found


# --- image tokenizer --------------------------------------------------------------------------------


def published_vq(downsample: int = 16) -> VQConfig:
    """Return the sizes of a published tokenizer: 16 or 8 pixels a token."""
    return VQConfig() if downsample == 16 else VQConfig(ch_mult=(1, 2, 2, 4))


def vq_config(checkpoint: Checkpoint) -> VQConfig:
    """Return the sizes of a tokenizer from its shapes; raises :class:`CheckpointError`."""
    names = {key: key for key in checkpoint}
    return vq_sizes(checkpoint, names, "LlamaGen's image tokenizer")


def find_vq(found: Found, folders: Sequence[Path]) -> None:
    """Find the tokenizer of a GPT, named or in the folders.

    Raises :class:`CheckpointError` for a tokenizer of another codebook, and for several to choose from.
    """
    config, name = found.manifest.target, found.files["target"].name
    candidates = candidates_for("vq", found.parts.vq, folders)
    hint = "t2i" if config.conditioning == "text" else "c2i"
    if not candidates:
        found.missing["vq"] = (
            f"an image tokenizer (vq_ds16_{hint}.pt): put it beside {name}, or name it with --vq"
        )
        return
    configs = {one.path: vq_config(one.opened()) for one in candidates}
    fitting = [p for p, c in configs.items() if c.codebook_size == config.vocab_size]
    if not fitting:
        path, other = next(iter(configs.items()))
        raise CheckpointError(
            f"{path} is of another codebook: it has {other.codebook_size} codes, {name} draws from "
            f"{config.vocab_size}; name the right tokenizer with --vq"
        )
    fitting = [p for p in fitting if configs[p].downsample == 16] or fitting
    fitting = [p for p in fitting if hint in p.name] or fitting
    if len(fitting) > 1:
        names = ", ".join(p.name for p in fitting)
        raise CheckpointError(f"several tokenizers fit {name} ({names}); name one with --vq")
    found.files["vq"] = fitting[0]
    found.manifest = found.manifest.model_copy(update={"vq": configs[fitting[0]]})


# --- drafter ----------------------------------------------------------------------------------------


def drafter_config(path: Path, checkpoint: Checkpoint) -> DrafterConfig:
    """Return the sizes of a published drafter from its shapes and its ``config.json``.

    Published drafters were trained seeing the caption's pads. One that this project trained has a
    ``drafter.json``. Raises :class:`CheckpointError`.
    """
    own = (path if path.is_dir() else path.parent) / OWN_CONFIG
    if own.is_file():
        with explained(own, "take it from where the drafter is from"):
            return DrafterConfig.model_validate(read_json(own))
    said: dict[str, Any] = config_of(path)
    named = renamed(checkpoint, DRAFTER_RULES)
    vocab, dim = matrix_shape(checkpoint, named, "embed_tokens.weight")
    ffn = matrix_shape(checkpoint, named, "layers.0.feed_forward.w1.weight")[0]
    layers = layer_count(named)
    if layers != 1:
        raise CheckpointError(
            f"the drafter {path} has {layers} layers; only drafters of one layer are supported"
        )
    heads = our_sizes(said).get("n_head")
    kind = said.get("input_type")
    if heads is None or (kind not in INPUT_TYPES and "block_size" not in said):
        raise CheckpointError(
            f"the drafter {path} has no config.json with num_attention_heads and input_type (one of "
            f"{', '.join(INPUT_TYPES)}); take it from where the drafter is from"
        )
    check_said(f"the drafter {path}", said, {"dim": dim, "vocab_size": vocab, "ffn_dim": ffn})
    # The published code takes grid and prefix from the kind, whatever else its file says.
    grid = INPUT_TYPES.get(str(kind)) or side_of(said, path)
    prefix: Any = 0 if kind == "c2i" else 119
    if kind not in INPUT_TYPES and "cls_token_num" in said:
        prefix = said["cls_token_num"]
    with explained(
        f"the config.json of the drafter {path}", "take it from where the drafter is from"
    ):
        return DrafterConfig(
            dim=dim,
            n_head=heads,
            ffn_dim=ffn,
            vocab_size=vocab,
            grid=grid,
            prefix_length=prefix,
            norm_eps=said.get("rms_norm_eps", 1e-6),
            bias=said.get("bias", True),
            mask_padding=False,
        )


def fitting_drafter(
    config: LlamaGenConfig, layers: int = 1, taps: Sequence[int] = ()
) -> DrafterConfig:
    """Return the sizes of an EAGLE drafter for a GPT: blocks as the GPT's, which hide the pads."""
    return DrafterConfig(
        dim=config.dim,
        n_layer=layers,
        taps=tuple(taps),
        n_head=config.n_head,
        ffn_dim=config.hidden_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=config.prefix_length - 1,
        norm_eps=config.norm_eps,
        rope_base=config.rope_base,
        prefix_rotary=config.prefix_rotary,
    )


def published_drafter(config: LlamaGenConfig) -> DrafterConfig:
    """Return the sizes of LANTERN's published drafter for a GPT, which was trained seeing pads."""
    theirs = {"mask_padding": False, "norm_eps": 1e-6}
    return fitting_drafter(config).model_copy(update=theirs)


def find_drafter(found: Found, folders: Sequence[Path]) -> None:
    """Find LANTERN's drafter of a GPT: named, beside it, or in ``trained_drafters``.

    Raises :class:`CheckpointError` with all sizes where what is there is of another model.
    """
    config, parts = found.manifest.target, found.parts
    if parts.no_drafter:
        return
    named = None if parts.drafter is None else drafter_weights(parts.drafter)
    roots = [*folders, *(folder / "trained_drafters" for folder in folders)]
    candidates = candidates_for("drafter", named, roots)
    if not candidates:
        found.missing["drafter"] = (
            "a drafter: without one 'auto' and the strategies that need none work; put LANTERN's in "
            "trained_drafters/ beside it, name one with --drafter, or train one with `lantern-accel "
            "train drafter`"
        )
        return
    fitting = [
        one for one in candidates if not misfit(drafter_config(one.path, one.opened()), config)
    ]
    chosen = (fitting or candidates)[0]
    sizes = read_drafter(chosen, config, found.files["target"].name)
    found.files["drafter"] = chosen.path
    found.manifest = found.manifest.model_copy(update={"drafter": sizes})


def read_drafter(one: Candidate, config: LlamaGenConfig, name: str) -> DrafterConfig:
    """Return the sizes of a GPT's drafter; raises CheckpointError with all sizes for another's."""
    sizes = drafter_config(one.path, one.opened())
    wrong = misfit(sizes, config, name)
    if wrong is not None:
        raise CheckpointError(
            f"the drafter {one.path} is of another model: {wrong}; name another with --drafter, or "
            "decode without one: --drafter none"
        )
    return sizes


# --- text encoder -----------------------------------------------------------------------------------


def find_text(found: Found, folders: Sequence[Path]) -> None:
    """Find flan-t5 by its ``config.json``: named, or in a folder near the GPT."""
    config, parts = found.manifest.target, found.parts
    if parts.text is not None:
        if not is_t5(parts.text):
            raise CheckpointError(
                f"{parts.text} is no T5 encoder (its config.json has no model_type t5); name the "
                "folder of flan-t5-xl with --text-encoder"
            )
        width = read_json(parts.text / "config.json").get("d_model")
        if width != config.caption_dim:
            raise CheckpointError(
                f"the text encoder {parts.text} gives features of width {width}, the model takes "
                f"{config.caption_dim}; name the folder of flan-t5-xl with --text-encoder"
            )
        found.files["t5"] = parts.text
        return
    near = (
        path.parent
        for level in ("", "[!.]*/", "[!.]*/[!.]*/")
        for root in folders
        for path in sorted(root.glob(f"{level}config.json"))
    )
    widths = ((one, read_json(one / "config.json").get("d_model")) for one in near if is_t5(one))
    fitting = next((one for one, width in widths if width == config.caption_dim), None)
    if fitting is not None:
        found.files["t5"] = fitting
    elif parts.embeddings is None:
        found.missing["text"] = (
            "a text encoder (google/flan-t5-xl): put its folder in t5-ckpt/ beside the model, name it "
            "with --text-encoder, or give the prompts' features with --embeddings"
        )


def is_t5(folder: Path) -> bool:
    """Return whether a folder's ``config.json`` is a T5's."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    try:
        return read_json(config).get("model_type") in ("t5", "umt5", "mt5")
    except CheckpointError:
        return False


#: What the official samplers use: sample_c2i.py and sample_t2i.py of LlamaGen.
OFFICIAL_SAMPLING = {
    "class": Sampling(cfg_scale=4.0, top_k=2000),
    "text": Sampling(cfg_scale=7.5, top_k=1000),
}


def detect(path: Path, parts: Parts) -> Found | None:
    """Say what LlamaGen model lies at ``path``; None where nothing of LlamaGen's does."""
    folder = path if path.is_dir() else path.parent
    here = [examine(path, classify)] if path.is_file() else search([path], classify)
    targets = [one for one in here if one.kind == "target"]
    if not targets:
        ours = [one for one in here if one.kind is not None]
        broken = [one for one in here if one.error is not None]
        if broken and (ours or not path.is_dir() or len(here) == len(broken)):
            broken[0].opened()
        if ours:
            held = ", ".join(f"{one.path.name} ({one.kind})" for one in ours)
            raise CheckpointError(
                f"{path} holds {held}, but no GPT that draws; put one of LlamaGen's beside it, or name "
                "it with --model"
            )
        return None
    if len(targets) > 1:
        names = ", ".join(one.path.name for one in targets)
        raise CheckpointError(
            f"{path} holds {len(targets)} models ({names}); name one: --model {targets[0].path}"
        )
    target = targets[0]
    config = target_config(target)
    # A Hugging Face folder has its tokenizer and drafters beside it, not inside.
    beside = [target.path, target.path.parent] if target.path.is_dir() else [folder]
    manifest = LlamaGenManifest(
        name=target.path.stem,
        target=config,
        vq=published_vq().model_copy(update={"codebook_size": config.vocab_size}),
        defaults=defaults_of(config),
    )
    found = Found(manifest, {"target": target.path}, parts)
    find_vq(found, beside)
    find_drafter(found, beside)
    if config.conditioning == "text":
        find_text(found, beside)
    known, side = released(found.manifest, published_manifest, _RELEASED), found.manifest.image_size
    if "vq" in found.files and known and side != known.config["pixels"]:
        raise CheckpointError(
            f"{found.files['vq']} makes {side // config.grid} pixels of a token, but {target.path.name} "
            f"draws {config.grid} x {config.grid} tokens for {known.config['pixels']} pixels; name the "
            "tokenizer of 16 pixels a token with --vq"
        )
    found.manifest = found.manifest.named(known)
    return found


def defaults_of(config: LlamaGenConfig) -> ModelDefaults:
    """Return the official settings for a model of this kind, within its codebook."""
    sampling = OFFICIAL_SAMPLING[config.conditioning]
    return ModelDefaults(sampling=sampling).within(config.vocab_size)


def published_manifest(entry: ModelEntry) -> LlamaGenManifest:
    """Return the manifest of a published LlamaGen, drafter included where one is published."""
    said, parts = entry.config, parts_of(entry)
    config = llamagen_config(said["size"], said["pixels"], text=said["conditioning"] == "text")
    return LlamaGenManifest(
        **entry.labels,
        target=config,
        drafter=published_drafter(config) if "drafter" in parts else None,
        vq=published_vq(parts["vq"].config["downsample"]),
        defaults=defaults_of(config),
    )


# --- sizes ------------------------------------------------------------------------------------------


def target_config(target: Candidate) -> LlamaGenConfig:
    """Return the sizes of a GPT from its shapes and from what is written beside it.

    Raises :class:`CheckpointError` where something cannot be told, with what to write where.
    """
    checkpoint, path = target.opened(), target.path
    named = renamed(checkpoint, LLAMA)
    said, layers = _said(path, checkpoint), layer_count(named)
    (vocab, dim), _, (ffn, _) = (
        matrix_shape(checkpoint, named, name)
        for name in ("tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w1.weight")
    )
    values: dict[str, Any] = {
        "dim": dim,
        "n_layer": layers,
        "vocab_size": vocab,
        "ffn_dim": ffn,
        "norm_eps": said.get("norm_eps", 1e-5),
        "rope_base": said.get("rope_base", 10000.0),
    }
    if "cls_embedding.uncond_embedding" in named:
        prefix, width = matrix_shape(checkpoint, named, "cls_embedding.uncond_embedding")
        values.update(conditioning="text", prefix_length=prefix, caption_dim=width)
    elif "cls_embedding.embedding_table.weight" in named:
        rows = matrix_shape(checkpoint, named, "cls_embedding.embedding_table.weight")[0]
        values.update(conditioning="class", prefix_length=1, num_classes=rows - 1)
    else:
        raise CheckpointError(
            f"{path} lacks cls_embedding (the classes, or the caption projection with its "
            "uncond_embedding): a part of the checkpoint is absent; fetch it again"
        )
    check_said(path, said, {"dim": dim, "n_layer": layers, "vocab_size": vocab})
    values["n_head"] = _heads(path, said, layers, dim)
    values["grid"] = _grid(path, said, values)
    with explained(path, "its configuration is not of these weights"):
        return LlamaGenConfig.model_validate(values)


def _said(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a configuration, or the file itself, says about the model, under our names."""
    said: dict[str, Any] = {}
    info = checkpoint.info
    if isinstance(info.get("config"), str):
        try:
            inner = json.loads(info["config"])
        except ValueError:
            inner = {}
        info = {**info, **(inner if isinstance(inner, dict) else {})}
    alone = path.is_dir() or len(list(path.parent.glob(f"*{path.suffix}"))) <= 2
    for source in (info, config_of(path, alone=alone)):
        said.update(our_sizes(source))
    size = str(said.get("gpt_model", "")).removeprefix("GPT-")
    if size in SHAPES:
        said.setdefault("n_head", SHAPES[size][1])
    return said


def _heads(path: Path, said: dict[str, Any], layers: int, dim: int) -> int:
    if said.get("n_head") is not None:
        return whole(said, "n_head", path)
    for shape in SHAPES.values():
        if (shape[0], shape[2]) == (layers, dim):
            return shape[1]
    known = ", ".join(f"{n} {s[0]} x {s[2]}" for n, s in SHAPES.items())
    raise CheckpointError(
        f"{path} has {layers} layers of width {dim}, which is no published LlamaGen ({known}); put a "
        f"{path.stem}.json beside it with n_head and block_size"
    )


def _grid(path: Path, said: dict[str, Any], values: dict[str, Any]) -> int:
    """Return the tokens along one side: said by a configuration, or by the published name."""
    if said.get("grid") is not None:
        return whole(said, "grid", path)
    if said.get("block_size") is not None:
        return side_of(said, path)
    if said.get("image_size") is not None:
        pixels = whole(said, "downsample_size", path) if said.get("downsample_size") else 16
        return whole(said, "image_size", path) // pixels
    if said.get("input_type") in INPUT_TYPES:
        return INPUT_TYPES[said["input_type"]]
    for part in (path.name, path.parent.name):
        sizes = set(re.findall(r"(?<!\d)(256|384|512)(?!\d)", part))
        if len(sizes) == 1:
            return int(sizes.pop()) // 16
    if values["conditioning"] == "class":
        known = {
            one.config["pixels"]
            for one in published()
            if one.config.get("conditioning") == "class"
            and SHAPES[one.config["size"]] == (values["n_layer"], values["n_head"], values["dim"])
        }
        if len(known) == 1:  # XL, XXL and 3B are published at one resolution
            return int(known.pop()) // 16
    raise CheckpointError(
        f"the weights of {path} do not tell whether it draws 256, 384 or 512 pixels; give the file its "
        f"published name (such as c2i_L_384.pt), or put a {path.stem}.json beside it with block_size "
        "(tokens an image)"
    )
