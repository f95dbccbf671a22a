"""Drafts of the model's own weights whose number changes from step to step, down to plain decoding.

The copy drafts on top of what is known, and nothing of it outlives a step: so whatever the rule, each
step is an exact one, and drafts may be taken up again after plain steps.
"""

from __future__ import annotations

from torch import Tensor

from lantern_accel.decoding.adaptive_window import OnLongest
from lantern_accel.decoding.length_policy import CHAIN_GAIN, LengthPolicy
from lantern_accel.decoding.selfdraft import SelfEngine
from lantern_accel.decoding.target import Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy


class AdaptiveSelf(OnLongest):
    """Decodes ``batch`` images a call with changing numbers of drafts by a copy, on static buffers.

    ``rule`` chooses lengths, of drafts and one; None: by acceptance. Raises as :class:`SelfEngine` does.
    """

    engines: dict[int, SelfEngine]
    gain = CHAIN_GAIN

    def __init__(
        self,
        target: Target,
        copy: Target,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        rule: LengthPolicy | None = None,
    ) -> None:
        drafts = strategy.tree
        assert isinstance(drafts, SelfDrafts) and drafts.draft_lengths

        def make(length: int, longest: SelfEngine | None) -> SelfEngine:
            one = strategy.model_copy(update={"tree": drafts.cut(length - 1)})
            return SelfEngine(target, copy, ops, one, sampling, batch=batch, longest=longest)

        self.chosen = rule
        self._of_lengths(strategy, target.config.num_tokens, make)

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take other values of the settings that are data, for the copy too."""
        super().configure(strategy, sampling)
        self.longest.copy.runtime_params.set(strategy, sampling)

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Clear the buffers, the copy's too, and copy a request into them."""
        super().load(condition, prefix_mask, randomness)
        self.longest.copy.load(condition, prefix_mask, randomness)

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name."""
        found: dict[str, Tensor] = self.longest.changes
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers; the cache is counted once."""
        own: int = self.longest.nbytes
        return own

    def usual(self, length: int) -> float:
        """Return the most that a step can bring: how often a copy agrees is counted."""
        return float(length)
