"""What decoding gives, on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Decoded:
    """What decoding gives, on the host: tokens int64 ``[B, N]`` and counters.

    ``steps [B]`` target forwards after prefill; ``histogram [B, D + 1]`` steps by accepted drafts;
    ``quality_loss [B]`` what relaxation cost, summed over tokens (:class:`~.trees.Accepted`).
    """

    tokens: Tensor
    steps: Tensor
    histogram: Tensor
    quality_loss: Tensor

    @property
    def step_compression(self) -> float:
        """Tokens known through steps over target forwards (prefill's first token not counted)."""
        steps = int(self.steps.sum())
        gained = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return gained / steps if steps else 1.0
