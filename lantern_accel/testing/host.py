"""A device next to the host: logits and tokens of tiny models, by the reference's operators there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.device.context import inferring
from lantern_accel.families.registry import family_names
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, compare, doing, left_to_reference

#: Of float32 logits, relative to the largest: hundreds of roundings of a tiny model, far below a fault.
NEAR = 2e-4
#: The logit of what is not a code but stands for one that may not be.
FORBIDDEN = -1e4
TIE = "is nearly a tie"
#: Requests of a check: further ones where the one before met a decision within a rounding of its edge.
SEEDS = (4, 5, 6)


@dataclass(frozen=True)
class Request:
    """What one request gave: tokens ``[images, N]``, steps of each image, and every pass's logits."""

    tokens: Tensor
    steps: Tensor
    logits: list[Tensor]


class _Noting:
    """Guidance that keeps the logits it gives."""

    def __init__(self, real: Callable[..., Tensor]) -> None:
        self.real, self.seen = real, list[Tensor]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        logits = self.real(*args, **kwargs)
        self.seen.append(logits.detach().float().cpu().clone())
        return logits


def _decode(engine: tiny.TinyEngine, seed: int) -> Request:
    tiny.start(engine, seed)
    done = engine.run(None)
    return Request(done.tokens.cpu(), done.steps.cpu(), [])


def _start_request(engine: tiny.TinyEngine, seed: int) -> Request:
    noting = _Noting(engine.verifying.guidance)
    vars(engine.verifying)["guidance"] = noting
    return replace(_decode(engine, seed), logits=noting.seen)


@inferring
def next_to_cpu(backend: Backend, *, family: str = "", seed: int = 4) -> Measured:
    """Decode a tiny model greedily in float32 and compare every step's logits and tokens with the CPU's.

    ``family``: whose tiny model; "": the first. Raises :class:`Failed` with the first step whose logits
    are off, or the first token that differs. A backend whose steps are fused shows tokens and the
    prefill's logits alone. From a token on whose two likeliest codes are nearer to each other than logits
    may be off, another image is as right: what follows is not compared, and that is reported.
    """
    want, got = (
        _start_request(tiny.tiny_engine(ops, "vanilla", temperature=0.0, family=family), seed)
        for ops in (REFERENCE, backend)
    )
    until, tie = want.tokens.shape[1], ""
    for step, reference in enumerate(want.logits):
        two = reference[0, -1].topk(2).values
        if float(two[0] - two[1]) <= 2 * NEAR * _scale(reference) and step < until:
            until = step
            tie = f"; token {step} {TIE}, so it and those behind it are not compared"
    worst, count = 0.0, 0
    for step, (found, reference) in enumerate(zip(got.logits, want.logits, strict=False)):
        if found.shape != reference.shape:
            break  # another way through the same step
        if step > until:
            break
        worst = max(
            worst, _compare_with_host(found, reference, f"step {step}" if step else "the prefill")
        )
        count += 1
    check_tokens(got.tokens[:, :until], want.tokens[:, :until])
    told = f"{want.tokens[:, :until].numel()} tokens and {count} logits are the CPU's{tie}"
    return Measured(told, worst, NEAR)


def _scale(reference: Tensor) -> float:
    return float(reference[reference > FORBIDDEN].abs().max())


def _compare_with_host(found: Tensor, reference: Tensor, where: str) -> float:
    """Return how far logits are from the host's, as a share of the largest; raise where too far."""
    may, scale = reference > FORBIDDEN, _scale(reference)
    if not bool((found <= FORBIDDEN)[~may].all()):
        raise Failed(f"the logits of {where}: a code that may not be has one")
    got, want = (torch.where(may, logits, 0.0) for logits in (found, reference))
    return (
        compare(got, want.double(), NEAR * scale, f"the logits of {where}").error or 0.0
    ) / scale


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


def cpu(backend: Backend) -> Measured:
    """Decode a tiny model of every family greedily: its logits and its tokens are the CPU's."""
    worst, told = 0.0, []
    for family in family_names():
        doing(family)
        for seed in SEEDS:
            try:
                found = next_to_cpu(backend, family=family, seed=seed)
            except Failed as failure:
                raise Failed(f"{family}: {failure}", **failure.figures) from None
            worst = max(worst, found.error or 0.0)
            if TIE not in found.detail:
                break
        told.append(f"{family}: {found.detail}")
    return Measured("; ".join(told), worst, NEAR)


#: No drafts, a dynamic tree, a static one under a relaxed rule, a window, and one by a draft head.
DRAWN = ("vanilla", "eagle2", "lantern++", "scd", tiny.BY_HEAD)


def host_requests(backend: Backend) -> Measured:
    """Sample requests by every kind of step: tokens are the CPU's, and as many drafts are kept.

    A strategy whose drafts are wrong gives right tokens, in more steps. Plain decoding draws two
    requests, so that what is kept of the first, such as noise, shows in the second.
    """
    tokens, turned = 0, []
    cases = tiny.cases(DRAWN)
    for family, strategy in cases:
        if family != cases[0][0] and strategy != "vanilla":
            continue  # their arithmetic shows in plain decoding, their steps in the first family's
        doing(f"{family}, {strategy}")
        theirs, ours = (
            tiny.tiny_engine(ops, strategy, family=family) for ops in (REFERENCE, backend)
        )
        if strategy == tiny.BY_HEAD:
            _compare_guesses(ours, theirs, f"{family}, {strategy}")
        wrong: list[str] = []
        for number, seed in enumerate(SEEDS):
            if number > (strategy == "vanilla") and not wrong:
                break
            want, got = (_decode(engine, seed) for engine in (theirs, ours))
            tokens += want.tokens.numel()
            if fault := _differs(got, want):
                wrong.append(f"request {seed}: {fault}")
        if len(wrong) > 1:
            raise Failed(f"{family}, {strategy}: {wrong[0]}")
        turned += [f"{family}, {strategy}"] * len(wrong)
    edge = f"; one request by {' and '.join(turned)} met a draw at its edge" if turned else ""
    told = left_to_reference(backend, "fused_step")
    return Measured(f"{tokens} sampled tokens are the CPU's, in as many steps{edge}{told}")


def _compare_guesses(ours: tiny.TinyEngine, theirs: tiny.TinyEngine, where: str) -> None:
    """Hold the guesses of a draft head, which lie among the tokens, to the host's for three steps."""
    for engine in (ours, theirs):
        tiny.start(engine, SEEDS[0])
    drafts = ours.geometry.nodes - 1
    for step in range(4):
        found, want = (engine.state.tokens[:, :-1].cpu() for engine in (ours, theirs))
        wrong = int((found != want).sum())
        # A draft that is chosen within a rounding may be another, and those behind it with it.
        if wrong > drafts // 2:
            raise Failed(
                f"{where}: after {step} steps {wrong} of {drafts} drafts are not the CPU's, which "
                "costs steps"
            )
        for engine in (ours, theirs):
            engine.step()


def _differs(got: Request, want: Request) -> str:
    """Say how a request differs from the host's; "": not at all."""
    try:
        check_tokens(got.tokens, want.tokens)
    except Failed as failure:
        return str(failure)
    steps = int(got.steps.sum()), int(want.steps.sum())
    if steps[0] == steps[1]:
        return ""
    return (
        f"its tokens are right, in {steps[0]} steps where the CPU takes {steps[1]}: its drafts are not "
        "the CPU's"
    )
