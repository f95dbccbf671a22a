"""The files of Anole and Lumina-mGPT: which keys hold what, what sizes they have, and where they lie.

Two layouts are published, and a third mixes them:

* *original* (Meta, GAIR's ``consolidated.pth``): ``layers.N.attention.wq``, norms ``[d]``, adjacent
  pairs;
* *Hugging Face* (transformers, Lumina-mGPT): ``model.layers.N.self_attn.q_proj``, norms ``[1, d]`` or
  ``[heads, d]``, pairs ``(i, i + d/2)``: rows of ``q_proj``, ``k_proj`` and of their norms are permuted;
* GAIR's fork of transformers: Hugging Face's keys, but norms ``[d]`` and nothing permuted.

So the pairing is read off the shape of a norm. Published drafters use Hugging Face's keys without
``model.`` before them. Sizes are read off shapes; a configuration gives what they cannot say: epsilon,
the rotation's base, the longest sequence, where the norms are. Anole and Lumina are one trunk, so that
configurations and names tell them apart.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.checkpoints.layouts import (
    check_said,
    drafter_weights,
    explained,
    find_file,
    folder_json,
    open_own,
    our_sizes,
)
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.chameleon.drafter import ChameleonDrafterConfig
from lantern_accel.families.chameleon.manifest import DEFAULTS, ChameleonManifest, Variant
from lantern_accel.families.chameleon.model import ChameleonConfig, TrunkConfig
from lantern_accel.families.chameleon.text import SpecialIds, ids_from_vocabulary
from lantern_accel.families.image_tokenizer import VQ_RULES, vq_sizes
from lantern_accel.families.keys import (
    LLAMA,
    Change,
    Rule,
    recipes_of,
    renamed,
    to_adjacent,
    trunk_sizes,
)
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import parts_of, released
from lantern_accel.families.tokenizer import read_vocabulary
from lantern_accel.nn.rotary import to_adjacent_pairs, to_half_split
from lantern_accel.nn.vq import VQConfig

Shape = Callable[[str], tuple[int, ...]]

RULES: tuple[Rule, ...] = ((r"\.([qk])_normalization\.", r".\1_norm."), *LLAMA)
#: The layouts by the key of their embedding.
LAYOUTS = {
    "tok_embeddings.weight": "original",
    "model.embed_tokens.weight": "Hugging Face",
    "embed_tokens.weight": "drafter",
}
#: The norm that tells Chameleon from LlamaGen, and by its shape which pairs turn.
MARK = "layers.0.attention.q_norm.weight"

#: What Hugging Face's files hold for another part: the picture tokenizer, or the target.
BESIDE = {
    "target": re.compile(r"^model\.vqmodel\."),
    "vq": re.compile(r"^(lm_head|model\.(embed_tokens|layers|norm))\."),
}


def key_layout(keys: Iterable[str]) -> str | None:
    """Return the layout that a file's keys follow; None for another architecture."""
    named = renamed(keys, RULES)
    return LAYOUTS.get(named.get("tok_embeddings.weight", "")) if MARK in named else None


def half_split(shape: tuple[int, ...]) -> bool:
    """Return whether a query norm of this shape belongs to rotations of pairs ``(i, i + d/2)``.

    ``[d]``: adjacent pairs (original, GAIR's fork); ``[1, d]`` and ``[heads, d]``: half-split.
    """
    return len(shape) == 2


def head_norm_rows(norm: Tensor, heads: int, split: bool) -> Tensor:
    """Return a norm's weight or bias, ``[heads, d]``, of ``[d]``, ``[parts, d]`` or ``[heads, d]``.

    ``parts`` is Chameleon's model parallelism: each part's norm serves its share of the heads.
    """
    rows = norm.reshape(-1, norm.shape[-1])
    rows = rows.repeat_interleave(heads // rows.shape[0], dim=0)
    if split:
        rows = to_adjacent_pairs(rows.reshape(-1), rows.shape[1]).reshape(rows.shape)
    return rows


def trunk_recipes(
    keys: Iterable[str], shape: Shape, config: TrunkConfig, *more: Change
) -> dict[str, Recipe]:
    """Say for every parameter where it lies in a checkpoint.

    ``shape`` gives a key's shape; ``more``: changes besides those of the trunk. Raises
    :class:`CheckpointError` for another architecture.
    """
    named = renamed(keys, RULES)
    if MARK not in named:
        raise CheckpointError(
            "the checkpoint has no norms of queries and keys under any name that Chameleon's layouts "
            "use; it is of another architecture"
        )
    d, mark = config.head_dim, named[MARK]
    split = half_split(shape(mark))
    changes = [*more, to_adjacent(d)] if split else [*more]
    for part, heads in (("q_norm", config.n_head), ("k_norm", config.kv_heads)):
        changes.append(
            (rf"\.{part}\.", functools.partial(head_norm_rows, heads=heads, split=split))
        )
        for key in (key for name, key in named.items() if f".{part}." in name):
            check_norm(key, shape(key), heads, d)
            if half_split(shape(key)) != split:
                raise CheckpointError(
                    f"{key} has shape {list(shape(key))}, but {mark} {list(shape(mark))}: their "
                    "rotations turn different pairs, so they are of two checkpoints; fetch both again"
                )
    return recipes_of(named, changes)


def check_norm(key: str, shape: tuple[int, ...], heads: int, head_dim: int) -> None:
    """Raise :class:`CheckpointError` for a norm that no layout has."""
    rows = 1 if len(shape) == 1 else shape[0]
    if len(shape) not in (1, 2) or shape[-1] != head_dim or not rows or heads % rows:
        raise CheckpointError(
            f"{key} has shape {list(shape)}, which cannot serve {heads} heads of width {head_dim}; the "
            "checkpoint is of another model, or damaged: fetch it again"
        )


def target_recipes(keys: Iterable[str], shape: Shape, config: ChameleonConfig) -> dict[str, Recipe]:
    """Say for every parameter of :class:`ChameleonGPT` where it lies in a checkpoint."""
    if config.text_head:
        return trunk_recipes(keys, shape, config)
    codes = torch.tensor(config.token_ids())
    return trunk_recipes(keys, shape, config, (r"^output\.", lambda rows: rows[codes]))


def drafter_recipes(keys: Iterable[str], shape: Shape, config: TrunkConfig) -> dict[str, Recipe]:
    """Say for every parameter of a published drafter for Chameleon where it lies."""
    recipes = trunk_recipes(keys, shape, config)
    return {name.replace("tok_embeddings.", "embed_tokens."): one for name, one in recipes.items()}


def published_drafter(weights: Mapping[str, Tensor], config: TrunkConfig) -> dict[str, Tensor]:
    """Return a drafter's parameters under the published keys: what :func:`drafter_recipes` reads.

    Rows of q, k and their norms ``[heads, d]`` are half-split.
    """
    d, heads, kv_heads = config.head_dim, config.n_head, config.kv_heads
    names = {
        "attention.wqkv.": {
            "self_attn.q_proj.": heads * d,
            "self_attn.k_proj.": kv_heads * d,
            "self_attn.v_proj.": kv_heads * d,
        },
        "attention.qk_norm.": {"self_attn.q_norm.": heads, "self_attn.k_norm.": kv_heads},
        "attention.wo.": {"self_attn.o_proj.": config.dim},
        "feed_forward.w13.": {"mlp.gate_proj.": config.ffn_dim, "mlp.up_proj.": config.ffn_dim},
        "feed_forward.w2.": {"mlp.down_proj.": config.dim},
        "attention_norm.": {"input_layernorm.": config.dim},
        "ffn_norm.": {"post_attention_layernorm.": config.dim},
    }
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        ours = next((one for one in names if f".{one}" in name), "")
        theirs = names.get(ours, {"": len(tensor)})
        for own, part in zip(theirs, torch.split(tensor, list(theirs.values())), strict=True):
            if own.startswith(("self_attn.q_", "self_attn.k_")):
                rows = part.flatten() if "norm" in own else part
                part = to_half_split(rows, d).reshape(part.shape)
            out[name.replace(ours, own)] = part
    return out


#: Where Hugging Face's files keep the picture tokenizer.
VQ_PREFIX = "model.vqmodel."
#: What a drafter has from its target.
SHARED = ("image_first", "image_codes", "newline_id", "height", "width", "prefix_length")


def said_of(weights: Path) -> dict[str, Any]:
    """Return ``config.json`` or ``params.json`` beside weights, flat; {} without one."""
    folder = weights if weights.is_dir() else weights.parent
    found: dict[str, Any] = {}
    for name in ("config.json", "params.json", "consolidate_params.json"):
        content = folder_json(folder, name)
        inner = content.get("model")
        found.update({**content, **(inner if isinstance(inner, dict) else {})})
    return found


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration says that shapes do not."""
    found, names = our_sizes(config), ("norm_eps", "rope_base", "swin_norm", "max_positions")
    return {name: found[name] for name in names if name in found}


def _trunk_sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sizes of the blocks, read off shapes."""
    named = renamed(checkpoint, RULES)
    return trunk_sizes(checkpoint, named, checkpoint.shape(named[MARK])[-1])


def target_config(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    ids: SpecialIds,
    newline: bool,
    side: int,
) -> ChameleonConfig:
    """Return a target's configuration.

    ``newline``: rows end in a token of their own; ``side``: codes along the default picture's side.
    Raises :class:`CheckpointError` where the configuration is of other weights.
    """
    sizes = _trunk_sizes(checkpoint)
    check_said(checkpoint.path, config, {n: sizes[n] for n in ("dim", "n_layer", "n_head")})
    return ChameleonConfig(
        **sizes,
        **_said(config),
        image_first=ids.image_first,
        image_codes=ids.image_codes,
        newline_id=ids.newline if newline else None,
        height=side,
        width=side,
    )


def drafter_config(
    checkpoint: Checkpoint, path: Path, target: ChameleonConfig
) -> ChameleonDrafterConfig:
    """Return a published drafter's configuration; raises where it is of another target."""
    if key_layout(checkpoint) != "drafter":
        raise CheckpointError(
            f"{path} is not a drafter for Anole or Lumina: it lacks their norms of queries and keys; "
            "name another with --drafter, or decode without one: --drafter none"
        )
    sizes = _trunk_sizes(checkpoint)
    if (sizes["dim"], sizes["token_count"]) != (target.dim, target.token_count):
        raise CheckpointError(
            f"the drafter {path} has width {sizes['dim']} and {sizes['token_count']} tokens, the model "
            f"{target.dim} and {target.token_count}, so it was trained for another model; name another "
            "with --drafter, or decode without one: --drafter none"
        )
    if sizes["n_layer"] != 1:
        raise CheckpointError(
            f"the drafter {path} has {sizes['n_layer']} layers, only drafters of one layer are "
            "supported; name another with --drafter"
        )
    said = _said(said_of(path))
    said.pop("max_positions", None)
    with explained(
        f"the config.json of the drafter {path}", "take it from where the drafter is from"
    ):
        return ChameleonDrafterConfig(
            **sizes,
            **said,
            **{name: getattr(target, name) for name in SHARED},
            bias="fc.bias" in checkpoint,
        )


def fitting_drafter(target: ChameleonConfig) -> ChameleonDrafterConfig:
    """Return the sizes of a drafter to train for a target: one block as the target's are."""
    shape = ("dim", "n_head", "n_kv_head", "ffn_dim", "token_count", "norm_eps", "rope_base")
    names = (*shape, "swin_norm", *SHARED)
    return ChameleonDrafterConfig(**{name: getattr(target, name) for name in names})


def drafter_said(config: ChameleonDrafterConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a drafter, as published drafters have it."""
    return {
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.token_count,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "swin_norm": config.swin_norm,
        "bias": config.bias,
    }


def chameleon_vq_config(**changes: object) -> VQConfig:
    """Return the sizes of Meta's ``vqgan.ckpt`` (8192 codes of width 256), with changes."""
    sizes: dict[str, object] = {"codebook_size": 8192, "codebook_dim": 256, "l2_norm": False}
    return VQConfig.model_validate({**sizes, **changes})


def picture_names(keys: Iterable[str]) -> dict[str, str]:
    """Return our name of every tensor of the VQGAN, with its key; alone in a file or beside a target."""
    there = list(keys)
    within = [key for key in there if key.startswith(VQ_PREFIX)]
    up = r"\bdecoder\.up\.(\d+)\."
    last = max((int(match[1]) for key in there if (match := re.search(up, key))), default=0)
    highest_first: Rule = (up, lambda match: f"decoder.conv_blocks.{last - int(match[1])}.")
    return renamed(within or there, ((rf"^{VQ_PREFIX}", ""), *VQ_RULES, highest_first))


def vq_config(checkpoint: Checkpoint) -> VQConfig:
    """Return the sizes of Chameleon's VQGAN, read off shapes."""
    names = picture_names(checkpoint)
    return vq_sizes(checkpoint, names, "Chameleon's VQGAN", attend=False, l2_norm=False)


_WHERE_VQ = "tokenizer/vqgan.ckpt of Chameleon's release"
_WHERE_TEXT = "tokenizer/text_tokenizer.json of Chameleon's release"
#: Sizes by which a published model is known.
_RELEASED = ("dim", "n_layer", "n_head", "ffn_dim", "token_count", "image_codes", "height")
VARIANTS: tuple[Variant, ...] = ("lumina", "anole")


def detect(path: Path, parts: Parts) -> Found | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for a Chameleon model that lacks a shard or has foreign sizes.
    """
    weights = _weights(path)
    if weights is None:
        return None
    config = said_of(weights)
    typed = config.get("model_type") == "chameleon"
    checkpoint = open_own(weights, typed or weights.name == "consolidated.pth")
    if checkpoint is None:
        return None
    layout = key_layout(checkpoint)
    if layout is None and typed:
        raise CheckpointError(
            f"{weights} is Chameleon's by its config.json, but lacks the embedding or the first layer's "
            "norm of queries: a part of it is absent; fetch it again"
        )
    if layout in (None, "drafter"):
        return None
    files = {"target": weights}
    notes: list[str] = []
    missing: dict[str, str] = {}
    text = _text_tokenizer(path, parts)
    ids = SpecialIds()
    if text is None:
        missing["text"] = f"a text tokenizer: put {_WHERE_TEXT} into {path}"
    else:
        files["text_tokenizer"] = text
        ids = ids_from_vocabulary(read_vocabulary(text, _WHERE_TEXT))
    variant, why = _variant(path, config)
    notes.append(f"{variant.capitalize()}, {why}")
    vq_path = _picture_tokenizer(path, weights, checkpoint, parts)
    vq = chameleon_vq_config(codebook_size=ids.image_codes)
    if vq_path is None:
        missing["vq"] = f"a picture tokenizer: put {_WHERE_VQ} into {path}, or name it with --vq"
    else:
        files["vq"] = vq_path
        vq = vq_config(open_checkpoint(vq_path))
        if text is None:  # how many image tokens there are, only the vocabulary says
            ids = SpecialIds(image_codes=vq.codebook_size)
        if vq.codebook_size != ids.image_codes:
            raise CheckpointError(
                f"{vq_path} is of another codebook: it has {vq.codebook_size} codes, the vocabulary of "
                f"{path} {ids.image_codes}; name the right tokenizer with --vq"
            )
    mark = checkpoint.shape(renamed(checkpoint, RULES)[MARK])
    pairing = "half-split" if half_split(mark) else "adjacent"
    notes.append(f"{layout} keys, {pairing} rotary pairs")
    drafter = _drafter(path, parts, variant)
    if drafter is not None:
        files["drafter"] = drafter
    elif not parts.no_drafter:
        missing["drafter"] = _where_drafter(path, variant)
    with explained(f"the parts of {path} are not of one model", "take them from one release"):
        target = target_config(
            checkpoint, config, ids, variant == "lumina", _side(path, config, variant)
        )
        manifest = ChameleonManifest(
            name=_release(path).name,
            variant=variant,
            side=target.height,
            ids=ids,
            target=target,
            drafter=drafter and drafter_config(open_checkpoint(drafter), drafter, target),
            vq=vq,
            defaults=DEFAULTS[variant].within(target.image_codes),
        )
    # Both layouts of Anole are one model.
    manifest = manifest.named(released(manifest, published_manifest, _RELEASED, variant=variant))
    return Found(manifest, files, parts, notes, missing)


def manifest_of_module(weights: Checkpoint, config: dict[str, Any]) -> ChameleonManifest:
    """Return the manifest of a model that transformers has loaded, whose configuration has the ids.

    Rows have no end of their own here: a picture is Anole's, square. Raises :class:`CheckpointError`.
    """
    if key_layout(weights) is None or not config.get("vocabulary_map"):
        raise CheckpointError(
            f"{weights.path} has no vocabulary_map in its configuration, or no norms of queries and "
            "keys, so it is not a Chameleon that draws; load Anole as transformers' "
            "ChameleonForConditionalGeneration"
        )
    ids = ids_from_vocabulary(config["vocabulary_map"])
    target = target_config(weights, config, ids, False, _side(Path(), config, "anole"))
    return ChameleonManifest(
        name="anole",
        variant="anole",
        side=target.height,
        ids=ids,
        target=target,
        vq=chameleon_vq_config(codebook_size=ids.image_codes),
        defaults=DEFAULTS["anole"].within(target.image_codes),
    )


def published_manifest(entry: ModelEntry) -> ChameleonManifest:
    """Return the manifest of a published model, drafter included where one is published."""
    variant: Variant = entry.config["variant"]
    side = entry.config["pixels"] // 16
    target = ChameleonConfig(
        newline_id=SpecialIds().newline if variant == "lumina" else None, height=side, width=side
    )
    shared = {name: getattr(target, name) for name in SHARED}
    return ChameleonManifest(
        **entry.labels,
        variant=variant,
        side=side,
        target=target,
        drafter=ChameleonDrafterConfig(**shared) if "drafter" in parts_of(entry) else None,
        vq=chameleon_vq_config(),
        defaults=DEFAULTS[variant],
    )


# --- files --------------------------------------------------------------------------------------------


def _weights(path: Path) -> Path | None:
    """Return the file or folder that holds the target's weights, where there may be one."""
    found = find_file((path / "models" / "7b", path), "consolidated.pth")
    return path if found is None and path.is_dir() and has_weights(path) else found


def _release(path: Path) -> Path:
    """Return the folder of a release: two above Anole's ``models/7b``, where its tokenizer lies."""
    home = path.absolute() if path.is_dir() else path.absolute().parent
    return home.parent.parent if home.name == "7b" else home


def _homes(path: Path) -> list[Path]:
    """Return where a model's other parts may lie: its folder, those above, and the releases' own."""
    home = path if path.is_dir() else path.parent
    roots = [home, home.parent]
    if home.name == "7b":
        roots.append(_release(path))
    below = ("tokenizer", "chameleon/tokenizer")
    return [home, *(root / folder for root in roots for folder in below)]


def _in(given: Path | None) -> list[Path]:
    """Return where a tokenizer may lie at a path that a user gave: itself, or within the folder."""
    return [] if given is None else [given, given / "tokenizer"]


def _text_tokenizer(path: Path, parts: Parts) -> Path | None:
    homes = _homes(path)
    # The picture tokenizer's folder has the text tokenizer beside it.
    near = [] if parts.vq is None or parts.vq.is_file() else _in(parts.vq)
    named = find_file([*_in(parts.text), *homes, *near], "text_tokenizer.json")
    return named or find_file(homes, "tokenizer.json")


# --- which model --------------------------------------------------------------------------------------


def _names(path: Path, config: dict[str, Any]) -> list[str]:
    """Return what a model is called, the nearest name first.

    In the Hub's cache a folder is called by a hash, and two above it by the repository.
    """
    names = [str(config.get("_name_or_path", "")), *path.parts[:-6:-1]]
    return [name.lower() for name in names if not re.fullmatch(r"[0-9a-f]{40}", name)]


def _variant(path: Path, config: dict[str, Any]) -> tuple[Variant, str]:
    """Return which of the two a folder holds, and by what.

    Shapes cannot tell: both are the same trunk. Lumina's configurations alone say whether image logits
    are hidden, and its training had dropout.
    """
    if "mask_image_logits" in config or config.get("dropout"):
        return "lumina", "by its config.json (mask_image_logits, dropout)"
    for name in _names(path.absolute(), config):
        for variant in VARIANTS:
            if variant in name:
                return variant, "by its name"
    return "anole", "as nothing says that it is Lumina"


def _side(path: Path, config: dict[str, Any], variant: Variant) -> int:
    """Return the codes along the side of the pictures that a model was trained for.

    Anole: 32. Lumina: its name says how many pixels, 16 a code; 768 where it does not.
    """
    said = config.get("vq_config") or {}
    levels = len(said.get("ch_mult", said.get("channel_multiplier", ())))
    if variant == "anole":
        return int(said["resolution"]) >> (levels - 1) if "resolution" in said and levels else 32
    for name in _names(path.absolute(), config):
        found = re.search(r"(?<!\d)(512|768|1024)(?!\d)", name)
        if found:
            return int(found[1]) // 16
    return 64 if int(config.get("max_position_embeddings", 0)) > 4096 else 48


def _drafter(path: Path, parts: Parts, variant: Variant) -> Path | None:
    if parts.no_drafter:
        return None
    if parts.drafter is not None:
        return drafter_weights(parts.drafter)
    home = _release(path)
    beside = sorted((home.parent / "trained_drafters").glob(f"{variant}*drafter*"))
    for folder in (home / "drafter", *beside):
        own = drafter_weights(folder)
        if own.is_file() or (folder.is_dir() and has_weights(folder)):
            return own
    return None


def _where_drafter(path: Path, variant: Variant) -> str:
    if variant == "lumina":
        return (
            "a drafter: none is published for Lumina, train one with `lantern-accel train drafter`"
        )
    home = _release(path) / "drafter"
    return f"a drafter: put jadohu/anole_drafter into {home}, or name it with --drafter"


def _picture_tokenizer(path: Path, weights: Path, target: Checkpoint, parts: Parts) -> Path | None:
    """Return the file of the picture tokenizer: given, beside the model, or within its shards."""
    found = find_file(_homes(path) if parts.vq is None else _in(parts.vq), "vqgan.ckpt")
    if found is None and parts.vq is not None:
        raise CheckpointError(f"{parts.vq} has no vqgan.ckpt; name {_WHERE_VQ}")
    if found is None and "model.vqmodel.decoder.conv_in.weight" in target:
        return weights
    return found
