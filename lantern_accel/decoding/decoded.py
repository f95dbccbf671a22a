"""What decoding gives, on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Decoded:
    """What decoding gives, on the host: tokens int64 ``[B, N]`` and counters.

    ``steps [B]`` target forwards after prefill; ``histogram [B, D + 1]`` steps by accepted drafts;
    ``price [B]`` what relaxation cost, summed over tokens (:class:`~.trees.Accepted`).
    """

    tokens: Tensor
    steps: Tensor
    histogram: Tensor
    price: Tensor

    @property
    def step_compression(self) -> float:
        """Tokens known through steps over target forwards (prefill's first token not counted)."""
        steps = int(self.steps.sum())
        gained = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return gained / steps if steps else 1.0


def steps_by_accepted(parts: Iterable[Decoded]) -> list[int]:
    """Return how many steps accepted 0, 1, ... drafts; parts may have drafted to other depths."""
    rows = [part.histogram.sum(0) for part in parts]
    totals: list[int] = pad_sequence(rows, batch_first=True).sum(0).tolist()
    return totals
