"""What a device is best used with: one record that decoding reads, and no code."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Preferences:
    """How a device is used best, for whatever asks before it decides."""

    default_batch: int = 8
    """Images decoded together unless a request says otherwise."""

    free_rows: int | None = 64
    """Rows that a pass is expected to have at about the cost of one; with guidance every token has two.
    Windows of a batch whose length nobody chose have about that many. None: what rows cost is measured on
    the model where it is first needed, and default trees follow it too; for devices that compile no
    shapes."""

    reads_fewer_bits: bool = False
    """Whether a matmul with quantized weights takes less time than with full ones: then a quantized copy
    of the target may be a fast drafter."""

    code_bits: int = 0
    """Bits that a code of a quantized weight takes at least, as the device keeps it."""

    compiles: bool = False
    """Whether a step of other shapes takes a compiler a minute or so. Then ``auto`` moves between plain
    decoding and one length, and a cache has no bucket that saves little of a step."""

    runtime_bytes: int = 600 * 10**6
    """Memory that decoding adds to that of tensors: a driver's libraries, or a host's (assumed here)."""

    operators: torch.dtype | None = None
    """What torch's own operators compute best in where nothing was asked for, such as text encoders and
    training; None: as models do."""

    skips_hidden: bool = False
    """Whether attention reads visible slots alone: then nothing is gained by steps of fewer slots."""

    skips_finished_rows: bool = False
    """Whether ``trunk`` leaves out rows that see nothing, as complete images of a batch then do."""

    sums_in_place: bool = False
    """Whether ``linear_add`` writes over its residual: a state that is kept is then copied."""

    noise_bytes: int = 0
    """Bytes that an engine may hold of noise, made once per image where all of it fits in them.
    A step then looks up a row for each token in place of computing it: a device on which what is
    launched costs more than what is read sets it. The bits are those of ``noise`` either way."""
