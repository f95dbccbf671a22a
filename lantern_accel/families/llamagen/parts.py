"""The parts beside a LlamaGen GPT: image tokenizer, LANTERN's drafter, flan-t5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    folders_named,
    read_json,
    search,
    side_of,
)
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Parts
from lantern_accel.families.image_tokenizer import vq_sizes
from lantern_accel.families.llamagen.drafter import DrafterConfig
from lantern_accel.families.llamagen.keys import drafter_name, llamagen_name
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.nn.vq import VQConfig


@dataclass
class Surroundings:
    """A GPT whose other parts are looked for: its sizes and name, and where they may lie.

    What is found goes into ``files`` (by part), what is not into ``missing``.
    """

    config: LlamaGenConfig
    name: str
    folders: Sequence[Path]
    parts: Parts
    files: dict[str, Path]
    missing: dict[str, str]


#: Tokens along one side by the ``input_type`` of a published drafter, which hard-codes them.
INPUT_TYPES = {"t2i": 16, "c2i": 24, "t2i2": 32}


def classify(checkpoint: Checkpoint) -> str | None:
    """Return which part of a LlamaGen model a checkpoint is; None: of something else."""
    keys = {llamagen_name(key) for key in checkpoint}
    if "fc.weight" in keys and any(".attention." in key for key in keys):
        return None if any("q_norm" in key for key in keys) else "drafter"
    if any(key.startswith("cls_embedding.") for key in keys):
        return "target"
    if any(key.endswith(".attention.wqkv.weight") for key in keys):
        return None if any("q_normalization" in key for key in keys) else "target"
    if "quantize.embedding.weight" in keys and any("decoder.conv_blocks." in k for k in keys):
        return "vq"
    return None


# --- image tokenizer --------------------------------------------------------------------------------


def published_vq(downsample: int = 16) -> VQConfig:
    """Return the sizes of a published tokenizer: 16 or 8 pixels a token."""
    return VQConfig() if downsample == 16 else VQConfig(ch_mult=(1, 2, 2, 4))


def vq_config(checkpoint: Checkpoint) -> VQConfig:
    """Return the sizes of a tokenizer from its shapes; raises :class:`CheckpointError`."""
    names = {key: key for key in checkpoint}
    return vq_sizes(checkpoint, names, "LlamaGen's image tokenizer")


def find_vq(around: Surroundings) -> VQConfig | None:
    """Find the tokenizer of a GPT; None where there is none, which ``missing`` then says.

    Raises :class:`CheckpointError` for a tokenizer of another codebook, and for several to choose from.
    """
    config, name, parts = around.config, around.name, around.parts
    if parts.vq is not None:
        one = examine(parts.vq, classify)
        if one.opened() and one.kind != "vq":
            raise CheckpointError(
                f"{parts.vq} is not LlamaGen's image tokenizer ({_what(one)}); name a vq_ds16 file "
                "with --vq"
            )
        candidates = [one]
    else:
        candidates = search(around.folders, classify)
        broken = [one for one in candidates if one.error is not None and "vq" in one.path.name]
        candidates = [one for one in candidates if one.kind == "vq"]
        if not candidates and broken:
            broken[0].opened()
    hint = "t2i" if config.conditioning == "text" else "c2i"
    if not candidates:
        around.missing["vq"] = (
            f"an image tokenizer (vq_ds16_{hint}.pt): put it beside {name}, or name it with --vq"
        )
        return None
    configs = {one.path: vq_config(one.opened()) for one in candidates}
    fitting = [p for p, c in configs.items() if c.codebook_size == config.vocab_size]
    if not fitting:
        path, other = next(iter(configs.items()))
        raise CheckpointError(
            f"{path} is of another codebook: it has {other.codebook_size} codes, {name} draws from "
            f"{config.vocab_size}; name the right tokenizer with --vq"
        )
    if len(fitting) > 1:
        fitting = [p for p in fitting if configs[p].downsample == 16] or fitting
    if len(fitting) > 1:
        fitting = [p for p in fitting if hint in p.name] or fitting
    if len(fitting) > 1:
        names = ", ".join(p.name for p in fitting)
        raise CheckpointError(f"several tokenizers fit {name} ({names}); name one with --vq")
    around.files["vq"] = fitting[0]
    return configs[fitting[0]]


def _what(one: Candidate) -> str:
    return {"target": "it is a GPT", "drafter": "it is a drafter"}.get(
        one.kind or "", "its keys are of something else"
    )


# --- drafter ----------------------------------------------------------------------------------------


def drafter_config(path: Path, checkpoint: Checkpoint) -> DrafterConfig:
    """Return the sizes of a published drafter from its shapes and its ``config.json``.

    Published drafters were trained seeing the caption's pads. One that this project trained has a
    ``drafter.json``. Raises :class:`CheckpointError`.
    """
    own = (path if path.is_dir() else path.parent) / OWN_CONFIG
    if own.is_file():
        with explained(lambda why: f"{own}: {why}; take it from where the drafter is from"):
            return DrafterConfig.model_validate(read_json(own))
    said: dict[str, Any] = config_of(path)
    shapes = {drafter_name(key): checkpoint.shape(key) for key in checkpoint}
    try:
        vocab, dim = shapes["embed_tokens.weight"]
        ffn = shapes["layers.0.feed_forward.w1.weight"][0]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the drafter {path} lacks {error}; fetch it again") from None
    layers = 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("layers."))
    if layers != 1:
        raise CheckpointError(
            f"the drafter {path} has {layers} layers; only drafters of one layer are supported"
        )
    heads = said.get("num_attention_heads", said.get("n_head"))
    kind = said.get("input_type")
    if heads is None or (kind not in INPUT_TYPES and "block_size" not in said):
        raise CheckpointError(
            f"the drafter {path} has no config.json with num_attention_heads and input_type (one of "
            f"{', '.join(INPUT_TYPES)}); take it from where the drafter is from"
        )
    sizes = {"hidden_size": dim, "vocab_size": vocab, "intermediate_size": ffn}
    check_said(f"the drafter {path}", said, sizes)
    # The published code takes grid and prefix from the kind, whatever else its file says.
    grid = INPUT_TYPES.get(str(kind)) or side_of(said, path)
    prefix: Any = 0 if kind == "c2i" else 119
    if kind not in INPUT_TYPES and "cls_token_num" in said:
        prefix = said["cls_token_num"]
    with explained(
        lambda why: (
            f"the config.json of the drafter {path} is wrong ({why}); take it from where the "
            "drafter is from"
        )
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


def fitting_drafter(config: LlamaGenConfig) -> DrafterConfig:
    """Return the sizes of an EAGLE drafter for a GPT: one block as wide as the GPT's."""
    return DrafterConfig(
        dim=config.dim,
        n_head=config.n_head,
        ffn_dim=config.hidden_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=config.prefix_length - 1,
    )


def published_drafter(config: LlamaGenConfig) -> DrafterConfig:
    """Return the sizes of LANTERN's published drafter for a GPT, which was trained seeing pads."""
    return fitting_drafter(config).model_copy(update={"mask_padding": False})


def find_drafter(around: Surroundings) -> DrafterConfig | None:
    """Find LANTERN's drafter of a GPT: named, beside it, or in ``trained_drafters``.

    Raises :class:`CheckpointError` with all sizes where what is there is of another model.
    """
    config, name, parts = around.config, around.name, around.parts
    if parts.no_drafter:
        return None
    if parts.drafter is not None:
        candidates = [named_drafter(parts.drafter)]
    else:
        roots = [*around.folders, *(f / "trained_drafters" for f in around.folders)]
        seen = search(roots, classify)
        broken = [one for one in seen if one.error is not None and "drafter" in one.path.name]
        if broken:
            broken[0].opened()
        candidates = [one for one in seen if one.kind == "drafter"]
    if not candidates:
        around.missing["drafter"] = (
            "a drafter: without one 'auto' and the strategies that need none work; put LANTERN's in "
            "trained_drafters/ beside it, name one with --drafter, or train one with `lantern-accel "
            "train drafter`"
        )
        return None
    fitting = [one for one in candidates if _fits(_config(one), config)]
    if fitting:
        around.files["drafter"] = fitting[0].path
        return _config(fitting[0])
    raise not_of(candidates[0], config, name)


def named_drafter(path: Path) -> Candidate:
    """Open a drafter that a user named: LANTERN's folder, or what training left."""
    one = examine(drafter_weights(path), classify)
    if one.opened() and one.kind != "drafter":
        raise CheckpointError(
            f"{path} is not a LANTERN drafter for LlamaGen ({_what(one)}); name another with --drafter"
        )
    return one


def _config(one: Candidate) -> DrafterConfig:
    return drafter_config(one.path, one.opened())


def _fits(drafter: DrafterConfig, config: LlamaGenConfig) -> bool:
    return (drafter.dim, drafter.vocab_size, drafter.grid, drafter.prefix_length) == (
        config.dim,
        config.vocab_size,
        config.grid,
        config.prefix_length - 1,
    )


def not_of(one: Candidate, config: LlamaGenConfig, name: str) -> CheckpointError:
    """Return the error for a drafter of another model, with all sizes."""
    d = _config(one)
    return CheckpointError(
        f"the drafter {one.path} is of another model: width {d.dim}, {d.vocab_size} codes, {d.grid} x "
        f"{d.grid} tokens, prefix {d.prefix_length}, but {name} needs width {config.dim}, "
        f"{config.vocab_size} codes, {config.grid} x {config.grid} tokens, prefix "
        f"{config.prefix_length - 1}; name another with --drafter, or decode without one: --drafter none"
    )


def join_drafter(config: LlamaGenConfig, name: str, path: Path) -> tuple[DrafterConfig, Path]:
    """Return the sizes and the weights of a drafter that a user named for a GPT."""
    one = named_drafter(path)
    if not _fits(_config(one), config):
        raise not_of(one, config, name)
    return _config(one), one.path


# --- text encoder -----------------------------------------------------------------------------------


def find_text(around: Surroundings) -> None:
    """Find flan-t5 by its ``config.json``: named, or in a folder near the GPT."""
    config, parts = around.config, around.parts
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
        around.files["t5"] = parts.text
        return
    fitting = [
        folder
        for folder in folders_named(around.folders, 2, is_t5)
        if read_json(folder / "config.json").get("d_model") == config.caption_dim
    ]
    if fitting:
        around.files["t5"] = fitting[0]
    elif parts.embeddings is None:
        around.missing["text"] = (
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
