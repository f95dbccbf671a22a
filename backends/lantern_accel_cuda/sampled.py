"""Checks of the sampling kernels on a GPU: filters, draws and the walk down a tree against torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept_sampling
from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import DraftTree, TreeTables
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.sampling import Filter
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP
from lantern_accel.strategy.trees import SMALL_16
from lantern_accel.testing.result import Failed, Measured, within

if TYPE_CHECKING:
    from lantern_accel_cuda.backend import DeviceBackend

#: Largest difference of probabilities, and the share of decisions that rounding may turn.
TOLERANCE = 1e-5
TURNED = 0.01
IMAGES = 32
FILTERS = (
    Filter(0.7, top_k=1000),
    Filter(1.0, top_p=0.9),
    Filter(0.9, top_k=50, top_p=0.8),
    Filter(0.9, top_k=50, top_p=0.8, p_first=True),
)
RULES = (Exact(), Lantern(k=100, delta=0.3), LanternPP(k=10, lam=3.0))


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _uniforms(seed: int, *shape: int) -> Tensor:
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return u.clamp(2.0**-24, 1 - 2.0**-20)


def filters_and_draws(backend: DeviceBackend, sizes: tuple[int, ...] = (1000, 16384)) -> Measured:
    """Compare filters and draws of random rows with torch's operators, and draws with themselves."""
    from lantern_accel_cuda.kernels import sampling

    reference, worst, turned, drawn = TensorOps(), 0.0, 0, 0
    for size in sizes:
        logits = 4 * _numbers(size, 6, size).to(backend.device)
        logits[1, ::3] = float("-inf")
        for given in FILTERS:
            want, got = reference.filter(logits, given), sampling.filter(logits, given)
            assert got is not None
            error = float((got.sort(-1).values - want.sort(-1).values).abs().max())
            worst = max(worst, error)
            within(error, TOLERANCE, f"probabilities of {given}, {size} codes")
            u = _uniforms(size, 6, 8).to(backend.device)
            theirs = reference.draw_without_replacement(want, u)
            ours, again = (sampling.draw(want, u, torch.int64) for _ in range(2))
            assert ours is not None
            assert again is not None
            if not torch.equal(ours, again):
                raise Failed(f"draws from the same {size} weights differ from call to call")
            turned += int((ours != theirs).any(-1).sum())
            drawn += len(u)
    within(turned / drawn, 0.1, "rows whose draws are not torch's")
    return within(worst, TOLERANCE, "filters against torch's operators")


def walks(backend: DeviceBackend, size: int = 4096, images: int = IMAGES) -> Measured:
    """Compare walks down random drafts with the tensor code, rule by rule."""
    from lantern_accel_cuda.kernels import accept, sampling

    device, reference = backend.device, TensorOps()
    tables = TreeTables(SMALL_16.paths)
    topology = tables.topology(images, device)
    logits = 2.5 * _numbers(0, images, tables.nodes, size).to(device)
    inner = topology["inner"]
    seen = logits.gather(1, inner.unsqueeze(-1).expand(-1, -1, size))
    q = (seen + _numbers(1, *seen.shape).to(device)).softmax(-1)
    widest = max(tables.max_children)
    picks = reference.draw_without_replacement(q, _uniforms(1, *q.shape[:-1], widest).to(device))
    group = topology["group"].gather(1, topology["parent"])
    ids = torch.arange(tables.nodes, device=device)
    nth = (ids - topology["first_child"].gather(1, topology["parent"])).clamp(min=0)
    tokens = picks.flatten(1).gather(1, group * widest + nth)
    tree = DraftTree(tokens=tokens, max_children=tables.max_children, q=q, **topology)
    table = neighbour_table(_numbers(2, size, 4), 100).to(device)
    tests = _uniforms(3, images, sum(tables.max_children)).to(device)
    bonus = _uniforms(4, images).to(device)
    given, turned, kept = Filter(0.9), 0, 0
    for rule in RULES:
        dials = torch.tensor(rule.dial_values(), device=device)
        for residual in ("aggregate", "optimal"):
            judged = Rule(rule, residual, table if rule.k else None, dials)
            for one in (tree, replace(tree, q=None, group=None, inner=None)):
                found = accept.accept(one, logits, given, judged, tests, bonus)
                probs = sampling.filter(logits, given)
                assert found is not None
                assert probs is not None
                want = accept_sampling(one, probs, judged, tests, bonus)
                same = (found[0] == want.path).all(1) & (found[1] == want.length)
                turned += int((~same).sum())
                kept += int(found[1].sum())
                error = float((found[3] - want.weights).abs().amax(-1)[same].max())
                within(error, 1e-4, f"weights of the bonus token, {rule.kind}, {residual}")
    if not kept:
        raise Failed("no draft was kept, so the walk was not seen")
    cases = 2 * 2 * len(RULES) * images
    return within(turned / cases, TURNED, "images whose walk is not the tensor code's")
