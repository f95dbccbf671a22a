"""Decoding on a device next to the CPU's reference: the same logits, and the same tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured

#: Of float32 logits, relative to the largest: hundreds of roundings of a tiny model, far below a fault.
TOLERANCE = 2e-4


def next_to_cpu(backend: Backend, *, family: str = "", seed: int = 4) -> Measured:
    """Decode a tiny model greedily in float32 and compare every step's logits and tokens with the CPU's.

    ``family``: whose tiny model; "": the first. Raises :class:`Failed` with the first step whose logits
    are off, or the first token that differs. A backend whose steps are fused shows tokens and the
    prefill's logits alone.
    """
    from lantern_accel.device.plugins import open_backend

    with open_backend("cpu", {"native": "off"}) as host, host.inference():
        want, want_logits = _decoded(host, family, seed)
    with backend.inference():
        got, got_logits = _decoded(backend, family, seed)
    worst = 0.0
    for step, (found, reference) in enumerate(zip(got_logits, want_logits, strict=False)):
        if found.shape != reference.shape:
            break  # another way through the same step
        scale = float(reference.abs().max())
        error = float((found - reference).abs().max()) / scale
        if not error <= TOLERANCE:
            at = int((found - reference).abs().nan_to_num(nan=float("inf")).argmax())
            where = f"step {step}" if step else "the prefill"
            raise Failed(
                f"the logits of {where} are off: code {at % found.shape[-1]} has "
                f"{found.flatten()[at]:.6g}, expected {reference.flatten()[at]:.6g}",
                error=error,
                tolerance=TOLERANCE,
            )
        worst = max(worst, error)
    check_tokens(got, want)
    count = min(len(got_logits), len(want_logits))
    return Measured(f"{want.numel()} tokens and {count} logits are the CPU's", worst, TOLERANCE)


def check_tokens(got: Tensor, want: Tensor) -> None:
    """Raise :class:`Failed` with the first token of ``[images, tokens]`` that differs."""
    if got.shape != want.shape:
        raise Failed(f"the tokens have the shape {list(got.shape)}, expected {list(want.shape)}")
    different = (got.cpu() != want.cpu()).nonzero()
    if len(different):
        image, token = (int(index) for index in different[0])
        raise Failed(
            f"token {token} of image {image} is {int(got[image, token])}, expected "
            f"{int(want[image, token])}; the {token} tokens before it agree, {len(different)} of "
            f"{want.numel()} differ in all"
        )


def _decoded(backend: Backend, family: str, seed: int) -> tuple[Tensor, list[Tensor]]:
    engine = tiny.tiny_engine(backend, "vanilla", temperature=0.0, family=family)
    seen: list[Tensor] = []
    real: Any = engine.verifying.guidance

    def noting(*args: Any, **kwargs: Any) -> Any:
        logits = real(*args, **kwargs)
        seen.append(logits.detach().float().cpu().clone())
        return logits

    vars(engine.verifying)["guidance"] = noting
    tiny.start(engine, seed)
    tokens = engine.run(None).tokens.cpu()
    return tokens, seen
