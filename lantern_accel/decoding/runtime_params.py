"""Holds the settings that are data: float32 tensors on the device, which every captured step reads.

Temperature, top-p, guidance, a rule's bound and the budget change from request to request without a new
capture or compilation; what changes a shape is in :attr:`Strategy.bucket` and :attr:`Sampling.bucket`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.strategy.values import Sampling, Strategy


class RuntimeParams:
    """The values of one engine's settings, at fixed addresses.

    ``temperature, top_p, image_scale, budget`` float32 ``[1]``; ``scale`` float32 ``[N]``, the guidance
    with which each token is predicted; ``rule`` float32, the acceptance rule's values.
    """

    def __init__(
        self, strategy: Strategy, sampling: Sampling, tokens: int, device: torch.device
    ) -> None:
        def floats(count: int) -> Tensor:
            return torch.ones(count, dtype=torch.float32, device=device)

        self.temperature, self.top_p, self.image_scale, self.budget = (floats(1) for _ in range(4))
        self.scale = floats(tokens)
        self.rule = floats(len(strategy.acceptance.runtime_params))
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
        scale = torch.full(self.scale.shape, sampling.cfg_scale if sampling.guided else 1.0)
        if sampling.cfg_interval >= 0:
            # Decode index i counts from the second token; the first is always guided.
            scale[sampling.cfg_interval + 2 :] = 1.0
        self.scale.copy_(scale)
        self.rule.copy_(torch.tensor(strategy.acceptance.runtime_values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())
