"""LlamaGen's official files: the GPT, recognised by keys and shapes, and the parts near it.

Layouts: FoundationVision/LlamaGen's README (``pretrained_models``), jadohu/LANTERN's (``ckpts``). What
shapes cannot tell (heads, resolution) comes from the published model that the user names, from a
configuration near the weights, from what the file says about itself, or from the published sizes and
file names, in this order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints import layouts
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.image_tokenizer import check_codebook, vq_sizes
from lantern_accel.families.llamagen.model import (
    SHAPES,
    DrafterConfig,
    LlamaGenConfig,
    LlamaGenManifest,
    llamagen_config,
)
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import ask_for_name, entries_like, list_published, parts_of
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import Sampling

#: A drafter has one table, of codes.
DRAFTER_RULES: tuple[keys.Rule, ...] = (*keys.LLAMA, (r"^tok_embeddings\.", "embed_tokens."))
RULES = {"target": keys.LLAMA, "drafter": DRAFTER_RULES}
#: Chameleon's blocks, which are not LlamaGen's.
_NORMS = ("layers.0.attention.q_norm.weight", "layers.0.attention.q_normalization.weight")
_BLOCK, _PART = "layers.0.attention.wqkv.weight", "layers.0.attention.wq.weight"
#: The parts of a model by our names of their tensors.
SIGNATURES = (
    keys.Signature("drafter", {"fc.weight": 2, _PART: 2}, _NORMS),
    keys.Signature("drafter", {"fc.weight": 2, _BLOCK: 2}, _NORMS),
    keys.Signature("target", {"cls_embedding.uncond_embedding": 0}),
    keys.Signature("target", {"cls_embedding.embedding_table.weight": 0}),
    keys.Signature("target", {_BLOCK: 0}, (*_NORMS, "fc.weight")),
    keys.Signature(
        "vq", {"quantize.embedding.weight": 0, "decoder.conv_blocks.0.res.0.conv1.weight": 0}
    ),
)
#: Tokens along one side by the ``input_type`` of a published drafter, which hard-codes them.
INPUT_TYPES = {"t2i": 16, "c2i": 24, "t2i2": 32}
#: Where the READMEs put flan-t5, from the model's folder.
T5_FOLDERS = ("t5-ckpt", "t5-ckpt/*", "t5", "t5/*", "*")
#: What each kind of checkpoint is, and what to call a part that should be of one.
_ARE = {"target": "a GPT", "drafter": "a drafter", "vq": "an image tokenizer"}
_WANTED = {"vq": "LlamaGen's image tokenizer", "drafter": "a LANTERN drafter for LlamaGen"}
#: What the official samplers use: sample_c2i.py and sample_t2i.py of LlamaGen.
OFFICIAL_SAMPLING = {
    "class": Sampling(cfg_scale=4.0, top_k=2000),
    "text": Sampling(cfg_scale=7.5, top_k=1000),
}


def classify(checkpoint: Checkpoint) -> str | None:
    """Return which part of a LlamaGen model a checkpoint is; None: of something else."""
    return keys.layout_of(checkpoint, SIGNATURES, keys.LLAMA)


def check_part(kind: str, path: Path) -> Checkpoint:
    """Open a part that was named; raises :class:`CheckpointError` for one of another kind."""
    checkpoint = open_checkpoint(path)
    found = classify(checkpoint)
    if found != kind:
        held = "its keys are of something else" if found is None else f"it is {_ARE[found]}"
        raise CheckpointError(f"{path} is not {_WANTED[kind]} ({held}); name another with --{kind}")
    return checkpoint


def parts_in(kind: str, folders: Iterable[Path]) -> list[Path]:
    """Return the checkpoints of one kind that lie in folders.

    Raises :class:`CheckpointError` for one that cannot be opened and has the kind in its name.
    """
    seen = layouts.search(folders, classify)
    found = [path for path, one in seen.items() if one == kind]
    for path, one in seen.items():
        if isinstance(one, CheckpointError) and kind in path.name and not (found and kind == "vq"):
            raise one
    return found


def homes(target: Path) -> list[Path]:
    """Return the folders of a GPT's parts: a Hugging Face folder has them next to it, not inside."""
    return [target, target.parent] if target.is_dir() else [target.parent]


# --- image tokenizer --------------------------------------------------------------------------------


def published_vq(downsample: int = 16) -> VQConfig:
    """Return the sizes of a published tokenizer: 16 or 8 pixels a token."""
    return VQConfig() if downsample == 16 else VQConfig(ch_mult=(1, 2, 2, 4))


def find_vq(found: Found[LlamaGenManifest], folders: Sequence[Path]) -> None:
    """Find the tokenizer of a GPT, named or in the folders.

    Raises :class:`CheckpointError` for a tokenizer of another codebook, and for several to choose from.
    """
    config, name = found.manifest.target, found.files["target"].name
    near = parts_in("vq", folders) if found.parts.vq is None else [found.parts.vq]
    opened = {one: check_part("vq", one) for one in near}
    configs = {
        one: vq_sizes(part, {k: k for k in part}, _WANTED["vq"]) for one, part in opened.items()
    }
    hint = "t2i" if config.conditioning == "text" else "c2i"
    if not configs:
        found.missing["vq"] = (
            f"an image tokenizer (vq_ds16_{hint}.pt): put it next to {name}, or name it with "
            "--use vq=PATH"
        )
        return
    fitting = [p for p, c in configs.items() if c.codebook_size == config.vocab_size]
    if not fitting:
        path, other = next(iter(configs.items()))
        check_codebook(path, other, name, config.vocab_size, "the right tokenizer")
    # A folder of the README has the tokenizers of both kinds of models, and one of 8 pixels a token.
    for preferred in (
        [p for p in fitting if configs[p].downsample == 16],
        [p for p in fitting if p.stem == f"vq_ds16_{hint}"],
    ):
        fitting = preferred or fitting
    if len(fitting) > 1:
        names = ", ".join(p.name for p in fitting)
        raise CheckpointError(
            f"several tokenizers fit {name} ({names}); name one with --use vq=PATH"
        )
    found.files["vq"] = fitting[0]
    found.manifest = found.manifest.model_copy(update={"vq": configs[fitting[0]]})


# --- drafter ----------------------------------------------------------------------------------------


def published_drafter(path: Path, target: LlamaGenConfig) -> DrafterConfig:
    """Return the sizes of LANTERN's drafter from its shapes and its ``config.json``.

    It was trained seeing the caption's pads. Raises :class:`CheckpointError` for something else.
    """
    advice = "take it from where the drafter is from"
    checkpoint, said = check_part("drafter", path), layouts.config_of(path)
    named = keys.rename_keys(checkpoint, DRAFTER_RULES)
    vocab, dim = keys.matrix_shape(checkpoint, named, "embed_tokens.weight")
    ffn = keys.matrix_shape(checkpoint, named, "layers.0.feed_forward.w1.weight")[0]
    layers = keys.layer_count(named)
    if layers != 1:
        raise CheckpointError(
            f"the drafter {path} has {layers} layers; only drafters of one layer are supported"
        )
    heads = layouts.our_sizes(said).get("n_head")
    kind = said.get("input_type")
    if heads is None or kind not in INPUT_TYPES:
        raise CheckpointError(
            f"the drafter {path} has no config.json with num_attention_heads and input_type (one of "
            f"{', '.join(INPUT_TYPES)}); {advice}"
        )
    layouts.check_sizes(
        f"the drafter {path}", said, {"dim": dim, "vocab_size": vocab, "ffn_dim": ffn}
    )
    with layouts.explain_sizes(f"the config.json of the drafter {path}", advice):
        return DrafterConfig(
            dim=dim,
            n_head=heads,
            ffn_dim=ffn,
            vocab_size=vocab,
            # The published code takes these from the kind, whatever else its file says.
            grid=INPUT_TYPES[kind],
            prefix_length=0 if kind == "c2i" else 119,
            norm_eps=said.get("rms_norm_eps", 1e-6),
            bias=said.get("bias", True),
            mask_padding=False,
        )


def drafters_near(found: Found[LlamaGenManifest]) -> list[Path]:
    """Return where a GPT's drafter lies: near it, or in LANTERN's ``trained_drafters``.

    Raises :class:`CheckpointError` for one that cannot be opened.
    """
    near = homes(found.files["target"])
    roots = [*near, *(folder / "trained_drafters" for folder in near)]
    return [near[-1] / "drafter", *parts_in("drafter", roots)]


# --- text encoder -----------------------------------------------------------------------------------


def find_text(found: Found[LlamaGenManifest], folders: Sequence[Path]) -> None:
    """Find flan-t5 by its ``config.json``: named, or where the READMEs put it."""
    width, parts = found.manifest.target.caption_dim, found.parts
    if parts.text is not None:
        given = t5_width(parts.text)
        if given != width:
            what = (
                "no T5 encoder" if given is None else f"a T5 encoder of width {given}, not {width}"
            )
            raise CheckpointError(
                f"{parts.text} is {what} by its config.json; name the folder of flan-t5-xl with "
                "--use text-encoder=PATH"
            )
        found.files["t5"] = parts.text
        return
    near = (one for root in folders for place in T5_FOLDERS for one in sorted(root.glob(place)))
    fitting = next((one for one in near if t5_width(one) == width), None)
    if fitting is not None:
        found.files["t5"] = fitting
    elif parts.embeddings is None:
        found.missing["text"] = (
            "a text encoder (google/flan-t5-xl): put its folder in t5-ckpt/ next to the model, name it "
            "with --use text-encoder=PATH, or give the prompts' features with --use embeddings=PATH"
        )


def t5_width(folder: Path) -> int | None:
    """Return the width of a folder's T5 by its ``config.json``, 0 where it has none; None: no T5."""
    try:
        said = layouts.config_of(folder) if folder.is_dir() else {}
    except CheckpointError:
        return None
    return said.get("d_model", 0) if said.get("model_type") in ("t5", "umt5", "mt5") else None


# --- the whole ----------------------------------------------------------------------------------------


def detect(path: Path, parts: Parts) -> Found[LlamaGenManifest] | None:
    """Say what LlamaGen model lies at ``path``; None where nothing of LlamaGen's does."""
    here = layouts.search([path], classify)
    targets = [one for one, kind in here.items() if kind == "target"]
    if not targets:
        ours = {one: kind for one, kind in here.items() if isinstance(kind, str)}
        broken = [error for error in here.values() if isinstance(error, CheckpointError)]
        if broken and (ours or not path.is_dir() or len(here) == len(broken)):
            raise broken[0]
        if ours:
            held = ", ".join(f"{one.name} ({kind})" for one, kind in ours.items())
            raise CheckpointError(
                f"{path} holds {held}, but no GPT for images; put one of LlamaGen's next to it, or name "
                "it with --model"
            )
        return None
    if len(targets) > 1:
        names = ", ".join(one.name for one in targets)
        raise CheckpointError(
            f"{path} holds {len(targets)} models ({names}); name one: --model {targets[0]}"
        )
    (target,) = targets
    config = target_config(target, parts.entry)
    manifest = LlamaGenManifest(
        name=target.stem,
        target=config,
        vq=published_vq().model_copy(update={"codebook_size": config.vocab_size}),
        defaults=defaults_of(config),
    )
    found = Found(manifest, {"target": target}, parts)
    find_vq(found, homes(target))
    if config.conditioning == "text":
        find_text(found, homes(target))
    known, side = entries_like(found.manifest), found.manifest.image_size
    if "vq" in found.files and known and side != known[0].config["pixels"]:
        raise CheckpointError(
            f"{found.files['vq']} makes {side // config.grid} pixels of a token, but the "
            f"{config.grid} x {config.grid} tokens of {target.name} are for "
            f"{known[0].config['pixels']} pixels; name the tokenizer of 16 pixels a token with "
            "--use vq=PATH"
        )
    return found


def defaults_of(config: LlamaGenConfig) -> ModelDefaults:
    """Return the official settings for a model of this kind, within its codebook."""
    sampling = OFFICIAL_SAMPLING[config.conditioning]
    return ModelDefaults(sampling=sampling).within(config.vocab_size)


def published_manifest(entry: ModelEntry) -> LlamaGenManifest:
    """Return the manifest of a published LlamaGen, drafter included where one is published."""
    said, parts = entry.config, parts_of(entry)
    config = llamagen_config(said["size"], said["pixels"], text=said["conditioning"] == "text")
    # LANTERN's drafters were trained seeing pads.
    theirs = {"mask_padding": False, "norm_eps": 1e-6}
    return LlamaGenManifest(
        **entry.labels,
        target=config,
        drafter=DrafterConfig.fitting(config).model_copy(update=theirs)
        if "drafter" in parts
        else None,
        vq=published_vq(parts["vq"].config["downsample"]),
        defaults=defaults_of(config),
    )


def target_config(path: Path, entry: ModelEntry | None = None) -> LlamaGenConfig:
    """Return the sizes of a GPT from its shapes and from what is written near it.

    ``entry``: the published model that the user says it is. Raises :class:`CheckpointError` where
    something cannot be determined, with what to write where.
    """
    checkpoint = open_checkpoint(path)
    named = keys.rename_keys(checkpoint, keys.LLAMA)
    said, layers = _read_sizes(path, checkpoint), keys.layer_count(named)
    (vocab, dim), _, (ffn, _) = (
        keys.matrix_shape(checkpoint, named, name)
        for name in ("tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w1.weight")
    )
    values: dict[str, object] = {
        "dim": dim,
        "n_layer": layers,
        "vocab_size": vocab,
        "ffn_dim": ffn,
        "norm_eps": said.get("norm_eps", 1e-5),
        "rope_base": said.get("rope_base", 10000.0),
    }
    if "cls_embedding.uncond_embedding" in named:
        prefix, width = keys.matrix_shape(checkpoint, named, "cls_embedding.uncond_embedding")
        values.update(conditioning="text", prefix_length=prefix, caption_dim=width)
    elif "cls_embedding.embedding_table.weight" in named:
        rows = keys.matrix_shape(checkpoint, named, "cls_embedding.embedding_table.weight")[0]
        values.update(conditioning="class", prefix_length=1, num_classes=rows - 1)
    else:
        raise CheckpointError(
            f"{path} lacks cls_embedding (the classes, or the caption projection with its "
            "uncond_embedding): a part of the checkpoint is absent; fetch it again"
        )
    layouts.check_sizes(path, said, {"dim": dim, "n_layer": layers, "vocab_size": vocab})
    heads = next((s[1] for s in SHAPES.values() if (s[0], s[2]) == (layers, dim)), None)
    if "n_head" not in said and heads is None:
        known = ", ".join(f"{n} {s[0]} x {s[2]}" for n, s in SHAPES.items())
        raise CheckpointError(
            f"{path} has {layers} layers of width {dim}, not a published LlamaGen ({known}); put "
            f"a {path.stem}.json next to it with n_head and block_size"
        )
    values["n_head"] = said.get("n_head", heads)
    values["grid"] = _grid(path, said, values, entry)
    with layouts.explain_sizes(path, "its configuration is not of these weights"):
        return LlamaGenConfig.model_validate(values)


def _read_sizes(path: Path, checkpoint: Checkpoint) -> dict[str, object]:
    """Return what a configuration, or its trainer's arguments, say about the model, under our names."""
    alone = path.is_dir() or len(list(path.parent.glob(f"*{path.suffix}"))) <= 2
    layouts.check_kinds(path, checkpoint.info)
    said = layouts.our_sizes({**checkpoint.info, **layouts.config_of(path, alone=alone)})
    size = str(said.get("gpt_model", "")).removeprefix("GPT-")
    if size in SHAPES:
        said.setdefault("n_head", SHAPES[size][1])
    return said


def _grid(
    path: Path, said: dict[str, Any], values: dict[str, object], entry: ModelEntry | None
) -> int:
    """Return the tokens along one side; raises :class:`CheckpointError` where nothing says it."""
    if entry is not None and "pixels" in entry.config:
        return int(entry.config["pixels"]) // 16
    if "block_size" in said:
        side = math.isqrt(said["block_size"])
        if side * side != said["block_size"]:
            raise CheckpointError(
                f"{path}: block_size {said['block_size']} is not a square; correct its configuration"
            )
        return side
    if "image_size" in said:
        return int(said["image_size"]) // int(said.get("downsample_size", 16))
    if said.get("input_type") in INPUT_TYPES:
        return INPUT_TYPES[said["input_type"]]
    # As the published files are called: c2i_L_384.pt, t2i_XL_stage1_256.pt.
    named = re.fullmatch(r"[ct]2i_(?:.*_)?(256|384|512)", path.stem)
    if named:
        return int(named[1]) // 16
    kinds = (values["conditioning"], values["n_layer"], values["dim"])
    known = {
        one.name: one.config["pixels"]
        for one in list_published()
        if one.family == "llamagen"
        and kinds == (one.config["conditioning"], *SHAPES[one.config["size"]][::2])
    }
    if len(set(known.values())) == 1:  # XL, XXL and 3B of classes are published at one resolution
        return int(next(iter(known.values()))) // 16
    if known:
        raise ask_for_name(
            path, f"whether it makes {' or '.join(map(str, known.values()))} pixels", list(known)
        )
    raise CheckpointError(
        f"nothing in {path} says whether it makes 256, 384 or 512 pixels; put a {path.stem}.json next "
        "to it with block_size (tokens per image)"
    )
