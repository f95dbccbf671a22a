"""flan-T5 as LlamaGen's source of caption features, loaded when a caption is new and freed after it.

Source: FoundationVision/LlamaGen ``language/t5.py`` and ``sample_t2i.py``: cleaned captions, 120 tokens,
``last_hidden_state``, valid features rotated to the right end. Needs the extra ``text``; transformers is
imported nowhere else.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lantern_accel.errors import CheckpointError, LanternWarning, RequestError
from lantern_accel.families.base import Adapt
from lantern_accel.families.llamagen.captions import clean_caption
from lantern_accel.families.llamagen.features import align_right
from lantern_accel.files import cache_dir, read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Bytes of every file that go into the encoder's hash.
SAMPLE_BYTES = 1 << 16


def encoder_parameters(config: dict[str, Any]) -> int:
    """Return the parameters of a T5's encoder from its ``config.json``."""
    width, inner = config["d_model"], config["d_kv"] * config["num_heads"]
    gated = 3 if "gated" in str(config.get("feed_forward_proj", "")) else 2
    layer = 4 * width * inner + gated * width * config["d_ff"] + 2 * width
    table = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    return int(config["num_layers"] * layer + config["vocab_size"] * width + width + table)


def encoder_hash(folder: Path) -> str:
    """Return a hash that tells encoders apart: names, sizes and first bytes of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


class T5Text:
    """Captions to features; keeps them on disk, and its encoder in memory only where asked to.

    ``device``: where the encoder runs. ``keep``: stay in memory whatever asks for it back; else it stays
    until :meth:`release`, which is called where it would take the decoder's memory.
    """

    def __init__(
        self,
        folder: Path,
        prefix: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        keep: bool = False,
        adapt: Adapt = None,
        cache: Path | None = None,
    ) -> None:
        self.adapt = adapt
        self.folder, self.prefix, self.device, self.keep = folder, prefix, device, keep
        # T5 overflows in float16.
        self.dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        self._cache = (cache or cache_dir()) / "captions"
        self._encoder: nn.Module | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._hash = ""

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return features float32 ``[n, prefix, C]`` and their mask bool ``[n, prefix]``, on the host.

        A caption alone gives the same features whatever is asked with it. One that is longer than the
        prefix is cut with a :class:`LanternWarning`, as T5 pipelines do.
        """
        rows = [self._caption(clean_caption(prompt)) for prompt in prompts]
        return align_right(rows, self.prefix)

    def release(self) -> None:
        """Free the encoder, unless it was to be kept."""
        if not self.keep and self._encoder is not None:
            self._encoder = None
            gc.collect()

    def _caption(self, text: str) -> Tensor:
        """Return the valid features of a cleaned caption, ``[valid, C]``, from disk or new."""
        self._hash = self._hash or encoder_hash(self.folder)
        key = json.dumps([text, self._hash, str(self.dtype), self.prefix])
        path = self._cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        entry = read_tensors(path, self._fits)
        if entry is None:
            entry = {"features": self._encode(text)}
            write_tensors(path, entry)
        return entry["features"].float()

    def _fits(self, found: Mapping[str, Tensor]) -> bool:
        rows = found["features"]
        right = rows.dim() == 2 and 0 < len(rows) <= self.prefix and rows.is_floating_point()
        return right and bool(rows.isfinite().all())

    @torch.no_grad()
    def _encode(self, text: str) -> Tensor:
        tokenizer, encoder = self._load()
        size = len(tokenizer(text)["input_ids"])
        if size > self.prefix:
            warnings.warn(
                f"the caption has {size} tokens, the model's prefix holds {self.prefix}: it was cut",
                LanternWarning,
                stacklevel=2,
            )
        tokens = tokenizer(
            text,
            max_length=self.prefix,
            padding="max_length",
            truncation=True,
            return_attention_mask=True,
            add_special_tokens=True,
            return_tensors="pt",
        )
        out = encoder(
            input_ids=tokens["input_ids"].to(self.device),
            attention_mask=tokens["attention_mask"].to(self.device),
        ).last_hidden_state
        valid = int(tokens["attention_mask"].sum())
        kept: Tensor = out[0, :valid].to("cpu").contiguous()
        return kept.clone()

    def _load(self) -> tuple[PreTrainedTokenizerBase, nn.Module]:
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise RequestError(
                "this model reads captions through transformers, which is not installed: pip install "
                "'lantern-accel[text]', or give the prompts' features with --use embeddings=PATH"
            ) from None
        name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
        try:
            if self._tokenizer is None:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True
                )
            if self._encoder is None:
                encoder = transformers.T5EncoderModel.from_pretrained(
                    self.folder, local_files_only=True, **{name: self.dtype}
                )
                encoder = encoder.to(self.device).eval()
                self._encoder = encoder if self.adapt is None else self.adapt(encoder)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"the text encoder {self.folder} cannot be loaded ({type(error).__name__}: {text}); "
                "fetch its files again"
            ) from error
        return self._tokenizer, self._encoder
