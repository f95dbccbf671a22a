"""A step without a tree in two calls of the device's own: the pass, and what follows it."""

from __future__ import annotations

from typing import Any

from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps


class AtOnce:
    """Does a step of ``engine`` over windows of ``span`` tokens; plain decoding has windows of one.

    ``slots``: how many of the cache a pass looks at. :attr:`advance` is what follows a pass
    (:meth:`~lantern_accel.device.sampling.SamplingOps.advance`); None where the device has nothing.
    """

    def __init__(
        self, ops: TensorOps, engine: Any, verifying: Verifying, span: int, slots: int
    ) -> None:
        self.ops = ops
        self.advance = ops.advance(engine, span)
        self.whole_pass = None
        if self.advance is not None:
            self.whole_pass = ops.window_pass(verifying, engine.state, span, slots)

    def __call__(self) -> bool:
        """Do a step; return whether that was possible, else only the cache may have changed."""
        if self.advance is None or self.whole_pass is None:
            return False
        with self.ops.phase("verify"):
            logits = self.whole_pass()
        if logits is None:
            return False
        with self.ops.phase("accept"):
            return self.advance(logits)
