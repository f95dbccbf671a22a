"""Drafts of the model's own weights whose number changes from step to step, down to plain decoding.

The copy drafts on top of what is known, and nothing of it outlives a step: so whatever the rule, each
step is an exact one, and drafts may be taken up again after plain steps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.decoding.movable import Movable
from lantern_accel.decoding.paced import PlainStep
from lantern_accel.decoding.pacing import CHAIN_GAIN, PaceRule
from lantern_accel.decoding.selfdraft import SelfEngine
from lantern_accel.decoding.target import Target
from lantern_accel.decoding.window import WindowState
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy


class SelfPacedEngine(Movable):
    """Decodes ``batch`` images a call with changing numbers of drafts by a copy, on static buffers.

    ``rule`` chooses lengths, of drafts and one; None: by acceptance. Raises as :class:`SelfEngine` does.
    """

    engines: dict[int, SelfEngine]
    state: WindowState
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
        rule: PaceRule | None = None,
    ) -> None:
        drafts, tokens = strategy.tree, target.config.num_tokens
        assert isinstance(drafts, SelfDrafts) and drafts.paces
        fitting = [pace.length for pace in drafts.paces if pace.length <= tokens]
        engines: dict[int, SelfEngine] = {}
        longest: SelfEngine | None = None
        for length in sorted((one for one in fitting if one > 1), reverse=True):
            one = strategy.model_copy(update={"tree": drafts.cut(length - 1)})
            engines[length] = SelfEngine(
                target, copy, ops, one, sampling, batch=batch, longest=longest
            )
            longest = longest or engines[length]
        assert longest is not None, "an image of one token is decoded plainly"
        self.longest, self.chosen = longest, rule
        self.plain = PlainStep(longest) if 1 in fitting else None
        self._step_on(engines, strategy)

    @property
    def owners(self) -> dict[int, Any]:
        """What has the step of each length."""
        return super().owners | ({} if self.plain is None else {1: self.plain})

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take other values of the settings that are data, for the copy too."""
        super().configure(strategy, sampling)
        self.longest.copy.dials.set(strategy, sampling)

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Clear the buffers, the copy's too, and copy a request into them."""
        super().load(condition, prefix_mask, randomness)
        self.longest.copy.load(condition, prefix_mask, randomness)

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name."""
        return self.longest.changes

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers; the cache is counted once."""
        return self.longest.nbytes

    def usual(self, length: int) -> float:
        """Return the most that a step can bring: how often a copy agrees is counted."""
        return float(length)

    def at_middle(self, length: int) -> None:
        middle = self.geometry.tokens // 2
        self.state.length.fill_(middle)  # what is known there does not change the time
        self.state.newest.fill_(middle)
        self.move(length)
