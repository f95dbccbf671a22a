"""Compares filters, guidance, running sums and draws of a device with float64 on the host."""

from __future__ import annotations

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.plan import Filter
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.testing.result import Failed, Measured, within
from lantern_accel.testing.tiny import normal

#: A small vocabulary, and LlamaGen's.
VOCABS = (48, 16384)
FILTERS = (
    Filter(0.8),
    Filter(1.2, top_k=20),
    Filter(1.0, top_p=0.9),
    Filter(1.0, top_k=30, top_p=0.8),
    Filter(1.0, top_k=12, top_p=0.95, p_first=True),
)


def _on(given: Filter, device: torch.device) -> Filter:
    """Return the filter with its values as a step has them, tensors on the device."""
    top_p = given.top_p
    if top_p is not None:
        top_p = torch.tensor([float(top_p)], device=device)
    return Filter(
        torch.tensor([float(given.temperature)], device=device), given.top_k, top_p, given.p_first
    )


def filters(backend: Backend) -> Measured:
    """Filter logits by every setting: the same codes stay as in float64, with the same mass."""
    worst = 0.0
    for vocab in VOCABS:
        logits = 3 * normal(vocab, 2, 3, vocab)
        for given in FILTERS:
            want = REFERENCE.filter(logits.double(), given)
            got = backend.filter(logits.to(backend.device), _on(given, backend.device)).cpu()
            if got.dtype != torch.float32 or got.shape != want.shape:
                raise Failed(f"{given}: {got.dtype} of shape {tuple(got.shape)}, not float32")
            if not torch.equal(got > 0, want > 0):
                other = int(((got > 0) != (want > 0)).sum())
                raise Failed(f"{given}, {vocab} codes: {other} codes stay or go otherwise")
            worst = max(worst, float((got - want).abs().max()))
    return within(worst, 1e-5, "filtered probabilities against float64")


def guidance(backend: Backend) -> Measured:
    """Combine branches of two and three rows, with codes that may not be; scale 1 changes no bit."""
    worst = 0.0
    vocab, images, count = 48, 2, 3
    scale = torch.tensor([1.0, 4.0, 7.5])
    kind, penalty = torch.tensor([1, 0, 1]), torch.zeros(2, vocab)
    penalty[1, ::2] = -1e30
    token = torch.tensor([[0, 1, 2], [2, 0, 1]])
    for image_scale in (None, 1.3):
        rows = images * (2 if image_scale is None else 3)
        logits = normal(rows, rows, count, vocab)
        for penalties in (None, (kind, penalty)):
            want = REFERENCE.guide(logits.double(), token, scale.double(), image_scale, penalties)
            to = backend.device
            moved = None
            if penalties is not None:
                moved = (kind.to(to, backend.index), penalty.to(to))
            got = backend.guide(
                logits.to(to), token.to(to, backend.index), scale.to(to), image_scale, moved
            ).cpu()
            worst = max(worst, float(((got - want) / want.abs().clamp(min=1)).abs().max()))
            if penalties is None and not torch.equal(got[0, 0], logits[0, 0]):
                raise Failed("a scale of 1 is not the conditional row, bit for bit")
    return within(worst, 1e-5, "guided logits against float64")


def draws(backend: Backend) -> Measured:
    """Draw one code, and several without replacement: each lies where its uniform points."""
    drawn = 0
    for vocab in VOCABS:
        weights = (4 * normal(vocab, 16, vocab)).softmax(-1)
        weights[:, ::3] = 0.0
        u = torch.rand(16, 4, generator=torch.Generator().manual_seed(vocab)).clamp(max=0.999999)
        given, at = weights.to(backend.device), u.to(backend.device)
        picks = backend.draw_without_replacement(given, at)
        if picks.dtype != backend.index:
            raise Failed(f"codes are {picks.dtype}, but the device's index is {backend.index}")
        if not torch.equal(picks[:, 0], backend.draw(given, at[:, 0])):
            raise Failed("the first of several draws is not the draw of one")
        left = weights.double()
        for r, codes in enumerate(picks.cpu().long().unbind(1)):
            own = left.gather(1, codes.unsqueeze(1)).squeeze(1)
            if not bool((own > 0).all()):
                raise Failed(
                    f"{vocab} codes: draw {r + 1} took a code twice, or one without weight"
                )
            ends = left.cumsum(-1)
            aim, end = u[:, r] * ends[:, -1], ends.gather(1, codes.unsqueeze(1)).squeeze(1)
            within(float(torch.maximum(end - own - aim, aim - end).max()), 1e-5, "draws")
            left = left.scatter(1, codes.unsqueeze(1), 0.0)
            drawn += len(codes)
    return Measured(f"{drawn} draws lie where their uniforms point")


#: Codes of the vocabularies that draws are checked on, LlamaGen's and Anole's among them.
SUMMED = (48, 1000, 16384, 65536)


def scan(backend: Backend) -> Measured:
    """Sum weights up and draw by them: never falling, the same every time, and no code without weight."""
    drawn = 0
    for vocab in SUMMED:
        for rows in (1, 3):
            sharp = 6 * normal(vocab + rows, rows, vocab)
            weights = sharp.softmax(-1)
            weights[:, ::3] = 0.0  # as the filters leave them
            given = weights.to(backend.device)
            first = backend.scan(given).cpu()
            for _ in range(10):
                if not torch.equal(backend.scan(given).cpu(), first):
                    raise Failed(f"{vocab} codes, {rows} rows: the same weights give other sums")
            if not bool((first.diff(dim=-1) >= 0).all()):
                raise Failed(f"{vocab} codes, {rows} rows: the running sums fall")
            exact = weights.double().cumsum(-1)
            within(float((first - exact).abs().max()), 1e-5, f"running sums of {vocab} codes")
            uniforms = torch.rand(512, generator=torch.Generator().manual_seed(vocab))
            for row in range(rows):
                codes = torch.searchsorted(first[row], uniforms * first[row, -1], right=True)
                if not bool((weights[row, codes] > 0).all()):
                    raise Failed(f"{vocab} codes, {rows} rows: a code without weight was drawn")
                low = exact[row, codes] - weights[row, codes].double()
                aim = uniforms.double() * exact[row, -1]
                off = torch.maximum(low - aim, aim - exact[row, codes]).max()
                within(float(off), 1e-5, f"draws from {vocab} codes")
                drawn += len(codes)
    return Measured(f"{drawn} draws from sums that never fall and repeat bit for bit")
