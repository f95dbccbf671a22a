"""Makes what the steps of an engine share, once and at the longest length: buffers and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.logits import Filters, TokenChooser, distribution
from lantern_accel.decoding.rows import Cut, Guidance
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.state import FiniteGuard, RuntimeParams, State
from lantern_accel.decoding.target import CacheSizes, Drafter, Target
from lantern_accel.decoding.verify import TargetRunner
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.noise import noise_keys, sample_uniforms
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import RequestError, StrategyError
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.strategy import Strategy

#: Gets a step, its drafts, the features and guided logits of their nodes, and what was judged, which it
#: may return changed.
Observer = Callable[[Any, Any, Tensor, Tensor, Any], Any]
#: Buffers of the state that a request fills and no step changes.
GIVEN = ("condition", "prefix_mask", "uniforms", "keys", "start")


class Session:
    """The buffers and settings of one batch size, one strategy and one set of sampling settings.

    Calls with other prompts reuse all of it, and so do steps of every length.
    """

    geometry: Geometry
    """Sizes of the longest step."""
    observer: Observer | None = None
    """Sees every step judged, and may compute its quality loss; steps then run operator by operator."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        geometry: Geometry,
        state_type: type[State],
        *,
        neighbours: Tensor | None = None,
        rewritten: bool = False,
    ) -> None:
        """Make the buffers; ``rewritten``: a step writes the target's cache more than once.

        Raises :class:`StrategyError` where the strategy needs a neighbour table that is not there.
        """
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        self.greedy, self.drafter = sampling.greedy, drafter
        dtype, device = target.weight.dtype, target.weight.device
        table = 4 * geometry.batch * geometry.tokens * geometry.vocab
        drawn = geometry.keyed and not sampling.greedy
        self.geometry = g = replace(geometry, tabled=drawn and table <= ops.preferences.noise_bytes)
        values = RuntimeParams(strategy, sampling, g.tokens, device, target.guidance_scales)
        self.runtime_params = values
        sums = ops.tables(g.vocab, device).sums
        cut = None
        if target.unsampled:  # then the filters come before the last that is masked, not after
            early = Filters(sampling, values.temperature, values.top_p, ops).given
            filters_none = sampling.greedy or (early.top_k == 0 and early.top_p is None)
            cut = Cut(g.vocab, None if filters_none else early, ops)
            sampling = sampling.model_copy(update={"top_k": 0, "top_p": 1.0})
        self.filters = Filters(sampling, values.temperature, values.top_p, ops, sums=sums)
        self.rule = self._rule(neighbours, device)
        image_scale = None if sampling.cfg_scale_image is None else values.image_scale
        scale = values.scale if sampling.guided else None
        guidance = Guidance(scale, image_scale, target.allowed_codes(), ops, cut)
        self.state = state_type(g, target.condition_buffer(g.rows), dtype, ops.index, device)
        noise = self.state.noise if g.tabled else None
        self.choices = TokenChooser(self.state.keys, self.filters, self.greedy, noise)
        self.watch()
        self.drafter_cache, taps, open_pads = None, tuple[int, ...](), False
        if drafter is not None:
            self.drafter_cache = self._cache(drafter.config, g.drafter_slots, dtype, True)
            taps, open_pads = drafter.taps, not (drafter.config.mask_padding or g.own_prompts)
        cache = self._cache(target.config, g.target_slots, dtype, rewritten)
        self.verifying = TargetRunner(target, ops, cache, g, guidance, taps, open_pads)

    def _cache(self, sizes: CacheSizes, slots: int, dtype: torch.dtype, rewritten: bool) -> KVCache:
        """Allocate the cache of a target or a drafter."""
        made = sizes.n_layer, self.geometry.rows, slots, sizes.kv_heads, sizes.head_dim, dtype
        return self.ops.allocate(replace(self.ops.kv_layout(*made), rewritten=rewritten))

    def watch(self) -> None:
        """Make what the host reads while steps run: lengths, and whether numbers are finite."""
        self.finite = FiniteGuard(self.state.length, self.greedy)
        self.progress = self.ops.host_copy(self.finite.report)

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
            if neighbours.shape[1] > strategy.neighbours:
                neighbours = neighbours[:, : strategy.neighbours].clone()
            neighbours = neighbours.to(device)
        return Rule(
            strategy.acceptance,
            strategy.residual,
            neighbours if strategy.neighbours else None,
            self.runtime_params.rule,
            None if strategy.tv_budget is None else self.runtime_params.budget,
        )

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take other values of the settings that are data (:class:`RuntimeParams`).

        Raises :class:`StrategyError` for settings of another bucket, which need an engine of their own.
        """
        if (strategy.bucket, sampling.bucket) != (self.strategy.bucket, self.sampling.bucket):
            raise StrategyError(
                f"an engine made for {self.strategy.name!r} cannot decode {strategy.name!r} with these "
                "settings: their shapes differ; make another engine"
            )
        self.strategy, self.sampling = strategy, sampling
        self.runtime_params.set(strategy, sampling)

    @property
    def caches(self) -> dict[str, KVCache]:
        """The target's cache and, where there is a drafter, the drafter's."""
        drafter = self.drafter_cache
        return {"target": self.verifying.cache} | ({} if drafter is None else {"drafter": drafter})

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Clear the buffers and copy a request into them.

        ``condition``: rows ``[cond; uncond]`` with guidance, else ``[cond]``, each caption features
        ``[prefix, caption_dim]`` or a class id; ``prefix_mask`` bool ``[B, prefix]``; ``randomness``
        as :meth:`randomness` gives it. Raises :class:`RequestError` for another shape.
        """
        state = self.state
        drawn = "keys" if self.geometry.keyed else "uniforms"
        given = (
            ("condition", condition, state.condition),
            ("prefix_mask", prefix_mask, state.prefix_mask),
            (drawn, randomness, state.keys if self.geometry.keyed else state.uniforms),
        )
        for name, value, buffer in given:
            if value.shape != buffer.shape:
                takes = f"this engine takes {list(buffer.shape)}"
                raise RequestError(f"{name} has shape {list(value.shape)}, {takes}")
        self.progress.clear()
        state.reset()
        for _, value, buffer in given:
            buffer.copy_(value)
        if self.geometry.own_prompts:
            state.start.copy_(prefix_mask.sum(dim=1))

    def randomness(self, seed: int | Sequence[int], images: list[int]) -> Tensor:
        """Return what decides a request's images, on the engine's device.

        Keys of their noise, int32 ``[B, 3]``, where the seed decides every token; with the coupling
        ``maximal`` uniforms float32 ``[B, N, columns]``. ``seed``: of all, or of each; ``images``: their
        numbers in the request. Image i gets the same alone and in a batch.
        """
        g, device = self.geometry, self.state.length.device
        if g.keyed:
            return noise_keys(seed, images).to(device)
        return sample_uniforms(seed, images, g.tokens, g.columns).to(device)

    def first_token(self, logits: Tensor) -> Tensor:
        """Sample the image's first token from guided ``logits [B, V]``, the prefill's, and keep it.

        Returns what it was sampled from, ``[B, V]`` (greedily the logits).
        """
        state, weights = self.state, logits if self.greedy else distribution(logits, self.filters)
        self.finite.begin(weights)
        if self.greedy:
            token = logits.argmax(dim=-1).to(self.ops.index)
        elif self.geometry.keyed:
            place = self.verifying.first.unsqueeze(1)
            token = self.choices.of(weights.unsqueeze(1), place).squeeze(1)
        else:
            token = self.filters.sample(weights, state.uniforms[:, 0, -1])
        state.begin(token)
        return weights
