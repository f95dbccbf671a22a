"""The engine: static buffers, and the step that reads like the papers.

``prefill -> [draft -> verify -> accept -> commit] -> tokens``. One engine serves one batch size, one
strategy and one set of sampling settings; calls with other prompts reuse all of its buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted, Rule, accept_greedy, accept_sampling
from lantern_accel.decoding.commit import commit
from lantern_accel.decoding.draft import Drafting
from lantern_accel.decoding.logits import distribution, draw
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.state import Geometry, State
from lantern_accel.decoding.trees import DraftTree, TreeTables, tree_paths, tree_size
from lantern_accel.decoding.uniforms import draw_uniforms
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import RequestError, StrategyError
from lantern_accel.families.llamagen.drafter import EagleDrafter
from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.strategy.values import DynamicTree, NoTree, Sampling, Strategy


@dataclass(frozen=True)
class Decoded:
    """What decoding gives, on the host: tokens int64 ``[B, N]`` and counters.

    ``steps [B]`` target forwards after prefill; ``histogram [B, D + 1]`` steps by accepted drafts;
    ``moved [B]`` total variation used by relaxed acceptance, summed.
    """

    tokens: Tensor
    steps: Tensor
    histogram: Tensor
    moved: Tensor

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
        target: LlamaGenGPT,
        drafter: EagleDrafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
    ) -> None:
        config = target.config
        tree = strategy.tree
        if isinstance(tree, NoTree):
            drafter = None
        elif drafter is None:
            raise StrategyError(
                f"the strategy {strategy.name!r} drafts tokens, but this model has no drafter; use "
                "the strategy 'vanilla', or train one with `lantern-accel train drafter`"
            )
        nodes, depth = tree_size(tree)
        if depth >= config.num_tokens:
            raise StrategyError(
                f"the tree is {depth} drafts deep, but an image has {config.num_tokens} tokens; "
                "choose a shallower tree"
            )
        self.check(strategy, sampling, config.vocab_size)
        self.strategy, self.sampling = strategy, sampling
        self.ops = ops
        weight = target.output.weight
        tables = None if isinstance(tree, DynamicTree) else TreeTables(tree_paths(tree))
        if isinstance(tree, DynamicTree):
            scratch = tree.depth * tree.top_k
        else:
            assert tables is not None
            scratch = sum(len(level) for level in tables.inner[1:])
        self.geometry = g = Geometry(
            batch=batch,
            branches=sampling.branches,
            prefix=config.prefix_length,
            tokens=config.num_tokens,
            nodes=nodes,
            depth=depth,
            scratch=scratch,
            vocab=config.vocab_size,
            dim=config.dim,
            own_prompts=target.own_prompts,
            taps=len(drafter.taps) if drafter is not None else 0,
        )
        if strategy.neighbours and neighbours is None:
            raise StrategyError(f"the strategy {strategy.name!r} needs a neighbour table")
        if neighbours is not None and neighbours.shape[1] < strategy.neighbours:
            raise StrategyError(
                f"the strategy {strategy.name!r} reads {strategy.neighbours} neighbours, the table has "
                f"{neighbours.shape[1]}; make a wider one"
            )
        self.rule = Rule(
            strategy.acceptance,
            strategy.residual,
            neighbours[:, : strategy.neighbours].to(weight.device)
            if neighbours is not None
            else None,
        )
        guidance = Guidance(
            self._scales(sampling, g.tokens, weight.device),
            sampling.cfg_scale_image,
            target.allowed(),
        )
        layout = ops.kv_layout(
            config.n_layer, g.rows, g.target_slots, config.n_head, config.head_dim, weight.dtype
        )
        taps = drafter.taps if drafter is not None else ()
        self.verifying = Verifying(target, ops, ops.allocate(layout), g, guidance, taps)
        self.drafting: Drafting | None = None
        if drafter is not None:
            d = drafter.config
            layout = ops.kv_layout(
                d.n_layer, g.rows, g.drafter_slots, d.n_head, d.head_dim, weight.dtype
            )
            dynamic = tree if isinstance(tree, DynamicTree) else None
            self.drafting = Drafting(
                drafter, target, ops, ops.allocate(layout), g, sampling, guidance, tables, dynamic
            )
        self._root_only = (
            None if tables is None else tables.topology(batch, weight.device, ops.index)
        )
        self._widths = tables.max_children if tables is not None else ()
        draft_columns = self.drafting.columns if self.drafting else 0
        tests = tree.top_k * depth if isinstance(tree, DynamicTree) else sum(self._widths)
        self._columns = (draft_columns, tests)
        self.state = State(
            g,
            draft_columns + tests + 1,
            target.condition_buffer(g.rows),
            weight.dtype,
            ops.index,
            weight.device,
        )
        self._progress = ops.host_copy(self.state.length)

    @staticmethod
    def check(strategy: Strategy, sampling: Sampling, vocab: int) -> None:
        """Raise :class:`StrategyError` for a setting that ``vocab`` codes cannot serve."""
        k = strategy.acceptance.k
        most = vocab - 1 - (strategy.neighbours - k)
        if k > most:
            raise StrategyError(
                f"k = {k} is too many for a codebook of {vocab} codes; choose k between 1 and {most}"
            )
        if sampling.top_k > vocab:
            raise StrategyError(
                f"top_k = {sampling.top_k} is more than the codebook's {vocab} codes; use 0 for all"
            )
        tree = strategy.tree
        widths = (
            TreeTables(tree_paths(tree)).max_children if not isinstance(tree, DynamicTree) else ()
        )
        widest = tree.top_k if isinstance(tree, DynamicTree) else max(widths, default=0)
        if widest > vocab:
            raise StrategyError(
                f"the tree has {widest} siblings, but there are {vocab} codes; choose a narrower tree"
            )

    @staticmethod
    def _scales(sampling: Sampling, tokens: int, device: torch.device) -> Tensor | None:
        """Return the guidance scale of each token; outside LlamaGen's interval it is 1 (off)."""
        if not sampling.guided:
            return None
        scale = torch.full((tokens,), float(sampling.cfg_scale), device=device)
        if sampling.cfg_interval >= 0:
            # Decode index i counts from the second token; the first is always guided.
            scale[sampling.cfg_interval + 2 :] = 1.0
        return scale

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers: caches and state."""
        total = self.verifying.cache.layout.nbytes
        if self.drafting is not None:
            total += self.drafting.cache.layout.nbytes
        return total + self.state.nbytes

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
            weights = distribution(logits, self.sampling)
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
        drafts, tests = self._columns
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
        return accept_sampling(tree, distribution(logits, self.sampling), self.rule, tests, bonus)

    def uniforms(self, seed: int, images: list[int]) -> Tensor:
        """Draw the request's randomness: float32 ``[B, N, columns]`` on the engine's device.

        ``images`` are the indices that pick each image's random stream.
        """
        columns = sum(self._columns) + 1
        drawn = draw_uniforms(seed, images, self.geometry.tokens, columns)
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
        while posted:  # so that the next request does not read this one's
            known()
        return Decoded(
            state.tokens[:, : g.tokens].to("cpu", torch.int64, copy=True),
            state.steps.to("cpu", torch.int64, copy=True),
            state.histogram.to("cpu", torch.int64, copy=True),
            state.moved.to("cpu", copy=True),
        )
