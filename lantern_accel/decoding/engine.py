"""The engine: static buffers, and the step that reads like the papers.

``prefill -> [draft -> verify -> accept -> commit] -> tokens``. One engine serves one batch size, one
strategy and one set of sampling settings; calls with other prompts reuse all of its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted, Rule, accept_greedy, accept_sampling
from lantern_accel.decoding.commit import commit
from lantern_accel.decoding.dials import Dials
from lantern_accel.decoding.draft import Drafting
from lantern_accel.decoding.geometry import cache_layouts, geometry_of, tables_of
from lantern_accel.decoding.logits import Filters, distribution, draw
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target, place_of
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.uniforms import draw_uniforms
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import KVCache, TensorOps
from lantern_accel.errors import RequestError, StrategyError
from lantern_accel.strategy.values import DynamicTree, Sampling, Strategy


@dataclass(frozen=True)
class Decoded:
    """What decoding gives, on the host: tokens int64 ``[B, N]`` and counters.

    ``steps [B]`` target forwards after prefill; ``histogram [B, D + 1]`` steps by accepted drafts;
    ``price [B]`` what relaxation cost, summed over tokens (:class:`~.accept.Accepted`).
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


class Engine:
    """Decodes ``batch`` images a call on static buffers.

    Raises :class:`StrategyError` where the strategy needs a drafter or a neighbour table that is not
    there, or a tree that is deeper than the image has tokens.
    """

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
    ) -> None:
        self.geometry = g = geometry_of(target, drafter, strategy, sampling, batch)
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        dtype, device = place_of(target)
        self.dials = Dials(strategy, sampling, g.tokens, device)
        self.filters = Filters(sampling, self.dials.temperature, self.dials.top_p)
        self.rule = self._rule(neighbours, device)
        image_scale = None if sampling.cfg_scale_image is None else self.dials.image_scale
        guidance = Guidance(
            self.dials.scale if sampling.guided else None, image_scale, target.allowed()
        )
        tables = tables_of(strategy.tree)
        layout, drafter_layout = cache_layouts(g, target, drafter, ops)
        self.drafting: Drafting | None = None
        taps: Sequence[int] = ()
        if drafter is not None and drafter_layout is not None:
            taps = drafter.taps
            dynamic = strategy.tree if isinstance(strategy.tree, DynamicTree) else None
            cache = ops.allocate(drafter_layout)
            self.drafting = Drafting(
                drafter, target, ops, cache, g, self.filters, guidance, tables, dynamic
            )
        self.verifying = Verifying(target, ops, ops.allocate(layout), g, guidance, taps)
        self._root_only = None if tables is None else tables.topology(batch, device, ops.index)
        self.state = State(g, target.condition_buffer(g.rows), dtype, ops.index, device)
        self._progress = ops.host_copy(self.state.length)

    def _rule(self, neighbours: Tensor | None, device: torch.device) -> Rule:
        strategy = self.strategy
        if strategy.neighbours:
            if neighbours is None:
                raise StrategyError(f"the strategy {strategy.name!r} needs a neighbour table")
            if neighbours.shape[1] < strategy.neighbours:
                raise StrategyError(
                    f"the strategy {strategy.name!r} reads {strategy.neighbours} neighbours, the table "
                    f"has {neighbours.shape[1]}; make a wider one"
                )
            neighbours = neighbours[:, : strategy.neighbours].to(device)
        return Rule(
            strategy.acceptance,
            strategy.residual,
            neighbours if strategy.neighbours else None,
            self.dials.rule,
            None if strategy.tv_budget is None else self.dials.budget,
        )

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take other values of the settings that are data (:class:`Dials`).

        Raises :class:`StrategyError` for settings of another bucket, which need an engine of their own.
        """
        if (strategy.bucket, sampling.bucket) != (self.strategy.bucket, self.sampling.bucket):
            raise StrategyError(
                f"an engine made for {self.strategy.name!r} cannot decode {strategy.name!r} with these "
                "settings: their shapes differ; make another engine"
            )
        self.strategy, self.sampling = strategy, sampling
        self.dials.set(strategy, sampling)

    @property
    def caches(self) -> list[KVCache]:
        """The target's cache and, where there is a drafter, the drafter's."""
        drafting = [] if self.drafting is None else [self.drafting.cache]
        return [self.verifying.cache, *drafting]

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers: caches, state and settings."""
        caches = sum(cache.layout.nbytes for cache in self.caches)
        return caches + self.state.nbytes + self.dials.nbytes

    # --- one image batch -----------------------------------------------------------------------

    def start(
        self,
        condition: Tensor,
        prefix_mask: Tensor,
        uniforms: Tensor,
        prefill: Callable[[], None] | None = None,
    ) -> None:
        """Load a request and prefill; ``prefill`` replays a captured :meth:`prefill`."""
        self.load(condition, prefix_mask, uniforms)
        (prefill or self.prefill)()

    def load(self, condition: Tensor, prefix_mask: Tensor, uniforms: Tensor) -> None:
        """Clear the buffers and copy a request into them.

        ``condition``: rows ``[cond; uncond]`` with guidance, else ``[cond]``, each caption features
        ``[prefix, caption_dim]`` or a class id; ``prefix_mask`` bool ``[B, prefix]``; ``uniforms``
        float32 ``[B, N, columns]``. Raises :class:`RequestError` for another shape.
        """
        state = self.state
        given = {"condition": condition, "prefix_mask": prefix_mask, "uniforms": uniforms}
        for name, value in given.items():
            if value.shape != getattr(state, name).shape:
                raise RequestError(
                    f"{name} has shape {list(value.shape)}, this engine takes "
                    f"{list(getattr(state, name).shape)}"
                )
        self._progress.clear()
        state.reset()
        for name, value in given.items():
            getattr(state, name).copy_(value)
        if self.geometry.own_prompts:
            state.start.copy_(prefix_mask.sum(dim=1))

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        state = self.state
        features, logits = self.verifying.prefill(state)
        if self.sampling.greedy:
            root = logits.argmax(dim=-1).to(self.ops.index)
        else:
            weights = distribution(logits, self.filters)
            root = draw(weights, state.uniforms[:, 0, -1], self.ops.index)
        state.root.copy_(root)
        state.tokens[:, 0].copy_(root)
        state.step.fill_(1)
        if self.drafting is not None:
            self.drafting.prefill(state, features)
            state.pending_tokens[:, 0].copy_(root)
            state.pending_features[:, 0].copy_(features[:, -1])
            state.pending_count.fill_(1)

    def step(self) -> None:
        """One LANTERN step: draft, verify, accept, commit. No value is read by the host."""
        state = self.state
        now = state.step.clamp(max=self.geometry.tokens - 1)
        uniforms = state.uniforms.index_select(1, now).squeeze(1)
        drafts, tests = self.geometry.draft_columns, self.geometry.test_columns
        with self.ops.phase("draft"):
            tree = self._draft(uniforms[:, :drafts])
        with self.ops.phase("verify"):
            features, logits = self.verifying.verify(state, tree)
        with self.ops.phase("accept"):
            accepted = self._accept(
                tree, logits, uniforms[:, drafts : drafts + tests], uniforms[:, -1]
            )
        with self.ops.phase("commit"):
            commit(self.verifying, state, tree, features, accepted)

    def _draft(self, uniforms: Tensor) -> DraftTree:
        if self.drafting is not None:
            return self.drafting.draft(self.state, uniforms)
        assert self._root_only is not None
        topology = {k: v for k, v in self._root_only.items() if k != "group"}
        return DraftTree(tokens=self.state.root.unsqueeze(1), max_children=(), **topology)

    def _accept(self, tree: DraftTree, logits: Tensor, tests: Tensor, bonus: Tensor) -> Accepted:
        if self.sampling.greedy:
            return accept_greedy(tree, logits, self.rule)
        allowed = None
        if self.rule.residual == "official" and self.verifying.guidance.allowed is not None:
            allowed = logits > float("-inf")
        probs = distribution(logits, self.filters)
        return accept_sampling(tree, probs, self.rule, tests, bonus, allowed)

    def uniforms(self, seed: int, images: list[int]) -> Tensor:
        """Draw the request's randomness: float32 ``[B, N, columns]`` on the engine's device.

        ``images`` are the indices that pick each image's random stream.
        """
        drawn = draw_uniforms(seed, images, self.geometry.tokens, self.geometry.columns)
        return drawn.to(self.state.uniforms.device)

    def run(
        self,
        step: Callable[[], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
        check_every: int = 1,
    ) -> Decoded:
        """Step until every image is complete; call :meth:`start` first.

        ``step`` replays a captured :meth:`step`. ``on_progress`` gets the tokens known by the slowest
        image. The host looks at the lengths only from the earliest step at which an image can be
        complete, then every ``check_every`` steps, and every eighth step where progress is wanted; a
        device that lets its copies lag runs that many steps more (no-ops on complete images).
        """
        g, state = self.geometry, self.state
        replay = step or self.step
        earliest = -(-(g.tokens - 1) // (g.depth + 1))
        posted: list[int] = []

        def known() -> int:
            del posted[0]
            count = int(self._progress.read().min()) + 1
            if on_progress is not None:
                on_progress(count)
            return count

        for index in range(1, g.tokens):
            replay()
            late = index >= earliest and (index - earliest) % check_every == 0
            if late or (on_progress is not None and index % 8 == 0):
                self._progress.post()
                posted.append(index)
            if posted and index - posted[0] >= self._progress.lag and known() >= g.tokens:
                break
        while posted:
            known()
        return Decoded(
            state.tokens[:, : g.tokens].to("cpu", torch.int64, copy=True),
            state.steps.to("cpu", torch.int64, copy=True),
            state.histogram.to("cpu", torch.int64, copy=True),
            state.price.to("cpu", copy=True),
        )
