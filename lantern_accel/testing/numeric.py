"""The numeric core: acceptance, decoding, filters, guidance and draws, each against a reference."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept, accept_greedy
from lantern_accel.decoding.logits import Filters
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import DraftTree, topology_of
from lantern_accel.device.backend import Backend
from lantern_accel.device.plan import Filter
from lantern_accel.nn.neighbours import neighbour_table
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.rules import LanternPP
from lantern_accel.strategy.trees import TreeTables, parse_drafts, tree_paths
from lantern_accel.strategy.values import SELF, Coupling, Sampling
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing, within
from lantern_accel.testing.tiny import normal

#: Strategies whose output is the target's, token by token.
EXACT = ("eagle", "eagle2", "sjd", "scd", SELF, tiny.BY_HEAD)
#: Those of them that have the papers' coupling, too.
TESTED = ("eagle", "eagle2", "sjd")


def drafted_tree(device: torch.device, tokens: Tensor, vocab: int, sampled: bool) -> DraftTree:
    """Return a small tree of drafts ``tokens [B, 8]``; ``sampled``: from seeded distributions."""
    tables = TreeTables(tree_paths(parse_drafts("0,1,2,00,01,10,000")))
    batch = tokens.shape[0]
    topology = topology_of(tables, batch, device)
    group, inner = topology.pop("group"), topology.pop("inner")
    q = normal(9, batch, tables.groups, vocab).softmax(-1).to(device) if sampled else None
    return DraftTree(
        tokens=tokens.to(device),
        max_children=tables.max_children,
        q=q,
        group=group if sampled else None,
        inner=inner if sampled else None,
        **topology,
    )


def ties(backend: Backend) -> Measured:
    """Give logits with equal maxima: the lower code is the argmax, the first of equal paths wins."""
    vocab, nodes = 16, 8
    logits = torch.zeros(1, nodes, vocab)
    logits[..., 3] = logits[..., 9] = 2.0
    for tokens, length, bonus in (
        ([5, 9, 3, 1, 3, 9, 3, 3], 2, 3),
        ([5, 3, 9, 1, 9, 3, 3, 9], 2, 3),
        ([5, 9, 1, 9, 3, 3, 3, 3], 0, 3),
    ):
        tree = drafted_tree(backend.device, torch.tensor([tokens]), vocab, sampled=False)
        found = accept_greedy(tree, logits.to(backend.device), Rule(LanternPP(k=1, lam=1.0)))
        if (int(found.length), int(found.bonus)) != (length, bonus):
            raise Failed(
                f"drafts {tokens} among equal logits: kept {int(found.length)} drafts and code "
                f"{int(found.bonus)}, the lower code wins: {length} and {bonus}"
            )
    return Measured("ties go to the lower code and the first path")


def decisions(backend: Backend) -> Measured:
    """Give logits and uniforms: the decisions are those of the reference on the host."""
    vocab, nodes, batch = 24, 8, 64
    logits = 2 * normal(7, batch, nodes, vocab)
    tokens = normal(10, batch, vocab).argsort(-1)[:, :nodes]
    uniforms = torch.rand(batch, 16, generator=torch.Generator().manual_seed(8)).clamp(
        1e-6, 0.999999
    )
    table = neighbour_table(normal(6, vocab, 3), 5)
    compared = 0
    for sampled in (False, True):
        for lam in (1.0, 3.0):
            got = []
            for ops in (backend, REFERENCE):
                device = ops.device
                tree = drafted_tree(device, tokens, vocab, sampled)
                runtime_params = torch.tensor([lam], device=device)
                rule = Rule(LanternPP(k=5, lam=lam), "aggregate", table.to(device), runtime_params)
                u = uniforms.to(device)
                filters = Filters(Sampling(top_k=20), 0.9, 1.0, ops)
                tests = sum(tree.max_children)
                found = accept(tree, logits.to(device), filters, rule, u[:, :tests], u[:, -1])
                got.append([t.cpu() for t in (found.path, found.length, found.bonus)])
            for one, other in zip(*got, strict=True):
                if not torch.equal(one, other):
                    raise Failed(f"lambda {lam:g}, sampled {sampled}: decisions differ")
            compared += batch
    return Measured(f"{compared} walks decided alike")


def like_vanilla(
    gives: str, *, temperature: float, others: tuple[str, ...]
) -> Callable[[Backend], Measured]:
    """Return the check that exact strategies give vanilla's tokens in float32, two images at once.

    The first family's all do, and ``others`` with each further family.
    """

    def check(backend: Backend) -> Measured:
        def decode(family: str, strategy: str) -> Tensor:
            doing(f"{family}, {strategy}")
            engine = tiny.tiny_engine(
                backend, strategy, batch=2, temperature=temperature, family=family
            )
            return tiny.decode_tokens(engine, 4)

        compared = tiny.cases(EXACT, others)
        want: dict[str, Tensor] = {}
        for family, strategy in compared:
            if family not in want:
                want[family] = decode(family, "vanilla")
            if not torch.equal(decode(family, strategy), want[family]):
                raise Failed(f"{family}: {strategy} does not {gives} vanilla's tokens in float32")
        return Measured(f"{len(compared)} exact strategies {gives} vanilla's tokens")

    return check


def forced_codes(backend: Backend) -> Measured:
    """Decode models that force codes, such as the end of a row: each stands where it must."""
    checked = 0
    for family, strategy in tiny.cases(("vanilla", "eagle2", "lantern++"), turn=0):
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
        rule = engine.verifying.target.allowed_codes()
        if rule is None:
            continue
        doing(f"{family}, {strategy}")
        tokens = tiny.decode_tokens(engine, 5).cpu()
        penalty = rule.penalty.cpu()[rule.kind.cpu().long()]
        wrong = (penalty.gather(1, tokens.t()) < 0).nonzero()
        if len(wrong):
            token = int(wrong[0, 0])
            raise Failed(f"{family}, {strategy}: token {token} is a code that may not stand there")
        checked += tokens.numel()
    if not checked:
        raise NotApplicable("no installed family forces codes")
    return Measured(f"{checked} tokens are codes that may stand where they do")


def distribution(backend: Backend) -> Measured:
    """Sample thousands of images' tokens by the papers' coupling: the second is as vanilla's."""

    def count(family: str, strategy: str, coupling: Coupling) -> Tensor:
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, batch=256, family=family, coupling=coupling)
        vocab = engine.geometry.vocab
        seen = torch.zeros(vocab)
        for seed in range(10):
            tiny.load(engine, seed, alike=True)
            engine.prefill()
            engine.step()
            seen += torch.bincount(engine.state.tokens[:, 1].cpu(), minlength=vocab)
        return seen

    compared = tiny.cases(TESTED, ())
    want = count(compared[0][0], "vanilla", "invariant")
    worst = max(_misfit(want, count(*one, "maximal")) for one in compared)
    return within(worst, 4.5, "second token's distribution, in standard deviations")


def _misfit(a: Tensor, b: Tensor) -> float:
    """Return how far two counts are from one distribution, as a standard normal's deviate."""
    used = (a + b) > 8
    chi = ((a - b).square() / (a + b).clamp(min=1))[used].sum()
    degrees = float(used.sum() - 1)
    if degrees < 1:
        return 0.0 if torch.equal(a > 0, b > 0) else float("inf")
    # Wilson-Hilferty: chi-square to a standard normal.
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    return float(z)


class _Cancelled(Exception):
    """What the check raises in place of a user's Ctrl-C."""


def cancelled_requests(backend: Backend) -> Measured:
    """Cancel requests at random steps: the three after each are those of a fresh engine."""
    fresh = tiny.tiny_engine(backend, "lantern++")
    want, steps = [], 0
    for seed in (1, 2, 3):
        tiny.start(fresh, seed)
        decoded = fresh.run()
        want.append(decoded.tokens)
        steps = steps or int(decoded.steps.max())
    engine = tiny.tiny_engine(backend, "lantern++")
    g = engine.geometry
    looked = -(-(g.tokens - 1) // (g.depth + 1))  # from this step on the host looks at every step
    drawn = torch.Generator().manual_seed(secrets.randbits(31))
    for _ in range(2):
        last = max(looked + 1, steps - 1)
        at = int(torch.randint(looked + 1, last + 1, (1,), generator=drawn))
        left = at

        def step() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise _Cancelled
            engine.step()

        with contextlib.suppress(_Cancelled):
            tiny.decode_tokens(engine, 1, None, step)
        for seed, tokens in zip((1, 2, 3), want, strict=True):
            if not torch.equal(tiny.decode_tokens(engine, seed), tokens):
                raise Failed(
                    f"a request was cancelled after {at} steps, and request {seed} after it differs "
                    "from a fresh engine's: what it left behind is read (see HostCopy.clear)"
                )
    return Measured("three requests after each of two cancelled ones are a fresh engine's")


def weights_from_outside(backend: Backend) -> Measured:
    """Decode with weights made outside of any inference mode, as a loaded model's are."""
    with torch.inference_mode(False), torch.no_grad():
        model = tiny.tiny_model(backend, backend.device, torch.float32)
    outside = tiny.decode_tokens(tiny.tiny_engine(backend, "lantern++", model=model), 3)
    if not torch.equal(outside, tiny.decode_tokens(tiny.tiny_engine(backend, "lantern++"), 3)):
        raise Failed("weights made inside the inference mode give other tokens than those outside")
    return Measured("weights made outside the inference mode decode like those made inside")


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
    tables = backend.tables(0, backend.device).filter
    made = () if tables is None else (tables,)
    for vocab in VOCABS:
        logits = 3 * normal(vocab, 2, 3, vocab)
        for given in FILTERS:
            want = REFERENCE.filter(logits.double(), given)
            there = logits.to(backend.device), _on(given, backend.device)
            got = backend.filter(*there, *made).cpu()
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


def samples(backend: Backend) -> Measured:
    """Sample one code, and several without replacement: each lies where its uniform points."""
    drawn = 0
    for vocab in VOCABS:
        weights = (4 * normal(vocab, 16, vocab)).softmax(-1)
        weights[:, ::3] = 0.0
        u = torch.rand(16, 4, generator=torch.Generator().manual_seed(vocab)).clamp(max=0.999999)
        given, at = weights.to(backend.device), u.to(backend.device)
        sums = backend.tables(vocab, backend.device).sums
        rest = () if sums is None else (sums,)
        picks = backend.sample(given, at, *rest)
        if picks.dtype != backend.index:
            raise Failed(f"codes are {picks.dtype}, but the device's index is {backend.index}")
        if not torch.equal(picks[:, 0], backend.sample(given, at[:, 0], *rest)):
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
                    raise Failed(f"{vocab} codes, {rows} rows: a code without weight was sampled")
                low = exact[row, codes] - weights[row, codes].double()
                aim = uniforms.double() * exact[row, -1]
                off = torch.maximum(low - aim, aim - exact[row, codes]).max()
                within(float(off), 1e-5, f"draws from {vocab} codes")
                drawn += len(codes)
    return Measured(f"{drawn} draws from sums that never fall and repeat bit for bit")
