"""Tiny Janus folders in both published layouts, and their tokenizer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from support.golden import ROOT, golden

#: deepseek-ai's names and transformers', as its conversion script has them.
HF_NAMES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^gen_embed\.", "model.generation_embeddings."),
    (r"^gen_aligner\.layers\.0\.", "model.generation_aligner.fc1."),
    (r"^gen_aligner\.layers\.2\.", "model.generation_aligner.hidden_layers.0."),
    (r"^gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"^gen_head\.vision_head\.", "model.generation_head.vision_head."),
    (r"^gen_vision_model\.", "model.vqmodel."),
    (r"(encoder)\.conv_blocks\.(\d+)\.", r"\1.down.\2."),
    (r"(decoder)\.conv_blocks\.(\d+)\.", r"\1.up.\2."),
    (r"\.res\.", ".block."),
    (r"\.mid\.0\.", ".mid.block_1."),
    (r"\.mid\.1\.", ".mid.attn_1."),
    (r"\.mid\.2\.", ".mid.block_2."),
)
SPECIAL = {
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>": 118,
    "<\uff5cend\u2581of\u2581sentence\uff5c>": 119,
    "<\uff5c\u2581pad\u2581\uff5c>": 120,
    "<begin_of_image>": 121,
    "<end_of_image>": 122,
    "<image_placeholder>": 123,
    "<|User|>": 124,
    "<|Assistant|>": 125,
}


def hf_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename deepseek-ai's layout to transformers', without the half that reads pictures."""
    out = {}
    for key, value in weights.items():
        if key.endswith("codebook_used") or key.startswith(("vision_model.", "aligner.")):
            continue
        for pattern, name in HF_NAMES:
            key = re.sub(pattern, name, key)
        out[key] = value
    return out


def weights_of(layout: str) -> dict[str, Tensor]:
    """Return the recorded model's tensors under one layout's names."""
    given = golden("janus/state_dict")
    return dict(given) if layout == "original" else hf_layout(given)


def write_tokenizer(folder: Path, drop: str = "") -> None:
    """Write a tokenizer of single characters with Janus's special tokens, one of them left out."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    special = {text: i for text, i in SPECIAL.items() if text != drop}
    letters = " abcdefghijklmnopqrstuvwxyz:\n.,"
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab |= {f"unused{i}": i for i in range(len(vocab), 118)}
    tokenizer = Tokenizer(BPE({**vocab, **special}, []))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_janus(folder: Path, layout: str = "original") -> Path:
    """Write the recorded model as it would be published."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(layout), folder / "model.safetensors")
    name = "config" if layout == "original" else "hf_config"
    shutil.copy(ROOT / "janus" / f"{name}.json", folder / "config.json")
    write_tokenizer(folder)
    return folder
