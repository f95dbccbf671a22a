"""Names of tensors: rules from the keys of released files to ours, and what their shapes say.

Our names are LlamaGen's, with q, k and v stacked into ``wqkv``, the norms of queries and keys into
``qk_norm``, and ``w1`` and ``w3`` into ``w13``. A family has a table of rules; that of a Llama in
transformers is :data:`LLAMA`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.layouts import check_sizes
from lantern_accel.checkpoints.loading import Recipe, fill
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.nn.rotary import to_adjacent_pairs

#: A pattern in a key, and what takes its place; a table's rules are applied one after the other.
Rule = tuple[str, str | Callable[[re.Match[str]], str]]
#: A pattern in our name of a part, and what becomes of the tensors under such names.
Change = tuple[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class SomeRows:
    """The change of a matrix of which some rows are kept."""

    rows: Tensor

    def __call__(self, matrix: Tensor) -> Tensor:
        return matrix[self.rows.to(matrix.device)]


LLAMA: tuple[Rule, ...] = (
    (r"^model\.", ""),
    (r"^lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.([qk])_norm\.", r".attention.\1_norm."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)
#: What we keep stacked, and the parts that files may have in its place.
STACKED = {
    ".attention.wqkv.": (".attention.wq.", ".attention.wk.", ".attention.wv."),
    ".attention.qk_norm.": (".attention.q_norm.", ".attention.k_norm."),
    ".feed_forward.w13.": (".feed_forward.w1.", ".feed_forward.w3."),
}


def rename_keys(keys: Iterable[str], rules: Iterable[Rule]) -> dict[str, str]:
    """Return our name of every tensor, with its key; a second key of one name keeps its own."""
    rules, named = tuple(rules), dict[str, str]()
    for key in keys:
        name = key
        for pattern, ours in rules:
            name = re.sub(pattern, ours, name)
        named[key if name in named else name] = key
    return named


@dataclass(frozen=True)
class Signature:
    """How files of one layout are recognised, by our names of their tensors or by their own keys.

    ``keys``: what all such files have, each with its number of axes (0: any); one that ends in a dot is
    how some key begins. ``without``: what none has. ``refused``: why they generate no images.
    """

    layout: str
    keys: Mapping[str, int]
    without: tuple[str, ...] = ()
    refused: str = ""

    def fits(self, checkpoint: Checkpoint, named: Mapping[str, str]) -> bool:
        """Return whether a checkpoint is of this layout; ``named``: its keys by the names used here."""
        return not any(name in named for name in self.without) and all(
            any(one.startswith(name) for one in named)
            if name.endswith(".")
            else name in named and axes in (0, len(checkpoint.shape(named[name])))
            for name, axes in self.keys.items()
        )


def layout_of(
    checkpoint: Checkpoint, table: Iterable[Signature], rules: Iterable[Rule] = ()
) -> str | None:
    """Return the layout of a table that a checkpoint is of, by its keys as ``rules`` rename them.

    None: of none. Raises :class:`CheckpointError` for keys of several, and for files that generate no
    images.
    """
    named = rename_keys(checkpoint, rules)
    fitting = [one for one in table if one.fits(checkpoint, named)]
    for one in fitting:
        if one.refused:
            raise CheckpointError(f"{checkpoint.path} {one.refused}")
    found = list(dict.fromkeys(one.layout for one in fitting))
    if len(found) > 1:
        raise CheckpointError(
            f"{checkpoint.path} has keys of two layouts ({' and '.join(found)}); use the files of one "
            "release"
        )
    return found[0] if found else None


def open_model(
    path: Path, table: Iterable[Signature], *, ours: bool, whose: str
) -> tuple[Checkpoint, str] | None:
    """Open what may be a family's model, and say which layout of its table it has; None: another's.

    ``ours``: other signs say that it is ``whose``. Raises :class:`CheckpointError` for such files that
    cannot be opened or are of no layout, and those of :func:`layout_of`.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        if ours:
            raise
        return None
    layout = layout_of(checkpoint, table)
    if layout is None and ours:
        raise CheckpointError(
            f"{path} is {whose}'s by its folder, but its keys are of no layout that is known: a part is "
            "absent, or it is another kind of model; fetch it again"
        )
    return None if layout is None else (checkpoint, layout)


def recipes_of(named: Mapping[str, str], changes: Sequence[Change] = ()) -> dict[str, Recipe]:
    """Say where every parameter lies, by our names of tensors with their keys (:func:`rename_keys`).

    Parts whose siblings are absent stay as they are, so that they are reported as unknown.
    """
    parts = {name: [name] for name in named}
    for whole, pieces in STACKED.items():
        for name in [name for name in named if pieces[0] in name]:
            names = [name.replace(pieces[0], piece) for piece in pieces]
            if all(one in parts for one in names):
                for one in names:
                    del parts[one]
                parts[name.replace(pieces[0], whole)] = names

    def recipe(names: Sequence[str]) -> Recipe:
        keys = tuple(named[name] for name in names)
        change = {
            named[n]: made for n in names for pattern, made in changes if re.search(pattern, n)
        }
        if not change:
            return Recipe(keys)
        some = next(iter(change.values())) if len(keys) == 1 else None
        kept = some.rows if isinstance(some, SomeRows) else None
        return Recipe(keys, lambda key, rows: change[key](rows) if key in change else rows, kept)

    return {name: recipe(names) for name, names in parts.items()}


def load_float(module: nn.Module, path: Path) -> None:
    """Fill a module from a checkpoint file in float32, on the host and ready to be trained."""
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    recipes = recipes_of(rename_keys(checkpoint, ()))
    fill(module, checkpoint, recipes, dtype=torch.float32, device=cpu, what=path.name)
    module.requires_grad_()


def to_adjacent(head_dim: int, rotated: int = 0) -> Change:
    """Return the change of a file whose heads turn in pairs ``(i, i + r/2)``: queries and keys move.

    ``rotated``: how many numbers of a head turn (0: all).
    """
    return r"\.attention\.w[qk]\.", lambda rows: to_adjacent_pairs(rows, head_dim, rotated)


def layer_count(names: Iterable[str], of: str = "layers") -> int:
    """Return how many layers there are, by our names; 0 where there is none."""
    found = (re.match(rf"{of}\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def matrix_shape(checkpoint: Checkpoint, named: Mapping[str, str], name: str) -> tuple[int, int]:
    """Return a matrix's shape by our name; raises :class:`CheckpointError` where there is none."""
    shape = checkpoint.shape(named.get(name, name))
    if len(shape) != 2:
        raise CheckpointError(
            f"{checkpoint.path} has {name} of shape {list(shape)}, which is not a matrix: it is damaged; "
            "fetch it again"
        )
    return shape[0], shape[1]


def trunk_sizes(checkpoint: Checkpoint, named: Mapping[str, str], head_dim: int) -> dict[str, int]:
    """Return the sizes of a trunk whose heads are ``head_dim`` wide, read off shapes.

    Raises :class:`CheckpointError` where a tensor is absent.
    """
    token_count, dim = matrix_shape(checkpoint, named, "tok_embeddings.weight")
    if "layers.0.attention.wqkv.weight" in named:
        rows = dim
        kv_rows = (matrix_shape(checkpoint, named, "layers.0.attention.wqkv.weight")[0] - rows) // 2
    else:
        rows, kv_rows = (
            matrix_shape(checkpoint, named, f"layers.0.attention.w{part}.weight")[0]
            for part in "qk"
        )
    return {
        "dim": dim,
        "n_layer": layer_count(named),
        "n_head": rows // head_dim,
        "n_kv_head": 0 if kv_rows == rows else kv_rows // head_dim,
        "ffn_dim": matrix_shape(checkpoint, named, "layers.0.feed_forward.w2.weight")[1],
        "token_count": token_count,
    }


def check_usual(path: Path, said: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` for a rotation or an activation that no published model has."""
    rope = said.get("rope_parameters") or {}
    for name, value, usual in (
        ("rope_scaling", said.get("rope_scaling") or None, None),
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("hidden_act", said.get("hidden_act", "silu"), "silu"),
    ):
        if value != usual:
            raise CheckpointError(
                f"the configuration of {path} asks for {name} {value!r}, which no published model has "
                "and which is not supported; use a published model"
            )


def llama_sizes(
    checkpoint: Checkpoint, named: Mapping[str, str], said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sizes of a Llama's trunk: shapes first, the configuration for what they cannot say.

    ``said``: transformers' names, with what the file leaves out filled in. Raises
    :class:`CheckpointError` where a tensor is absent, the configuration is of another model, or asks
    for what is not supported.
    """
    path, rope = checkpoint.path, said.get("rope_parameters") or {}
    check_usual(path, said)
    rows, kv_rows = (
        matrix_shape(checkpoint, named, f"layers.0.attention.w{part}.weight")[0] for part in "qk"
    )
    heads = said["num_attention_heads"]
    width = said.get("head_dim") or rows // heads
    if rows != heads * width or kv_rows % width:
        raise CheckpointError(
            f"{path} has {rows} rows of queries and {kv_rows} of keys, which are not {heads} heads of "
            "one width; its configuration is of another model"
        )
    sizes = trunk_sizes(checkpoint, named, width)
    same = {"dim": sizes["dim"], "n_layer": sizes["n_layer"], "vocab_size": sizes["token_count"]}
    check_sizes(path, said, same)
    return {
        **sizes,
        "head_width": 0 if rows == sizes["dim"] else width,
        "norm_eps": said["rms_norm_eps"],
        "rope_base": rope.get("rope_theta", said.get("rope_theta", 10000.0)),
        "bias": "layers.0.attention.wq.bias" in named,
        "max_positions": said["max_position_embeddings"],
    }
