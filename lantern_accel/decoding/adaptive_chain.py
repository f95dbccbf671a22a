"""A drafter's chain whose length changes from step to step, down to plain decoding, on one state.

Every step drafts anew, and its length is chosen before it does, by how many drafts were kept before: so
whatever the rule, each step is an exact one. Once decoding is plain it stays so, since the drafter has
not followed.
"""

from __future__ import annotations

from torch import Tensor

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.length_policy import CHAIN_GAIN, LengthPolicy
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import ChainTree, NoTree, Sampling, Strategy


class AdaptiveChain(AdaptiveEngine):
    """Decodes ``batch`` images a call with chains of changing length, on static buffers.

    ``rule`` chooses lengths, a chain's drafts and one; None: by acceptance. Raises as
    :class:`Engine` does.
    """

    state: State
    returns = False
    gain = CHAIN_GAIN
    untimed = 0

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        rule: LengthPolicy | None = None,
    ) -> None:
        tree, tokens = strategy.tree, target.config.num_tokens
        assert isinstance(tree, ChainTree) and tree.draft_lengths
        engines: dict[int, Engine] = {}
        longest: Engine | None = None
        for length in sorted(
            (p.length for p in tree.draft_lengths if p.length <= tokens), reverse=True
        ):
            drafts = NoTree() if length == 1 else ChainTree(length=length - 1)
            one = strategy.model_copy(update={"tree": drafts})
            engines[length] = Engine(
                target,
                drafter,
                ops,
                one,
                sampling,
                batch=batch,
                neighbours=neighbours,
                longest=longest,
            )
            longest = longest or engines[length]
        assert longest is not None, "an image of one token is decoded plainly"
        self.chosen = rule
        self._step_on(engines, strategy)

    def usual(self, length: int) -> float:
        """Return the most that a step can bring: what a drafter is worth is counted."""
        return float(length)

    def at_middle(self, length: int) -> None:
        self.state.length.fill_(self.geometry.tokens // 2)
        self.state.pending_count.fill_(length)  # what a step of so many drafts leaves at most
        self.move(length)
