"""A drafter's chain whose length changes from step to step, down to plain decoding, on one state.

Every step drafts anew, and its length is chosen before it does, by how many drafts were kept before: so
whatever the rule, each step is an exact one. Once decoding is plain it stays so, since the drafter has
not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lantern_accel.decoding.buckets import Within, usual
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.movable import Movable
from lantern_accel.decoding.pacing import CHAIN_GAIN, PaceRule
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import ChainTree, NoTree, Sampling, Strategy


class ChainedEngine(Movable):
    """Decodes ``batch`` images a call with chains of changing length, on static buffers.

    ``rule`` chooses lengths, a chain's drafts and one; None: by acceptance. Raises as
    :class:`Engine` does.
    """

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
        rule: PaceRule | None = None,
    ) -> None:
        tree, tokens = strategy.tree, target.config.num_tokens
        assert isinstance(tree, ChainTree) and tree.paces
        engines: dict[int, Engine] = {}
        longest: Engine | None = None
        for length in sorted((p.length for p in tree.paces if p.length <= tokens), reverse=True):
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
        self.engines, self.longest, self.chosen = engines, longest, rule
        self.now = max(engines)
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        self.geometry, self.dials = longest.geometry, longest.dials
        self.verifying, self.state = longest.verifying, longest.state
        self.drafting = longest.drafting
        self.sound, self._progress = longest.sound, longest._progress
        self.greedy = longest.greedy
        self.divide(usual(self.geometry, self.verifying.cache.layout, ops))

    def divide(self, sizes: Sequence[int]) -> None:
        """Take the bucket next to half the cache alone: each is a function for every length."""
        whole = self.verifying.cache.layout.capacity
        super().divide(sorted(sizes, key=lambda size: abs(2 * size - whole))[:1])
        #: Replaced by captured functions where a device captures.
        self.functions = self.host_functions()

    @property
    def lengths(self) -> list[int]:
        return sorted(self.engines)

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        super().configure(strategy, sampling)
        for engine in self.engines.values():
            engine.strategy, engine.sampling = strategy, sampling

    def host_functions(self) -> dict[str, Callable[[], None]]:
        """Return what a device captures beside prefill: a step of each length."""
        found: dict[str, Callable[[], None]] = {}
        for length, engine in self.engines.items():
            found[self._name(length)] = engine.step
            for slots in self.sizes[:-1]:
                found[self._name(length, slots)] = Within(engine, slots).step
        return found

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        self.longest.prefill()

    def at_middle(self, length: int) -> None:
        self.state.length.fill_(self.geometry.tokens // 2)
        self.state.pending_count.fill_(length)  # what a step of so many drafts leaves at most
        self.move(length)
