"""The numeric core: caches, attention, acceptance, decoding and replay, each against a reference."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Rule, accept
from lantern_accel.decoding.greedy import accept_greedy
from lantern_accel.decoding.logits import REFERENCE, Filters
from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.decoding.trees import DraftTree, TreeTables, parse_tree, tree_paths
from lantern_accel.device.backend import DTYPES, Backend, recorded
from lantern_accel.device.operations import KVCache
from lantern_accel.strategy.values import STRATEGIES, LanternPP, Sampling
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing, within

#: Largest error of attention against float64, relative to values of about 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: Strategies whose output is the target's, token by token.
EXACT = ("eagle", "eagle2", "sjd", "scd", "scd-gumbel", "sjd-pac")
LAYERS, ROWS, CAPACITY, HEADS, WIDTH = 2, 4, 29, 3, 16


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _dtypes(backend: Backend) -> list[torch.dtype]:
    return [dtype for name, dtype in DTYPES.items() if backend.support(name)]


def _filled(backend: Backend, dtype: torch.dtype) -> tuple[KVCache, Tensor, Tensor]:
    """Return a cache with known random content, and that content: k, v [layers, R, L, H, d]."""
    layout = backend.kv_layout(LAYERS, ROWS, CAPACITY, HEADS, WIDTH, dtype)
    cache = backend.allocate(layout)
    k = _random(1, LAYERS, ROWS, CAPACITY, HEADS, WIDTH).to(dtype)
    v = _random(2, LAYERS, ROWS, CAPACITY, HEADS, WIDTH).to(dtype)
    slots = torch.arange(CAPACITY, device=backend.device).expand(ROWS, -1)
    address = backend.address(cache, slots)
    for layer in range(LAYERS):
        backend.write(
            cache, layer, address, k[layer].to(backend.device), v[layer].to(backend.device)
        )
    return cache, k, v


def _holds(backend: Backend, cache: KVCache, k: Tensor, v: Tensor) -> str:
    """Say in which layer the cache does not hold ``k, v`` bit for bit; empty where it does."""
    slots = torch.arange(CAPACITY, device=backend.device).expand(ROWS, -1)
    for layer in range(LAYERS):
        found = backend.read(cache, layer, slots)
        for name, got, want in zip(("keys", "values"), found, (k[layer], v[layer]), strict=True):
            if not torch.equal(got[..., :WIDTH].cpu(), want):
                return f"{name} of layer {layer}"
    return _seen(backend, cache, k, v)


def _seen(backend: Backend, cache: KVCache, k: Tensor, v: Tensor) -> str:
    """Say in which layer attention over all slots does not see ``k, v``; empty where it does.

    What is read must be what attention reads: compared with float64, within attention's tolerance.
    """
    dtype = cache.layout.dtype
    q = _random(4, ROWS, 5, HEADS, WIDTH).to(dtype)
    seen = torch.zeros(ROWS, 1, 5, cache.layout.capacity, dtype=torch.bool)
    seen[..., :CAPACITY] = True
    mask = backend.mask(seen.to(backend.device), dtype)
    for layer in range(LAYERS):
        scores = torch.einsum("rthd,rlhd->rhtl", q.double(), k[layer].double())
        want = torch.einsum(
            "rhtl,rlhd->rthd", (scores * WIDTH**-0.5).softmax(-1), v[layer].double()
        )
        got = backend.attend(q.to(backend.device), cache, layer, mask).cpu().double()
        if not (got - want).abs().max() <= TOLERANCE[dtype]:
            return f"what attention sees of layer {layer}"
    return ""


def round_trip(backend: Backend) -> Measured:
    """Write every slot of every layer and read it back."""
    for dtype in _dtypes(backend):
        cache, k, v = _filled(backend, dtype)
        if wrong := _holds(backend, cache, k, v):
            raise Failed(f"what was written in {dtype} does not come back (seen in {wrong})")
    return Measured("what is written is read, bit for bit, and seen by attention")


def sentinels(backend: Backend) -> Measured:
    """Overwrite two slots a row, through int64 addresses; the others stay."""
    cache, k, v = _filled(backend, torch.float32)
    slots = torch.tensor([[3, 7], [0, 27], [5, 6], [28, 1]], device=backend.device)
    new = _random(3, ROWS, 2, HEADS, WIDTH)
    backend.write(
        cache, 1, backend.address(cache, slots), new.to(backend.device), new.to(backend.device)
    )
    for row in range(ROWS):
        k[1, row, slots[row].cpu()] = v[1, row, slots[row].cpu()] = new[row]
    if wrong := _holds(backend, cache, k, v):
        raise Failed(f"writing two slots of layer 1 changed others (seen in {wrong})")
    return Measured("a write touches its slots alone")


def slots(backend: Backend) -> Measured:
    """Decode: a slot that holds a committed position is never written again, and none is shared."""
    steps = 0
    for strategy in ("eagle", "lantern++"):
        engine = tiny.tiny_engine(backend, strategy, batch=2)
        tiny.start(engine, seed=3)
        g, state = engine.geometry, engine.state
        branches = engine.verifying.branches
        for _ in range(g.tokens):
            table = state.slot_of.cpu()
            if not torch.equal(table.sort(dim=1).values, torch.arange(g.image_slots).expand(2, -1)):
                raise Failed(f"after {steps} steps two positions share a slot")
            known = branches.rows(state.slot_of) + g.prefix
            before = backend.read(engine.verifying.cache, 0, known)
            length = state.length.clone().cpu()
            engine.step()
            steps += 1
            after = backend.read(engine.verifying.cache, 0, known)
            for row in range(g.rows):
                count = int(length[row % g.batch])
                for old, new in zip(before, after, strict=True):
                    if not torch.equal(old[row, :count].cpu(), new[row, :count].cpu()):
                        raise Failed(f"step {steps} wrote to a slot of a committed position")
            if int(state.length.min()) >= g.tokens - 1:
                break
    steps += sum(_window_slots(backend, strategy) for strategy in ("scd", "sjd-pac"))
    return Measured(f"{steps} steps wrote to free slots alone")


def _window_slots(backend: Backend, strategy: str) -> int:
    """Show the same of a window, whose positions have slots of their own; return its steps."""
    engine = tiny.tiny_engine(backend, strategy, batch=2)
    tiny.start(engine, seed=3)
    g, state, steps = engine.geometry, engine.state, 0
    slots = torch.arange(g.prefix, g.prefix + g.tokens, dtype=backend.index, device=backend.device)
    known = slots.expand(g.rows, -1)
    while int(state.length.min()) < g.tokens - 1 and steps < g.tokens:
        before = backend.read(engine.verifying.cache, 0, known)
        length = state.length.clone().cpu()  # its own keys are written by the step
        engine.step()
        steps += 1
        after = backend.read(engine.verifying.cache, 0, known)
        for row in range(g.rows):
            count = int(length[row % g.batch])
            for old, new in zip(before, after, strict=True):
                if not torch.equal(old[row, :count].cpu(), new[row, :count].cpu()):
                    raise Failed(f"{strategy}, step {steps} wrote to a slot of a known position")
                if not new[row, count].any():
                    raise Failed(f"{strategy}, step {steps} left the last token's slot empty")
    return steps


def attention(backend: Backend) -> Measured:
    """Compare tree attention with float64 on the host, in every dtype of the device."""
    worst, at = 0.0, 1.0
    tree = TreeTables(tree_paths(parse_tree("0,1,2,00,01,10,000")))
    for dtype in _dtypes(backend):
        cache, k, v = _filled(backend, dtype)
        nodes = tree.nodes
        visible = torch.zeros(ROWS, 1, nodes, cache.layout.capacity, dtype=torch.bool)
        visible[..., :11] = True
        visible[..., 12 : 12 + nodes] = tree.visible
        q = _random(5, ROWS, nodes, HEADS, WIDTH).to(dtype)
        mask = backend.mask(visible.to(backend.device), dtype)
        got = backend.attend(q.to(backend.device), cache, 1, mask).cpu().double()
        scores = torch.einsum("rthd,rlhd->rhtl", q.double(), k[1].double()) * WIDTH**-0.5
        scores = scores.masked_fill(~visible[..., :CAPACITY], float("-inf"))
        want = torch.einsum("rhtl,rlhd->rthd", scores.softmax(-1), v[1].double())
        error = float((got - want).abs().max())
        if error / TOLERANCE[dtype] >= worst / at:
            worst, at = error, TOLERANCE[dtype]
        within(error, TOLERANCE[dtype], f"tree attention in {dtype}")
    return within(worst, at, "tree attention against float64")


def addresses(backend: Backend) -> Measured:
    """Show that a second request runs on the first one's memory."""
    count = 0
    for strategy in ("lantern++", "sjd-pac"):
        engine = tiny.tiny_engine(backend, strategy)
        caches = [*engine.verifying.cache.buffers]
        if engine.drafting is not None:
            caches += engine.drafting.cache.buffers
        before = [b.data_ptr() for b in [*vars(engine.state).values(), *caches]]
        for seed in (0, 1):
            tiny.start(engine, seed)
            for _ in range(3):
                engine.step()
        after = [b.data_ptr() for b in [*vars(engine.state).values(), *caches]]
        if before != after:
            raise Failed(
                f"{strategy}: a buffer moved between requests: a captured graph would read the old one"
            )
        count += len(before)
    return Measured(f"{count} buffers keep their address")


def _tree(device: torch.device, tokens: Tensor, vocab: int, sampled: bool) -> DraftTree:
    tables = TreeTables(tree_paths(parse_tree("0,1,2,00,01,10,000")))
    batch = tokens.shape[0]
    topology = tables.topology(batch, device)
    group = topology.pop("group")
    q = _random(9, batch, tables.groups, vocab).softmax(-1).to(device) if sampled else None
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
    logits = 2 * _random(7, batch, nodes, vocab)
    tokens = _random(10, batch, vocab).argsort(-1)[:, :nodes]
    uniforms = torch.rand(batch, 16, generator=torch.Generator().manual_seed(8)).clamp(
        1e-6, 0.999999
    )
    table = neighbour_table(_random(6, vocab, 3), 5)
    compared = 0
    for sampled in (False, True):
        for lam in (1.0, 3.0):
            got = []
            for ops in (backend, REFERENCE):
                device = ops.device
                tree = _tree(device, tokens, vocab, sampled)
                dials = torch.tensor([lam], device=device)
                rule = Rule(LanternPP(k=5, lam=lam), "aggregate", table.to(device), dials)
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


def _run(
    engine: tiny.TinyEngine,
    seed: int,
    prefill: Callable[[], None] | None = None,
    step: Callable[[], None] | None = None,
) -> Tensor:
    tiny.start(engine, seed, prefill)
    return engine.run(step).tokens


#: Codes of the vocabularies that draws are checked on, LlamaGen's and Anole's among them.
VOCABS = (48, 1000, 16384, 65536)


def scan(backend: Backend) -> Measured:
    """Sum weights up and draw by them: never falling, the same every time, and no code without weight."""
    drawn = 0
    for vocab in VOCABS:
        for rows in (1, 3):
            sharp = 6 * _random(vocab + rows, rows, vocab)
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


def greedy(backend: Backend) -> Measured:
    """Decode greedily in float32: every exact strategy gives vanilla's tokens."""
    compared = 0
    for family, strategy in tiny.cases(("vanilla", *EXACT)):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, batch=2, temperature=0.0, family=family)
        got = _run(engine, 4)
        if strategy == "vanilla":
            want = got
        elif not torch.equal(got, want):
            raise Failed(f"{family}: {strategy} is not vanilla token for token in float32")
        compared += strategy != "vanilla"
    return Measured(f"{compared} exact strategies give vanilla's tokens")


def allowed(backend: Backend) -> Measured:
    """Decode models that force codes, such as the end of a row: each stands where it must."""
    checked = 0
    for family, strategy in tiny.cases(("vanilla", "eagle2", "lantern++")):
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
        rule = engine.verifying.target.allowed()
        if rule is None:
            continue
        doing(f"{family}, {strategy}")
        tokens = _run(engine, 5).cpu()
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
    """Sample thousands of images' first tokens: eagle's second token follows vanilla's law."""
    counts: dict[tuple[str, str], Tensor] = {}
    worst = 0.0
    for family, strategy in tiny.cases(("vanilla", *EXACT)):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, batch=256, family=family)
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


def replay(backend: Backend) -> Measured:
    """Compare the captured step with the eager one, for two prompts: a stale replay shows."""
    for family, strategy in tiny.cases(STRATEGIES):
        doing(f"{family}, {strategy}: capture")
        engine = tiny.tiny_engine(backend, strategy, family=family)
        tiny.start(engine, 9)
        captured = [
            recorded(backend, engine.prefill, "prefill"),
            recorded(backend, engine.step, "step"),
        ]
        doing(f"{family}, {strategy}: replay")
        try:
            results = [(_run(engine, seed, *captured), _run(engine, seed)) for seed in (0, 1)]
        finally:
            for one in captured:
                one.release()
        for seed, (got, want) in enumerate(results):
            if not torch.equal(got, want):
                raise Failed(
                    f"{family}, {strategy}: the replayed step differs from the eager one (prompt "
                    f"{seed})"
                )
    return Measured("replay equals eager for two prompts per family and strategy")


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
            _run(engine, 1, None, step)
        for seed, tokens in zip((1, 2, 3), want, strict=True):
            if not torch.equal(_run(engine, seed), tokens):
                raise Failed(
                    f"a request was cancelled after {at} steps, and request {seed} after it differs "
                    "from a fresh engine's: what it left behind is read (see HostCopy.clear)"
                )
    return Measured("three requests after each of two cancelled ones are a fresh engine's")


def weights_from_outside(backend: Backend) -> Measured:
    """Decode with weights made outside of any inference mode, as a loaded model's are."""
    with torch.inference_mode(False), torch.no_grad():
        model = tiny.tiny_model(backend, backend.device, torch.float32)
    outside = _run(tiny.tiny_engine(backend, "lantern++", model=model), 3)
    if not torch.equal(outside, _run(tiny.tiny_engine(backend, "lantern++"), 3)):
        raise Failed("weights made inside the inference mode give other tokens than those outside")
    return Measured("weights made outside the inference mode decode like those made inside")


CHECKS: dict[str, Callable[[Backend], Measured]] = {
    "kv.round_trip": round_trip,
    "kv.sentinels": sentinels,
    "kv.slots": slots,
    "kv.addresses": addresses,
    "attention.float64": attention,
    "accept.ties": ties,
    "accept.decisions": decisions,
    "draw.scan": scan,
    "decode.greedy": greedy,
    "decode.allowed": allowed,
    "decode.distribution": distribution,
    "decode.interrupted": interrupted,
    "decode.weights_from_outside": weights_from_outside,
    "replay.eager": replay,
}
