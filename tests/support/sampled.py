"""Comparisons of a device's filters, guidance and walks with the reference's, whichever device it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.trees import DraftTree
from lantern_accel.device.plan import Filter
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP, NearestCodes
from support.tree_tensors import draft_tree, random_parents

RULES: dict[str, Any] = {
    "exact": Exact(),
    "lantern": Lantern(k=6, delta=0.3),
    "lantern++": LanternPP(k=6, lam=3.0),
}


class Half(NearestCodes):
    """A rule of no paper: half of what is left."""

    def bound_mass(self, px: Tensor, runtime_params: Tensor) -> Tensor:
        return 0.5 * px


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return u.clamp(2.0**-24, 1 - 2.0**-20)


def check_filter(
    run: Callable[[Tensor, Filter], Tensor | None], given: Filter, sizes: Sequence[int]
) -> None:
    """Compare what a filter leaves of rows with ties and gaps, of every size."""
    for size in sizes:
        logits = 4 * normal(size, 3, 2, size)
        logits[0] = logits[0].round()  # many ties
        logits[1, 1, ::3] = float("-inf")
        logits[1, 1, -1] = 0.0
        want, got = REFERENCE.filter(logits, given), run(logits, given)
        assert got is not None
        # Which of some equals stays is the sort's to say; how many is not.
        some = torch.arange(3) > 0 if given.top_p is not None else slice(None)
        assert torch.equal((got > 1e-37)[some], (want > 1e-37)[some])
        assert torch.equal((got > 1e-37).sum(-1), (want > 1e-37).sum(-1))
        assert float((got.sort(-1).values - want.sort(-1).values).abs().max()) < 1e-6


def check_broken_row(run: Callable[[Tensor, Filter], Tensor | None], bad: float) -> None:
    """Look for a number that is not finite in the probabilities of its row, and of no other."""
    logits = normal(1, 2, 40)
    logits[0, 17 if bad != -float("inf") else slice(None)] = bad
    got = run(logits, Filter(top_k=5, top_p=0.5))
    assert got is not None
    assert bool(got[0].isnan().all())
    assert not bool(got[1].isnan().any())


def check_guidance(run: Callable[..., Tensor | None], image_scale: Any, whole: bool) -> None:
    """Compare guided logits, also with penalties and of one branch; ``whole``: one token an image."""
    branches, images, count, size = 2 if image_scale is None else 3, 3, 4, 37
    logits = normal(1, branches * images, count, size)
    scale = torch.tensor([1.0, 4.0, 0.5, 7.5])
    kind = torch.tensor([0, 1, 1, 0])
    penalty = torch.zeros(2, size)
    penalty[1, ::2] = float("-inf")
    token = torch.arange(images) if whole else torch.arange(images * count).view(images, -1) % 4
    for penalties in (None, (kind, penalty)):
        given = logits, token, scale, image_scale, penalties
        torch.testing.assert_close(run(*given), REFERENCE.guide(*given), rtol=1e-6, atol=1e-6)
    plain = logits[:images]
    alone = plain, token, None, None, (kind, penalty)
    got = run(*alone)
    assert got is not None and torch.equal(got, REFERENCE.guide(*alone))
    assert run(plain, token, None, None, None) is plain


def situation(
    seed: int, vocab: int, drawn: bool, batch: int, nodes: tuple[int, int]
) -> tuple[DraftTree, Tensor]:
    """Return a random tree per image, drafted from a guess at the logits that come with it."""
    rng = random.Random(seed)
    count = rng.randint(*nodes)
    shapes = [random_parents(rng, count) for _ in range(batch)]
    logits = 2.5 * normal(seed, batch, count, vocab)
    q = (logits + normal(seed + 1, batch, count, vocab)).softmax(-1)
    picks = REFERENCE.sample(q, uniform(seed, batch, count, 4))
    tokens = torch.zeros(batch, count, dtype=torch.int64)
    for image, parents in enumerate(shapes):
        for node in range(1, count):
            parent = parents[node]
            tokens[image, node] = picks[image, parent, node - parents.index(parent, 1)]
    return draft_tree(shapes, tokens, q=q if drawn else None), logits


def check_walk(got: Sequence[Tensor], want: Sequence[Tensor]) -> tuple[int, int]:
    """Compare the fields of two walks; return how many drafts were kept and images refused all."""
    for mine, other in zip(got[:3], want[:3], strict=True):
        assert torch.equal(mine, other)
    torch.testing.assert_close(got[3], want[3], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[4], want[4], rtol=1e-4, atol=1e-5)
    return int(got[1].sum()), int((got[1] == 0).sum())
