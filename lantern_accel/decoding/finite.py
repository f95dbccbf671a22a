"""Detects NaN and infinity on the device, within the step; the host reads it with the lengths.

One NaN in a row of logits makes its whole softmax NaN, so one column of a distribution tells; greedily
the largest logit does. The host reads it with the lengths, and once more when an image is complete.
"""

from __future__ import annotations

import torch
from torch import Tensor


def finite(rows: Tensor, greedy: bool) -> Tensor:
    """Return whether an image's rows are finite, bool ``[B]``.

    ``rows`` float32 ``[B, T, V]``: distributions, or the logits where decoding is ``greedy``. A logit of
    -inf is a code that may not be; a row of nothing else is not finite.
    """
    column = rows.amax(dim=-1) if greedy else rows[..., 0]
    total = column.sum(dim=-1)
    # Infinite less infinite is no number. No Python float: some compilers compare those in double.
    nothing = total - total
    return nothing == nothing


class FiniteGuard:
    """Counts the passes before the first one whose numbers are not finite, image by image.

    ``count`` integer ``[B]`` and ``holds`` bool ``[B]`` at fixed addresses; ``report`` ``[2, B]`` has the
    lengths and ``count``, which is what the host reads.
    """

    def __init__(self, length: Tensor, greedy: bool) -> None:
        self._length, self._greedy = length, greedy
        self.count = torch.zeros_like(length)
        self.holds = torch.zeros_like(length, dtype=torch.bool)
        self.report = torch.zeros_like(length).repeat(2, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.numel() * t.element_size() for t in (self.count, self.holds, self.report))

    def begin(self, rows: Tensor) -> None:
        """Note the prefill's rows ``[B, V]``, the first pass."""
        self.holds.copy_(finite(rows.unsqueeze(1), self._greedy))
        self.count.copy_(self.holds)

    def note(self, rows: Tensor, logits: bool = False) -> None:
        """Note a step's rows ``[B, T, V]``: distributions, greedily or on request ``logits``."""
        self.holds.logical_and_(finite(rows, self._greedy or logits))
        self.count.add_(self.holds)

    def end(self) -> None:
        """Put what the host reads together, after the lengths of a step are written."""
        self.report.copy_(torch.stack((self._length, self.count)))
