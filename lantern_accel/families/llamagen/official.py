"""LlamaGen's official files: which model they are, told by keys and shapes.

Layouts: FoundationVision/LlamaGen's README (``pretrained_models``), jadohu/LANTERN's (``ckpts``). What
shapes cannot tell (heads, resolution) comes from a configuration beside the weights, from what the file
says about itself, or from the published sizes and file names, in this order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import (
    Candidate,
    check_said,
    config_of,
    examine,
    explained,
    search,
    side_of,
    whole,
)
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.catalogue import parts_of, published
from lantern_accel.families.llamagen.keys import llamagen_name
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.llamagen.parts import (
    INPUT_TYPES,
    Surroundings,
    classify,
    find_drafter,
    find_text,
    find_vq,
    published_drafter,
    published_vq,
)
from lantern_accel.families.llamagen.sizes import SHAPES, llamagen_config
from lantern_accel.families.manifest import ModelDefaults
from lantern_accel.families.published import ModelEntry
from lantern_accel.strategy.values import Sampling

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
    files = {"target": target.path}
    missing: dict[str, str] = {}
    around = Surroundings(config, target.path.name, beside, parts, files, missing)
    vq = find_vq(around)
    drafter = find_drafter(around)
    known = published_entry(config)
    if (
        known is not None
        and vq is not None
        and config.grid * vq.downsample != known.config["pixels"]
    ):
        raise CheckpointError(
            f"{files['vq']} makes {vq.downsample} pixels of a token, but {target.path.name} draws "
            f"{config.grid} x {config.grid} tokens for {known.config['pixels']} pixels; name the "
            "tokenizer of 16 pixels a token with --vq"
        )
    if config.conditioning == "text":
        find_text(around)
    with explained(lambda why: f"{target.path}: {why}"):
        manifest = LlamaGenManifest(
            name=target.path.stem,
            target=config,
            drafter=drafter,
            vq=vq or published_vq().model_copy(update={"codebook_size": config.vocab_size}),
            defaults=defaults_of(config),
        ).named(known)
    return Found(manifest, files, parts, missing=missing)


def defaults_of(config: LlamaGenConfig) -> ModelDefaults:
    """Return the official settings for a model of this kind, within its codebook."""
    sampling = OFFICIAL_SAMPLING[config.conditioning]
    return ModelDefaults(sampling=sampling).within(config.vocab_size)


def published_manifest(entry: ModelEntry) -> LlamaGenManifest:
    """Return the manifest of a published LlamaGen, drafter included where one is published."""
    config = entry_config(entry)
    parts = parts_of(entry)
    return LlamaGenManifest(
        **entry.labels,
        target=config,
        drafter=published_drafter(config) if "drafter" in parts else None,
        vq=published_vq(parts["vq"].config["downsample"]),
        defaults=defaults_of(config),
    )


def entry_config(entry: ModelEntry) -> LlamaGenConfig:
    """Return the sizes of a published LlamaGen."""
    config = entry.config
    return llamagen_config(config["size"], config["pixels"], text=config["conditioning"] == "text")


def published_entry(config: LlamaGenConfig) -> ModelEntry | None:
    """Return the published model that has exactly these sizes."""
    for one in published():
        if one.family == "llamagen" and _same(entry_config(one), config):
            return one
    return None


def _same(known: LlamaGenConfig, config: LlamaGenConfig) -> bool:
    mine, theirs = known.model_dump(), config.model_dump()
    mine["ffn_dim"], theirs["ffn_dim"] = known.hidden_dim, config.hidden_dim
    if known.conditioning == "class":
        mine["caption_dim"] = theirs["caption_dim"]
    else:
        mine["num_classes"] = theirs["num_classes"]
    return mine == theirs


# --- sizes ------------------------------------------------------------------------------------------


def target_config(target: Candidate) -> LlamaGenConfig:
    """Return the sizes of a GPT from its shapes and from what is written beside it.

    Raises :class:`CheckpointError` where something cannot be told, with what to write where.
    """
    checkpoint, path = target.opened(), target.path
    shapes = {llamagen_name(key): checkpoint.shape(key) for key in checkpoint}
    said = _said(path, checkpoint)
    for key in ("tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w1.weight"):
        if len(shapes.get(key, ())) != 2:
            raise CheckpointError(
                f"{path} lacks {key}: a part of the checkpoint is absent; fetch it again"
            )
    vocab, dim = shapes["tok_embeddings.weight"]
    layers = 1 + max(
        (int(m.group(1)) for key in shapes if (m := re.match(r"layers\.(\d+)\.", key))), default=-1
    )
    if layers == 0:
        raise CheckpointError(f"{path} has no layers: a part of it is absent; fetch it again")
    values: dict[str, Any] = {
        "dim": dim,
        "n_layer": layers,
        "vocab_size": vocab,
        "ffn_dim": shapes["layers.0.feed_forward.w1.weight"][0],
        "norm_eps": said.get("norm_eps", 1e-5),
        "rope_base": said.get("rope_base", 10000.0),
    }
    if "cls_embedding.uncond_embedding" in shapes:
        prefix, width = shapes["cls_embedding.uncond_embedding"]
        values.update(conditioning="text", prefix_length=prefix, caption_dim=width)
    elif "cls_embedding.embedding_table.weight" in shapes:
        rows = shapes["cls_embedding.embedding_table.weight"][0]
        values.update(conditioning="class", prefix_length=1, num_classes=rows - 1)
    else:
        raise CheckpointError(
            f"{path} lacks cls_embedding (the classes, or the caption projection with its "
            "uncond_embedding): a part of the checkpoint is absent; fetch it again"
        )
    check_said(path, said, {"dim": dim, "n_layer": layers, "vocab_size": vocab})
    values["n_head"] = _heads(path, said, layers, dim)
    values["grid"] = _grid(path, said, values)
    with explained(lambda why: f"{path}: {why}; its configuration is not of these weights"):
        return LlamaGenConfig.model_validate(values)


#: Names that configurations have for our fields: the official ModelArgs, Hugging Face's.
_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "rms_norm_eps": "norm_eps",
}


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
        said.update({_NAMES.get(key, key): value for key, value in source.items()})
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
