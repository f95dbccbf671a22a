"""The numeric core: acceptance and decoding, each against a reference."""

from __future__ import annotations

import contextlib
import secrets

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept, accept_greedy
from lantern_accel.decoding.logits import Filters
from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import DraftTree, TreeTables
from lantern_accel.device.backend import Backend
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.rules import LanternPP
from lantern_accel.strategy.trees import parse_tree, tree_paths
from lantern_accel.strategy.values import SELF, Coupling, Sampling
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing, within
from lantern_accel.testing.tiny import normal

#: Strategies whose output is the target's, token by token.
EXACT = ("eagle", "eagle2", "sjd", "scd", "scd-gumbel", "sjd-pac", SELF)
#: Those of them that have the papers' coupling, too.
TESTED = tuple(name for name in EXACT if name != SELF)


def _tree(device: torch.device, tokens: Tensor, vocab: int, sampled: bool) -> DraftTree:
    tables = TreeTables(tree_paths(parse_tree("0,1,2,00,01,10,000")))
    batch = tokens.shape[0]
    topology = tables.topology(batch, device)
    group = topology.pop("group")
    q = normal(9, batch, tables.groups, vocab).softmax(-1).to(device) if sampled else None
    return DraftTree(
        tokens=tokens.to(device),
        max_children=tables.max_children,
        q=q,
        group=group if sampled else None,
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
        tree = _tree(backend.device, torch.tensor([tokens]), vocab, sampled=False)
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
                tree = _tree(device, tokens, vocab, sampled)
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


def greedy(backend: Backend) -> Measured:
    """Decode greedily in float32: every exact strategy gives vanilla's tokens."""
    count = _like_vanilla(backend, "is not vanilla token for token", batch=2, temperature=0.0)
    return Measured(f"{count} exact strategies give vanilla's tokens")


def seeds(backend: Backend) -> Measured:
    """Sample in float32: a seed gives the same tokens under every exact strategy, and in a batch."""
    count = _like_vanilla(backend, "does not draw vanilla's tokens", batch=3, temperature=1.0)
    return Measured(f"{count} exact strategies draw vanilla's tokens")


def _like_vanilla(backend: Backend, wrong: str, *, batch: int, temperature: float) -> int:
    """Return how many exact strategies were compared with vanilla decoding of their family."""
    compared = 0
    for family, strategy in tiny.cases(("vanilla", *EXACT)):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(
            backend, strategy, batch=batch, temperature=temperature, family=family
        )
        got = tiny.decoded(engine, 4)
        if strategy == "vanilla":
            want = got
        elif not torch.equal(got, want):
            raise Failed(f"{family}: {strategy} {wrong} in float32")
        compared += strategy != "vanilla"
    return compared


def allowed(backend: Backend) -> Measured:
    """Decode models that force codes, such as the end of a row: each stands where it must."""
    checked = 0
    for family, strategy in tiny.cases(("vanilla", "eagle2", "lantern++")):
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
        rule = engine.verifying.target.allowed()
        if rule is None:
            continue
        doing(f"{family}, {strategy}")
        tokens = tiny.decoded(engine, 5).cpu()
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
    """Sample thousands of images' tokens by the papers' coupling: the second follows vanilla's law."""
    counts: dict[tuple[str, str], Tensor] = {}
    worst = 0.0
    for family, strategy in tiny.cases(("vanilla", *TESTED)):
        doing(f"{family}, {strategy}")
        coupling: Coupling = "invariant" if strategy == "vanilla" else "maximal"
        engine = tiny.tiny_engine(backend, strategy, batch=256, family=family, coupling=coupling)
        vocab = engine.geometry.vocab
        seen = torch.zeros(vocab)
        for seed in range(10):
            tiny.load(engine, seed, alike=True)
            engine.prefill()
            engine.step()
            seen += torch.bincount(engine.state.tokens[:, 1].cpu(), minlength=vocab)
        counts[family, strategy] = seen
        if strategy != "vanilla":
            worst = max(worst, _misfit(counts[family, "vanilla"], seen))
    return within(worst, 4.5, "second token's law, in standard deviations")


def _misfit(a: Tensor, b: Tensor) -> float:
    """Return how far two counts are from one law, as a standard normal's deviate."""
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


def interrupted(backend: Backend) -> Measured:
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
            tiny.decoded(engine, 1, None, step)
        for seed, tokens in zip((1, 2, 3), want, strict=True):
            if not torch.equal(tiny.decoded(engine, seed), tokens):
                raise Failed(
                    f"a request was cancelled after {at} steps, and request {seed} after it differs "
                    "from a fresh engine's: what it left behind is read (see HostCopy.clear)"
                )
    return Measured("three requests after each of two cancelled ones are a fresh engine's")


def weights_from_outside(backend: Backend) -> Measured:
    """Decode with weights made outside of any inference mode, as a loaded model's are."""
    with torch.inference_mode(False), torch.no_grad():
        model = tiny.tiny_model(backend, backend.device, torch.float32)
    outside = tiny.decoded(tiny.tiny_engine(backend, "lantern++", model=model), 3)
    if not torch.equal(outside, tiny.decoded(tiny.tiny_engine(backend, "lantern++"), 3)):
        raise Failed("weights made inside the inference mode give other tokens than those outside")
    return Measured("weights made outside the inference mode decode like those made inside")
