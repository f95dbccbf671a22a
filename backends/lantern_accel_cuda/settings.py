"""Settings of torch that hold for a whole process, pinned while a GPU is open.

cuDNN's attention is switched off: on some cards torch prefers it, and it refuses masks and widths that
the other kernels take, or makes a plan for every shape. float32 means float32: convolutions of the image
decoder would be computed in TF32 otherwise, which torch allows cuDNN by default. Where the inputs of a
product are shared among programs, the parts are added in float32: torch allows shorter sums by default.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Settings:
    """The settings: cuDNN's attention, and TF32 in cuDNN and in products of matrices.

    ``short_sums``: whether products in bfloat16 and float16 may add their parts in these dtypes.

    ``precisions`` is there where they were set by the names that torch 2.9 introduced (in convolutions,
    recurrent layers and products): torch then refuses to read them by the older names.
    """

    attention: bool = False
    cudnn: bool = False
    products: bool = False
    short_sums: tuple[bool, bool] = (False, False)
    precisions: tuple[str, str, str] | None = None


_depth: list[_Settings] = []


class Pinned:
    """Pins the settings from construction to :meth:`release`, which gives back what was there before."""

    def __init__(self) -> None:
        self._held = True
        _depth.append(_now())
        _set(_Settings())

    def release(self) -> None:
        """Give back the settings once no other GPU is open; calling it twice is harmless."""
        if not self._held:
            return
        self._held = False
        before = _depth[0]
        _depth.pop()
        if not _depth:
            _set(before)


def _now() -> _Settings:
    backends: Any = torch.backends
    attention = bool(backends.cuda.cudnn_sdp_enabled())
    matmul = backends.cuda.matmul
    short = (
        bool(matmul.allow_bf16_reduced_precision_reduction),
        bool(matmul.allow_fp16_reduced_precision_reduction),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some releases call the older names deprecated
            cudnn, products = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    except RuntimeError:
        found = [part.fp32_precision for part in _parts()]
        return _Settings(attention, short_sums=short, precisions=(found[0], found[1], found[2]))
    return _Settings(attention, bool(cudnn), bool(products), short)


def _set(values: _Settings) -> None:
    backends: Any = torch.backends
    backends.cuda.enable_cudnn_sdp(values.attention)
    matmul = backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = values.short_sums[0]
    matmul.allow_fp16_reduced_precision_reduction = values.short_sums[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backends.cudnn.allow_tf32 = values.cudnn
        backends.cuda.matmul.allow_tf32 = values.products
    if values.precisions is not None:
        for part, precision in zip(_parts(), values.precisions, strict=True):
            part.fp32_precision = precision


def _parts() -> list[Any]:
    backends: Any = torch.backends
    return [backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
