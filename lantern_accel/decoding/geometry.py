"""Computes every size that a step's shapes depend on, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.strategy import Strategy, check_settings


@dataclass(frozen=True)
class Geometry:
    """Every size that a step's shapes depend on; host integers, fixed for an engine's life.

    ``batch`` images; ``branches`` 2 with guidance (rows ``[cond; uncond]``), else 1; ``prefix`` and
    ``tokens`` positions of prompt and image; ``nodes`` of a step with the root; ``depth`` of its deepest
    draft; ``vocab`` codes; ``dim`` width of a feature; ``own_prompts``: rows of one image have prompts of
    their own (see :class:`Branches`); ``draft_columns, test_columns``: uniforms that drafting and testing
    take per image and step; ``keyed``: no uniforms, since tokens are compared with what the seed or the
    likeliest code decides (:mod:`~.accept`); ``tabled``: their noise is a table of all positions.

    Of trees: ``scratch`` drafter nodes a step; ``drafted``: a drafter drafts; ``taps``: states of the
    target that the drafter reads next to the feature.

    Of windows: ``in_place``: a draft lies in the slot of its position; ``kept`` distributions are kept
    per image; ``passes`` are recalled; ``guesses``: a draft head guesses, from the last exact state.
    """

    batch: int
    branches: int
    prefix: int
    tokens: int
    nodes: int
    depth: int
    vocab: int
    dim: int
    own_prompts: bool = False
    draft_columns: int = 0
    test_columns: int = 0
    keyed: bool = False
    tabled: bool = False
    scratch: int = 0
    drafted: bool = False
    taps: int = 0
    in_place: bool = False
    kept: int = 0
    passes: int = 0
    guesses: bool = False

    @property
    def columns(self) -> int:
        """Uniforms per image and step: for drafting, for the tests, and one for the bonus token."""
        return 0 if self.keyed else self.draft_columns + self.test_columns + 1

    @property
    def rows(self) -> int:
        return self.batch * self.branches

    @property
    def ahead(self) -> int:
        """Slots behind an image's committed positions that a step writes and sees."""
        return self.nodes + self.in_place

    @property
    def image_slots(self) -> int:
        """Slots after the prompt: every image token but the last and a tree's nodes, or all and trash."""
        return self.tokens + 1 if self.in_place else self.tokens - 1 + self.ahead

    @property
    def target_slots(self) -> int:
        """Slots per row of the target's cache."""
        return self.prefix + self.image_slots

    @property
    def drafter_slots(self) -> int:
        """Prompt, image, scratch and a trash slot; the drafter's prefix is one position shorter."""
        return self.prefix - 1 + self.tokens + self.scratch + 1


def geometry_of(
    target: Target, drafter: Drafter | None, strategy: Strategy, sampling: Sampling, batch: int
) -> Geometry:
    """Return the sizes that all sources of drafts have; nothing is allocated.

    Raises :class:`StrategyError` where the strategy needs a drafter that is not there, drafts more in a
    row than the image has tokens, or has a setting that the codebook cannot serve.
    """
    config, drafts = target.config, strategy.drafts
    strategy.check_drafter(drafter is not None)
    if not drafts.needs_drafter:
        drafter = None
    nodes, depth = drafts.size
    if depth >= config.num_tokens:
        raise StrategyError(
            f"a step is {depth} drafts deep and has {depth + 1} tokens, but an image has "
            f"{config.num_tokens} tokens; choose a shallower tree or a shorter window"
        )
    check_settings(strategy, sampling, config.vocab_size)
    return Geometry(
        batch=batch,
        branches=sampling.branches,
        prefix=config.prefix_length,
        tokens=config.num_tokens,
        nodes=nodes,
        depth=depth,
        vocab=config.vocab_size,
        dim=config.dim,
        own_prompts=target.own_prompts,
        drafted=drafter is not None,
        taps=len(drafter.taps) if drafter is not None else 0,
        keyed=strategy.invariant or sampling.greedy,
    )
