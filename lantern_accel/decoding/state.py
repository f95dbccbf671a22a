"""Holds the static buffers that all engines have: state, settings, and whether numbers are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.strategy import Strategy

#: Makes a buffer of zeros on the engine's device.
Zeros = Callable[..., Tensor]


class StaticBuffers:
    """Tensors that keep their addresses for an engine's life."""

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that a request or a step changes, by name."""
        named = vars(self).items()
        return {n: one for n, one in named if isinstance(one, Tensor) and not n.startswith("_")}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(one.nbytes for one in self.buffers.values())


class State(StaticBuffers):
    """What every step reads and updates in place; nothing here changes its address.

    ``condition``: what the prompt is prefilled from, one row per image and branch. ``length [B]``: the
    position of the last image token that is committed. ``tokens [B, N + 1]``: known tokens; column N is
    trash. ``uniforms`` float32 ``[B, N, columns]`` or ``keys`` int32 ``[B, 3]``: the request's
    randomness (:mod:`lantern_accel.device.noise`); ``noise`` float32 ``[B, N, V]``, of the keys, where it
    is a table (:attr:`.Preferences.noise_bytes`). ``histogram [B, D + 1]``: steps by accepted drafts.
    """

    def __init__(
        self,
        g: Geometry,
        condition: Tensor,
        dtype: torch.dtype,
        index: torch.dtype,
        device: torch.device,
    ) -> None:
        """``dtype``: the weights'."""
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        ints = partial(zeros, dtype=index)
        self.condition = condition
        self.length = ints(g.batch)
        self.tokens = ints(g.batch, g.tokens + 1)
        masks = g.rows if g.own_prompts else g.batch
        self.prefix_mask = zeros(masks, g.prefix, dtype=torch.bool)
        self.uniforms = zeros(g.batch, g.tokens, g.columns)
        self.keys = zeros(g.batch, 3, dtype=torch.int32)
        self.noise = zeros(g.batch, g.tokens, g.vocab) if g.tabled else zeros(0)
        self.step = ints(1)
        self.steps = ints(g.batch)
        self.histogram = ints(g.batch, g.depth + 1)
        self.quality_loss = zeros(g.batch)
        self.last_length = ints(g.batch)
        self.start = ints(g.rows if g.own_prompts else 0)
        #: What a step may gain, by the columns of the histogram.
        self._gains = torch.arange(1, g.depth + 2, dtype=index, device=device)
        self._own(g, zeros, ints, dtype)

    def _own(self, g: Geometry, zeros: Zeros, ints: Zeros, dtype: torch.dtype) -> None:
        """Make the buffers of one kind of steps."""

    def begin(self, token: Tensor) -> None:
        """Note the image's first token ``[B]``, which no step has run."""
        self.tokens[:, 0].copy_(token)
        self.step.fill_(1)

    def get_uniforms(self, back: int = 0) -> Tensor:
        """Return the uniforms ``[B, columns]`` of this step, or of the one ``back`` before it."""
        step = self.step - back if back else self.step
        now = step.clamp(max=self.uniforms.shape[1] - 1)
        return self.uniforms.index_select(1, now).squeeze(1)

    def advance(self, length: Tensor, gained: Tensor, open_: Tensor, accepted: Tensor) -> None:
        """Move images on to ``length [B]``, ``gained`` tokens further, and count the step.

        Of images that are complete, and not ``open_``, nothing is counted, nor is what a step drafts past
        their end. ``accepted``: the step's drafts that were accepted, -1 of complete images.
        """
        self.histogram.add_(self._gains == gained.unsqueeze(1))
        self.steps.add_(open_)
        self.last_length.copy_(accepted)
        self.length.copy_(length)
        self.step.add_(1)

    def rewind(self, position: int, pending: int) -> None:
        """Set every image's length to ``position``, so that a step there can be timed.

        ``pending``: committed tokens that the drafter has not read.
        """
        self.length.fill_(position)

    def reset(self) -> None:
        """Return every buffer to zero, in place."""
        for value in self.buffers.values():
            value.zero_()


class RuntimeParams(StaticBuffers):
    """The values of one engine's settings that are data, which every captured step reads.

    ``temperature, top_p, image_scale, budget`` float32 ``[1]``; ``scale`` float32 ``[N]``, the guidance
    with which each token is predicted; ``rule`` float32, the acceptance rule's values. ``scales``: what a
    target makes of one (:meth:`.Target.guidance_scales`).
    """

    def __init__(
        self,
        strategy: Strategy,
        sampling: Sampling,
        tokens: int,
        device: torch.device,
        scales: Callable[[float], Sequence[float] | None],
    ) -> None:
        def floats(count: int) -> Tensor:
            return torch.ones(count, dtype=torch.float32, device=device)

        self.temperature, self.top_p, self.image_scale, self.budget = (floats(1) for _ in range(4))
        self.scale = floats(tokens)
        self.rule = floats(len(strategy.acceptance.runtime_params))
        self._scales = scales
        self.set(strategy, sampling)

    def set(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take the values of settings whose bucket is this engine's."""
        # Copied, not filled: a number in an operator may be a recipe of its own where operators compile.
        self.temperature.copy_(torch.tensor([1.0 if sampling.greedy else sampling.temperature]))
        self.top_p.copy_(torch.tensor([sampling.top_p]))
        if sampling.cfg_scale_image is not None:
            self.image_scale.copy_(torch.tensor([sampling.cfg_scale_image]))
        if strategy.tv_budget is not None:
            self.budget.copy_(torch.tensor([strategy.tv_budget]))
        each = self._scales(sampling.cfg_scale) if sampling.guided else None
        scale = torch.tensor(each or [max(sampling.cfg_scale, 1.0)] * len(self.scale))
        if sampling.cfg_interval >= 0:
            # Decode index i counts from the second token; the first is always guided.
            scale[sampling.cfg_interval + 2 :] = 1.0
        self.scale.copy_(scale)
        self.rule.copy_(torch.tensor(strategy.acceptance.runtime_values()))


class FiniteGuard(StaticBuffers):
    """Counts the passes before the first one whose numbers are not finite, image by image.

    ``count`` integer ``[B]`` and ``holds`` bool ``[B]`` at fixed addresses; ``report`` ``[2, B]`` has
    the lengths and ``count``, which is what the host reads.
    """

    def __init__(self, length: Tensor, greedy: bool) -> None:
        self._length, self._greedy = length, greedy
        self.count = torch.zeros_like(length)
        self.holds = torch.zeros_like(length, dtype=torch.bool)
        self.report = torch.zeros_like(length).repeat(2, 1)

    def begin(self, rows: Tensor) -> None:
        """Note the prefill's rows ``[B, V]``, the first pass."""
        self.holds.copy_(self._finite(rows.unsqueeze(1), self._greedy))
        self.count.copy_(self.holds)

    def note(self, rows: Tensor, logits: bool = False) -> None:
        """Note a step's rows ``[B, T, V]``: distributions, greedily or on request ``logits``."""
        self.holds.logical_and_(self._finite(rows, self._greedy or logits))
        self.count.add_(self.holds)

    def _finite(self, rows: Tensor, logits: bool) -> Tensor:
        """Return whether an image's rows are finite, bool ``[B]``.

        Of logits, -inf is a code that may not be; a row of nothing else is not finite.
        """
        total = (rows.amax(dim=-1) if logits else rows[..., 0]).sum(dim=-1)
        # Infinity minus itself is not a number. No Python float: some compilers compare in double.
        nothing = total - total
        return nothing == nothing

    def end(self) -> None:
        """Put what the host reads together, after the lengths of a step are written."""
        self.report.copy_(torch.stack((self._length, self.count)))
