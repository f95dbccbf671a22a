"""What follows a pass, against the papers' tensor code on the host: windows, drafts by noise.

The host computes in float64; where a decision is within a rounding of its edge, one image may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept_invariant
from lantern_accel.decoding.logits import Filters, TokenChooser
from lantern_accel.decoding.maximal_coupling import couple
from lantern_accel.device.backend import Backend
from lantern_accel.device.noise import noise_keys
from lantern_accel.device.sampling import FLOOR
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing.numeric import drafted_tree
from lantern_accel.testing.result import Failed, Measured, compare, doing, left_to_reference
from lantern_accel.testing.tiny import normal
from lantern_accel.testing.tolerances import FLOAT32

#: Images of a comparison, and how many of them a rounding may turn.
IMAGES, TURNED = 32, 1
#: Share by which sums of probabilities in float32 may differ.
NEAR = 64 * FLOAT32


def _laws(seed: int, *shape: int) -> Tensor:
    """Return distributions of which half the codes have none."""
    weights = normal(seed, *shape)
    weights = torch.where(weights > 0, weights**4, 0.0)
    weights[..., -1] += 0.01
    return weights / weights.sum(-1, keepdim=True)


def _uniforms(seed: int, *shape: int) -> Tensor:
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return u.clamp(2.0**-24, 1 - 2.0**-22)


def _alike(what: str, *pairs: tuple[str, Tensor, Tensor]) -> Tensor:
    """Return the images of which all pairs, found and expected, are equal; most have to be."""
    same = torch.ones(IMAGES, dtype=torch.bool)
    for name, found, want in pairs:
        if found.shape != want.shape:
            raise Failed(
                f"{what}: {name} has the shape {list(found.shape)}, expected {list(want.shape)}"
            )
        own = (found.cpu().long() == want.long()).view(IMAGES, -1).all(1)
        if int((~own).sum()) > TURNED:
            image = int((~own).nonzero()[0, 0])
            raise Failed(
                f"{what}: {name} of {int((~own).sum())} of {IMAGES} images differ; image {image} has "
                f"{found[image].tolist()}, expected {want[image].tolist()}"
            )
        same &= own
    return same


def window(backend: Backend) -> Measured:
    """Test windows of drafts, and draw again from the first that fails on: tokens and counts."""
    vocab, windows = 33, 0
    for length in (2, 7, 16):
        doing(what := f"a window of {length}")
        p, q = _laws(1, IMAGES, length, vocab), _laws(2, IMAGES, length - 1, vocab)
        q[::2] = 0.3 * q[::2] + 0.7 * p[::2, :-1]  # several are kept
        q[0] = p[0, :-1]  # nothing is left
        x = REFERENCE.sample(q, _uniforms(3, IMAGES, length - 1))
        tests, draws = _uniforms(4, IMAGES, length - 1), _uniforms(5, IMAGES, length)
        want = couple(x, p.double(), q.double(), tests, draws)
        to = backend.device
        given = x.to(to, backend.index), p.to(to), q.to(to), tests.to(to), draws.to(to)
        got = couple(*given, draw=backend.sample)
        count = got.count.expand(IMAGES)
        _alike(what, ("count", count, want.count), ("tokens", got.tokens, want.tokens))
        windows += IMAGES
    return Measured(f"{windows} windows decided alike")


def _share(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def invariant(backend: Backend) -> Measured:
    """Walk down trees whose drafts noise chose: the path, its length and the token after it."""
    vocab, nodes = 24, 8
    keys = noise_keys(5, range(IMAGES))
    length = torch.arange(IMAGES) % 7
    logits = 2 * normal(7, IMAGES, nodes, vocab)
    device, sampling = backend.device, Sampling(top_k=12)
    host = TokenChooser(keys, Filters(sampling, 0.9, 1.0), False)
    # Drafts that are the target's own choice where the parent is on the path, and others next to them.
    blank = drafted_tree(torch.device("cpu"), torch.zeros(IMAGES, nodes).long(), vocab, False)
    deep = length.unsqueeze(1) + (blank.depth + 1)
    chosen = host.of(host.filters.ops.filter(logits, host.filters.given), deep)
    tokens = (torch.arange(nodes) + chosen.gather(1, blank.parent)) % vocab
    lucky = _uniforms(3, IMAGES, nodes) < 0.6
    first = torch.arange(nodes) == blank.first_child.gather(1, blank.parent)
    tokens = torch.where(first & lucky, chosen.gather(1, blank.parent), tokens)
    tree = drafted_tree(torch.device("cpu"), tokens, vocab, False)
    want = accept_invariant(tree, logits.double(), host, length)
    ours = drafted_tree(device, tokens.to(backend.index), vocab, False)
    choices = TokenChooser(keys.to(device), Filters(sampling, 0.9, 1.0, backend), False)
    given = logits.to(device), length.to(device, backend.index)
    by = backend.accept_invariant(ours, given[0], choices.filters.given, choices.keys, given[1])
    got = accept_invariant(ours, given[0], choices, given[1])
    _alike(
        "drafts by noise", ("length", got.length, want.length), ("path", got.path, want.path),
        ("bonus", got.bonus, want.bonus),
    )  # fmt: skip
    kept = int(want.length.sum())
    told = "; the reference serves accept_invariant" if by is None else ""
    return Measured(f"{IMAGES} walks keep {kept} drafts, as in float64{told}")


def likeliest(backend: Backend) -> Measured:
    """Choose the likeliest codes, with noise and without, and the best of values: as in float64."""
    rows = 0
    for vocab, count in ((48, 3), (1003, 10), (16384, 10)):
        doing(f"{count} of {vocab} codes")
        weights = (2 * normal(vocab, 2, 5, vocab)).softmax(-1)
        weights[0, :, ::2] = 0.0
        weights = weights / weights.sum(-1, keepdim=True)
        luck = 1 / (_uniforms(vocab, 2, 1, vocab) + 0.01)
        values = normal(vocab + 1, 2, 5, vocab)
        to = backend.device
        for name, found, scores in (
            ("likeliest", backend.likeliest(weights.to(to), count), weights.double()),
            ("likeliest, with noise", backend.likeliest(weights.to(to), count, luck.to(to)),
             _share(weights.double() * luck.double())),
            ("best", backend.best(values.to(to), count), None),
        ):  # fmt: skip
            want = values.double() if scores is None else scores.log().clamp(min=FLOOR)
            _check_ranking(f"{name} of {vocab} codes", found, want, backend.index)
            rows += 10
    return Measured(
        f"{rows} rows give their largest codes{left_to_reference(backend, 'likeliest', 'best')}"
    )


def _check_ranking(
    what: str, found: tuple[Tensor, Tensor], want: Tensor, index: torch.dtype
) -> None:
    """Hold the largest values and their places to all values in float64; equal ones in any order."""
    values, places = found[0].cpu().double(), found[1].cpu()
    count = values.shape[-1]
    best = want.topk(count, dim=-1).values
    if places.dtype != index or found[0].dtype != torch.float32:
        raise Failed(f"{what}: values are {found[0].dtype} and codes {places.dtype}, not {index}")
    # A logarithm of a share that is off by some roundings, and is rounded.
    near = 8 * FLOAT32 * (1 + best.abs())
    for name, got in (("values", values), ("values of the codes", want.gather(-1, places.long()))):
        compare(got, best, near, f"{what}: {name}")
    if bool((places.sort(-1).values.diff(dim=-1) == 0).any()):
        raise Failed(f"{what}: a code is chosen twice")
