"""Recognises weights that are not a plain model: quantized ones and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from lantern_accel.checkpoints.layouts import checkpoints_in, folder_json
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint, quantized_error
from lantern_accel.errors import CheckpointError, ModelError

#: The dtypes of plain weights.
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: The dtypes of positions and masks.
OTHER = (torch.int64, torch.bool)
#: How the keys of quantized matrices end; their dtypes are not among :data:`PLAIN`.
_MATRIX = re.compile(r"(?:^|[._])(?:q?weight|weight_packed|W_q|qdata|_data|blocks|codes|B)$")
_LORA = re.compile(r"(.*)[._](?:lora_(?:embedding_)?|lora[._])(A|B|down|up)(?:\..*)?$")
#: What else no key of a model has: PEFT's names of adapters.
_PEFT = re.compile(r"^base_model\.model\.|\.(?:hada_w|lokr_w|ia3_l|vera_lambda|oft_)")


def kind_of(
    checkpoint: Checkpoint, said: Mapping[str, object] | None = None
) -> CheckpointError | None:
    """Return the error for quantized weights or an adapter; None for a plain checkpoint.

    A key that only ends like one of theirs does not count. ``said``: the configuration, which else is
    looked for in its folder.
    """
    path, keys = checkpoint.path, list(checkpoint)
    if said is None:
        said = folder_json(path) if path.is_dir() else {}
    halves = {match.groups() for match in map(_LORA.match, keys) if match}
    stems = {stem for stem, half in halves if half in ("A", "down")}
    if stems & {stem for stem, half in halves if half in ("B", "up")}:
        return adapter(path, "LoRA")
    if theirs := next(filter(_PEFT.search, keys), ""):
        return adapter(path, f"by its key {theirs}")
    codes = [key for key in keys if checkpoint.dtype(key) not in (*PLAIN, *OTHER)]
    odd = [k for k in codes if _MATRIX.search(k) or checkpoint.dtype(k).is_floating_point]
    config = said.get("quantization_config")
    method = str(config.get("quant_method", "quantized")) if isinstance(config, Mapping) else ""
    if not odd and not method:
        return None
    dtypes = sorted({str(checkpoint.dtype(key)).removeprefix("torch.") for key in odd})
    return quantized_error(path, " and ".join(filter(None, (method, *dtypes))))


def adapter(path: Path, kind: str) -> CheckpointError:
    """Return the error for an adapter, or weights that hold one."""
    return CheckpointError(
        f"{path} holds an adapter ({kind}), not a model alone; merge it into its base model (PEFT: "
        "merge_and_unload) and name the folder of the merged weights"
    )


@contextmanager
def named_kinds(places: Iterable[Path]) -> Iterator[None]:
    """Where the block refuses a checkpoint in these places that is quantized or an adapter, say that."""
    try:
        yield
    except (CheckpointError, ModelError) as error:
        for path in places:
            for one in checkpoints_in(path) if path.is_dir() else [path] if path.is_file() else []:
                try:
                    found = kind_of(open_checkpoint(one))
                except CheckpointError:
                    continue
                if found is not None and "name one" not in str(error):  # of several plain ones
                    raise found from None
        raise
