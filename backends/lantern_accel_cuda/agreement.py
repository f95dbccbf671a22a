"""Each Triton kernel against the reference's operators, on small data: quick enough for a first use.

Nothing here knows the backend: :mod:`.trust` runs one comparison before a kernel's first use on a card,
:mod:`.checks` runs all of them, and larger ones, for ``lantern-accel conform``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lantern_accel.decoding.accept import accept_sampling
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.trees import DraftTree, topology_of
from lantern_accel.device import plan as plans
from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.device.noise import noise_keys
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import Filter, StepPlan
from lantern_accel.families.random_weights import fill_random
from lantern_accel.families.registry import family, family_names
from lantern_accel.nn.neighbours import neighbour_table
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.rounding import round_weight as round_weights
from lantern_accel.strategy.rules import AcceptanceRule, Exact, Lantern, LanternPP
from lantern_accel.strategy.trees import SMALL_16, TreeTables
from lantern_accel.strategy.values import NoTree, Residual, Sampling, Strategy, Window
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, within
from lantern_accel_cuda import attention as caches
from lantern_accel_cuda.options import BY_DTYPE, BY_RULE, RESIDUALS, check_name, has_triton

if has_triton():
    from lantern_accel_cuda.kernels import accept, fused, rounded, sampling, tree_attention
    from lantern_accel_cuda.kernels import enter as entering
    from lantern_accel_cuda.kernels import few as few_rows
    from lantern_accel_cuda.kernels import race as races
    from lantern_accel_cuda.kernels.advance import Advance
    from lantern_accel_cuda.kernels.guess import Guesses
    from lantern_accel_cuda.kernels.tiles import DTYPES as TILED
    from lantern_accel_cuda.steps import fused_step

_Given = ParamSpec("_Given")

#: Largest difference of a kernel from torch's operators, for values of about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
#: Largest difference of attention: torch's own kernels round differently, float32 in three TF32 products.
ATTENTION = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 4e-3}
#: Largest difference of probabilities, and the share of decisions that rounding may turn.
PROBABILITIES = 1e-5
TURNED = 0.01
#: Heads of the published models, padded ones too.
WIDTHS = (64, 100)
#: Queries and widths of heads: each has blocks, warps or instructions of its own.
QUERIES = tuple((nodes, width) for width in WIDTHS for nodes in (1, 20, 60))
IMAGES = 32
#: Codes of a row that several programs share, as with published models.
CODES = 5000
FILTERS = (
    Filter(0.7, top_k=1000),
    Filter(1.0, top_p=0.9),
    Filter(0.9, top_k=50, top_p=0.8),
    Filter(0.9, top_k=50, top_p=0.8, p_first=True),
)
RULES: tuple[AcceptanceRule, ...] = (Exact(), Lantern(k=100, delta=0.3), LanternPP(k=10, lam=3.0))


def walk_forms() -> list[tuple[AcceptanceRule, Residual]]:
    """Return the rules and residuals that the walk down a tree has kernels for."""
    return [(rule, residual) for rule in RULES for residual in RESIDUALS]


@dataclass(frozen=True)
class Site:
    """Where kernels run: device, multiprocessors, the dtypes that it computes in, and codes' dtype."""

    device: torch.device
    cores: int
    dtypes: tuple[torch.dtype, ...]
    index: torch.dtype = torch.int64

    def numbers(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers, the same on every device."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(device=self.device, dtype=dtype)

    def uniforms(self, seed: int, *shape: int) -> Tensor:
        """Return uniform numbers without 0 and 1, the same on every device."""
        u = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return u.clamp(2.0**-24, 1 - 2.0**-20).to(self.device)

    def prepare(self, ops: TensorOps) -> TensorOps:
        """Let the reference's operators work here."""
        ops.device, ops.index = self.device, self.index
        return ops


class Pair(NamedTuple):
    """What a kernel gives and what it should, with the largest difference; None: to the bit."""

    got: Tensor
    want: Tensor
    tolerance: float | None
    what: str


def _share(count: float, of: float, most: float, what: str) -> Pair:
    """Return a pair whose difference is a share that may be ``most``."""
    return Pair(torch.tensor(count / of), torch.tensor(0.0), most, what)


def _near(got: Tensor, want: Tensor, tolerance: float | None, what: str) -> Measured:
    if tolerance is None:
        if not torch.equal(got, want):
            raise Failed(f"{what}: not what the reference gives")
        return Measured(what, 0.0, 0.0)
    error = float((got.float() - want.float()).abs().max())
    # A NaN is not a distance.
    return within(error if error == error else float("inf"), tolerance, what)


def _comparison(pairs: Callable[_Given, Iterator[Pair]]) -> Callable[_Given, Measured]:
    """Return the check that goes through a kernel's pairs; it fails at the first that differs."""

    @wraps(pairs)
    def check(*given: _Given.args, **more: _Given.kwargs) -> Measured:
        found = Measured()
        for pair in pairs(*given, **more):
            found = _near(*pair)
        return found

    return check


@_comparison
def rms_norm(site: Site, rows: int = 3, width: int = 1280) -> Iterator[Pair]:
    """Compare the norm."""
    for dtype in site.dtypes:
        x = site.numbers(0, rows, width, dtype=dtype)
        weight = site.numbers(1, width, dtype=dtype)
        got, want = (of.rms_norm(x, weight, 1e-5) for of in (fused, TensorOps()))
        yield Pair(got, want, TOLERANCE[dtype], f"norm in {dtype}")


@_comparison
def swiglu(site: Site, rows: int = 3, width: int = 1280) -> Iterator[Pair]:
    """Compare the gated product."""
    for dtype in site.dtypes:
        x = site.numbers(0, rows, 2 * width, dtype=dtype)
        yield Pair(fused.swiglu(x), TensorOps().swiglu(x), TOLERANCE[dtype], f"gate in {dtype}")


@_comparison
def rotate_write(site: Site, nodes: int = 9) -> Iterator[Pair]:
    """Compare rotated queries and what is written to the caches, untouched slots included."""
    reference = site.prepare(TensorOps())
    for dtype in site.dtypes:
        for width in WIDTHS:
            layout = caches.layout(2, 2, 101, 3, width, dtype)
            ours, theirs = (reference.allocate(layout) for _ in range(2))
            qkv = site.numbers(0, 2, nodes, 3, 3, width, dtype=dtype)
            angles = site.numbers(1, 1, nodes, 1, 1, width // 2)
            rotary = (angles.cos(), angles.sin())
            slots = torch.arange(20, 20 + nodes, device=site.device).expand(2, -1)
            address = reference.address(ours, slots)
            turned = reference.rotate(qkv[:, :, :2], rotary)
            reference.write(theirs, 1, address, turned[:, :, 1], qkv[:, :, 2])
            q = fused.rotate_write(qkv, rotary, ours, 1, address)
            at = TOLERANCE[dtype]
            yield Pair(q, turned[:, :, 0], at, f"rotation in {dtype}")
            for mine, other in zip(ours.buffers, theirs.buffers, strict=True):
                yield Pair(mine, other, at, f"written keys and values in {dtype}")


@_comparison
def attend(site: Site) -> Iterator[Pair]:
    """Compare attention of one query and of more, block by block, with slots that nobody sees."""
    for dtype in site.dtypes:
        for nodes, width in QUERIES:
            stored, slots = -(-width // 8) * 8, 208  # a multiple of 16, as a cache has
            q = site.numbers(0, 2, nodes, 3, width, dtype=dtype)
            k, v = (site.numbers(n, 2, 3, slots, stored, dtype=dtype) for n in (1, 2))
            visible = site.uniforms(3, 2, 1, nodes, slots) < 0.5
            visible[..., 150:] = False
            visible[..., 0] = True
            got = tree_attention.attend(q, k, v, visible.to(torch.int8), site.cores)
            wide, keys, values = (x.double() for x in (q, k[..., :width], v[..., :width]))
            scores = torch.einsum("rthd,rhld->rhtl", wide, keys) * width**-0.5
            scores = scores.masked_fill(~visible, float("-inf"))
            want = torch.einsum("rhtl,rhld->rthd", scores.softmax(-1), values)
            yield Pair(got, want, ATTENTION[dtype], f"attention in {dtype}")


@_comparison
def guide(site: Site, size: int = 1000) -> Iterator[Pair]:
    """Compare guidance of two rows, without penalties and with."""
    logits = site.numbers(0, 4, 3, size)
    scale = torch.tensor([1.0, 4.0, 7.5], device=site.device)
    kind = torch.tensor([0, 1, 1], device=site.device)
    penalty = torch.zeros(2, size, device=site.device)
    penalty[1, ::2] = -1e4
    token = (torch.arange(6, device=site.device) % 3).view(2, 3)
    for penalties, high in ((None, 1e1), ((kind, penalty), 1e4)):
        want = TensorOps().guide(logits, token, scale, None, penalties)
        got = sampling.guide(logits, token, scale, None, penalties)
        assert got is not None
        yield Pair(got, want, 1e-6 * high, "guidance")


@_comparison
def filters(site: Site, sizes: tuple[int, ...] = (1000,)) -> Iterator[Pair]:
    """Compare filtered probabilities."""
    for size in sizes:
        logits = 4 * site.numbers(size, 6, size)
        logits[1, ::3] = float("-inf")
        for given in FILTERS:
            want, got = TensorOps().filter(logits, given), sampling.filter(logits, given)
            assert got is not None
            ours, theirs = got.sort(dim=-1).values, want.sort(dim=-1).values
            yield Pair(ours, theirs, PROBABILITIES, f"probabilities of {given}, {size} codes")


@_comparison
def samples(site: Site, sizes: tuple[int, ...] = (1000,)) -> Iterator[Pair]:
    """Compare draws without replacement with the reference's, and with themselves."""
    turned, drawn = 0, 0
    for size in sizes:
        weights = (4 * site.numbers(size, 6, size)).softmax(-1)
        u = site.uniforms(size, 6, 8)
        theirs = TensorOps().sample(weights, u)
        ours, again = (sampling.sample_codes(weights, u, torch.int64) for _ in range(2))
        assert ours is not None and again is not None
        yield Pair(ours, again, None, f"draws from the same {size} weights, from call to call")
        turned += int((ours != theirs).any(-1).sum())
        drawn += len(u)
    yield _share(turned, drawn, 0.2, "rows whose draws are not torch's")


@_comparison
def race(site: Site, sizes: tuple[int, ...] = (CODES,)) -> Iterator[Pair]:
    """Compare the race and its siblings with the noise as the host makes it, code by code."""
    keys = noise_keys([7, -(2**40)], [0, 3])
    positions = torch.tensor([[0, 1, 300], [65535, 2, 40]])
    for size in sizes:
        weights = (4 * site.numbers(size, 2, 3, size)).softmax(-1)
        weights[0, 1, ::2] = 0.0
        want = TensorOps().race(weights.cpu(), keys, positions, 8)
        given = weights, keys.to(site.device), positions.to(site.device)
        for many in (8, 1):
            got = races.race(*given, many, torch.int64)
            assert got is not None
            yield Pair(got.cpu(), want[..., :many], None, f"{many} codes of the race of {size}")


@_comparison
def walks(
    site: Site,
    size: int = 500,
    images: int = 4,
    forms: Sequence[tuple[AcceptanceRule, Residual]] | None = None,
) -> Iterator[Pair]:
    """Compare walks down random drafts with the tensor code; ``forms``: rules with their residuals."""
    device, reference = site.device, TensorOps()
    tables = TreeTables(SMALL_16.paths)
    topology = topology_of(tables, images, device)
    logits = 2.5 * site.numbers(0, images, tables.nodes, size)
    inner = topology["inner"]
    seen = logits.gather(1, inner.unsqueeze(-1).expand(-1, -1, size))
    q = (seen + site.numbers(1, *seen.shape)).softmax(-1)
    widest = max(tables.max_children)
    picks = reference.sample(q, site.uniforms(1, *q.shape[:-1], widest))
    group = topology["group"].gather(1, topology["parent"])
    ids = torch.arange(tables.nodes, device=device)
    nth = (ids - topology["first_child"].gather(1, topology["parent"])).clamp(min=0)
    tokens = picks.flatten(1).gather(1, group * widest + nth)
    tree = DraftTree(tokens=tokens, max_children=tables.max_children, q=q, **topology)
    table = neighbour_table(site.numbers(2, size, 4).cpu(), 100).to(device)
    tests = site.uniforms(3, images, sum(tables.max_children))
    bonus = site.uniforms(4, images)
    given, turned, kept = Filter(0.9), 0, 0
    forms = walk_forms() if forms is None else forms
    for rule, residual in forms:
        runtime_params = torch.tensor(rule.runtime_values(), device=device)
        judged = Rule(rule, residual, table if rule.k else None, runtime_params)
        for one in (tree, replace(tree, q=None, group=None, inner=None)):
            found = accept.accept(one, logits, given, judged.given, tests, bonus)
            probs = sampling.filter(logits, given)
            assert found is not None and probs is not None
            want = accept_sampling(one, probs, judged, tests, bonus)
            same = (found[0] == want.path).all(1) & (found[1] == want.length)
            turned += int((~same).sum())
            kept += int(found[1].sum())
            if bool(same.any()):
                what = f"weights of the bonus token, {rule.kind}, {residual}"
                yield Pair(found[3][same], want.weights[same], 1e-4, what)
    if not kept:
        raise Failed("no draft was kept, so the walk was not seen")
    cases = 2 * len(forms) * images
    # One walk of a few may be turned by rounding.
    most = max(TURNED, 1.5 / cases)
    yield _share(turned, cases, most, "images whose walk is not the tensor code's")


#: Outputs and inputs of the matrices that are compared: no whole blocks, and inputs that programs share.
MATRICES = ((200, 136), (72, 1088))


@_comparison
def quantized_matmuls(site: Site, rows: tuple[int, int] = (1, 33)) -> Iterator[Pair]:
    """Compare matmuls with quantized weights: each matrix with each number of rows or a bias.

    Not every combination: each of them is compiled, and an image waits for that.
    """
    for dtype in site.dtypes:
        for name in ROUNDINGS:
            for shape, count, biased in zip(MATRICES, rows, (True, False), strict=True):
                yield from _multiply(site, name, shape, count, dtype, biased, tiled=False)[1]


@_comparison
def tiles(site: Site, rows: tuple[int, int] = (33, 100)) -> Iterator[Pair]:
    """Compare the matmuls of tens of rows by such weights, and a row's among fewer rows and more."""
    some, many = rows
    for dtype in (one for one in site.dtypes if one in TILED):
        for name, how in ROUNDINGS.items():
            biased = how.bits == 4
            part, pairs = _multiply(site, name, MATRICES[not biased], some, dtype, biased)
            yield from pairs
            if how.bits == 8:
                whole, pairs = _multiply(site, name, MATRICES[1], many, dtype)
                yield from pairs
                yield Pair(part, whole[:some], None, f"{name}: a row among {some} and {many} rows")


def _multiply(
    site: Site, name: str, shape: tuple[int, int], count: int, dtype: torch.dtype,
    biased: bool = False, tiled: bool = True,
) -> tuple[Tensor, tuple[Pair, Pair]]:  # fmt: skip
    """Multiply the first ``count`` of some rows; return the result, and pairs with the dense matrix's."""
    outputs, inputs = shape
    weight = round_weights(site.numbers(0, outputs, inputs) * inputs**-0.5, ROUNDINGS[name])
    columns = rounded.Columns.of(weight)
    x = site.numbers(1, rounded.MOST_ROWS, inputs, dtype=dtype)[:count]
    bias = site.numbers(2, outputs, dtype=dtype) if biased else None
    want = x.double() @ weight.dense(torch.float64).t()
    want = want if bias is None else want + bias.double()
    got, again = (
        rounded.multiply(x, columns, bias, site.cores, tiled=tiled) for _ in range(2)
    )  # fmt: skip
    return got, (
        Pair(got, again, None, f"{name}: matmuls of {count} rows from call to call"),
        Pair(got, want, TOLERANCE[dtype], f"matmul with {name} weights in {dtype}"),
    )


@_comparison
def few(site: Site, rows: tuple[int, ...] = (3, 33)) -> Iterator[Pair]:
    """Compare matmuls of few rows with what stands around them, stage by stage, with float64.

    Each shape with one number of rows, and inputs that programs share: a step's other rows and matrices
    are compared where they are first used.
    """
    reference, inputs, hidden, heads = site.prepare(TensorOps()), 640, 72, 3
    for dtype in site.dtypes:
        for shape, (count, width) in enumerate(zip(rows, WIDTHS, strict=False)):
            x, gain, gates, queries, back = (
                site.numbers(n, *size, dtype=dtype)
                for n, size in enumerate(
                    [(1, count, inputs), (inputs,), (2 * hidden, inputs),
                     (3 * heads * width, inputs), (hidden, inputs)]
                )
            )  # fmt: skip
            gates, queries, back = (w * inputs**-0.5 for w in (gates, queries, back))
            wide = x.double()
            normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
            plain = wide @ back.double().t()
            at, last = 4 * TOLERANCE[dtype], (shape, site.cores)  # of values of up to 16
            yield Pair(few_rows.sums(x, back, *last), plain, at, f"sums in {dtype}")
            residual = site.numbers(9, 1, count, hidden, dtype=dtype)
            plain = plain + residual.double()
            few_rows.add(x, back, residual, *last)
            yield Pair(residual, plain, at, f"product and residual in {dtype}")
            gate, up = (normed @ gates.double().t()).chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
            got = few_rows.gate(x, gain, 1e-5, gates, *last)
            yield Pair(got, want, at, f"norm, product and gate in {dtype}")
            layout = caches.layout(1, 1, count + 5, heads, width, dtype)
            ours, theirs = (reference.allocate(layout) for _ in range(2))
            angles = site.numbers(8, 1, count, 1, 1, width // 2)
            rotary = (angles.cos(), angles.sin())
            slots = torch.arange(2, 2 + count, device=site.device).view(1, -1)
            address = reference.address(ours, slots)
            qkv = (normed @ queries.double().t()).to(dtype).unflatten(-1, (3, heads, width))
            turned = reference.rotate(qkv[:, :, :2], rotary)
            reference.write(theirs, 0, address, turned[:, :, 1], qkv[:, :, 2])
            k, v = ours.by_head(0, layout.capacity)
            got, again = (
                few_rows.rotate(x, gain, 1e-5, queries, *rotary, address, k, v, heads, *last)
                for _ in range(2)
            )
            yield Pair(got, again, None, f"matmuls of {count} rows from call to call")
            yield Pair(got, turned[:, :, 0], at, f"norm, product and rotation in {dtype}")
            for mine, other in zip(ours.buffers, theirs.buffers, strict=True):
                yield Pair(mine, other, at, f"written keys and values in {dtype}")


@_comparison
def advance(site: Site, passes: int = 5, codes: int = CODES) -> Iterator[Pair]:
    """Compare what follows a pass, every buffer to the bit, in plain steps and in windows of drafts."""
    reference = site.prepare(TensorOps())
    for tree in (NoTree(), Window(length=6)):
        engine, rows = _engine(reference, tree, codes=codes), site.numbers(5, 64, codes)
        after = fused_step(reference, replace(_plan(engine), target=None))
        for _ in range(passes):
            drafted = engine.source.draft(engine.state)
            x = drafted if isinstance(tree, Window) else drafted.tokens
            place = engine.state.length.unsqueeze(1) + torch.arange(x.shape[1], device=site.device)
            logits = _likely(rows, place, x)
            want = _by_operators(engine, drafted, logits, logits)
            after.run(logits)
            for name, value in _changes(engine).items():
                # The last column is for what is past the image.
                ours, theirs = (t[:, :-1] if name == "tokens" else t for t in (value, want[name]))
                yield Pair(ours, theirs, None, f"{name}, with {tree}")


class _Noting(TensorOps):
    """The reference with a GPU's layout; it notes what a pass begins with, and runs no block."""

    def kv_layout(self, *sizes: Any) -> KVLayout:
        return caches.layout(*sizes)

    def mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        return visible.to(torch.int8)

    def trunk(self, blocks: Any, x: Tensor, at: Any, taps: Any = (), norm: Any = None) -> Tensor:
        self.seen = (x, at.mask, at.cos, at.sin, at.address)
        return x

    def guide(self, logits: Tensor, token: Tensor, *given: Any) -> Tensor:
        self.token = token
        return super().guide(logits, token, *given)


@_comparison
def enter(site: Site, codes: int = CODES) -> Iterator[Pair]:
    """Compare what a pass begins with, to the bit, in plain steps and windows, at an image's ends."""
    ops = _Noting()
    site.prepare(ops)
    for tree, images in ((NoTree(), 1), (Window(length=4), 2)):
        engine = _engine(ops, tree, images, codes)
        at, state, target = engine.geometry, engine.state, engine.verifying.target
        many = site.uniforms(7, *state.tokens.shape) * at.vocab
        state.tokens.copy_(many)
        state.prefix_mask[:, 0] = False
        for first in (0, at.tokens - 2):
            length = (torch.arange(images, device=site.device) + first).clamp(max=at.tokens - 1)
            state.length.copy_(length)
            if at.depth == 0:
                state.root.copy_(state.tokens.gather(1, length.unsqueeze(1)).squeeze(1))
            engine.source.verify(state, engine.source.draft(state))
            layout, plan = engine.verifying.cache.layout, _plan(engine)
            got = entering.enter(
                state.tokens, state.length, state.prefix_mask, target.tok_embeddings.weight,
                (target.rope_cos, target.rope_sin), at.nodes, at.branches,
                plan.sizes.slots - at.prefix - 1, layout.capacity, layout.heads,
            )  # fmt: skip
            for name, ours, theirs in zip(got._fields, got, (*ops.seen, ops.token), strict=True):
                shared = name == "mask" and len(ours) == 1
                whole = ours.expand_as(theirs) if shared else ours
                yield Pair(whole, theirs, None, f"{name}, with {tree}")


@_comparison
def guesses(site: Site, passes: int = 3, codes: int = CODES) -> Iterator[Pair]:
    """Compare what a draft head makes of a pass: buffers to the bit, and nearly all guesses."""
    reference, other, every = site.prepare(TensorOps()), 0, 0
    window = Window(length=6, fresh="head")
    engine, rows = _engine(reference, window, codes=codes), site.numbers(5, 64, codes)
    state, source, plan = engine.state, engine.source, _plan(engine)
    assert isinstance(plan.source, plans.WindowPlan) and plan.source.feature is not None
    made = Guesses(plan.buffers, plan.source, plan.sizes.nodes, plan.sizes.tokens - 1)
    after = Advance(plan.buffers, made.rest, plan.sizes.nodes, plan.sizes.tokens - 1)
    for number in range(passes):
        x = source.draft(state)
        place = state.length.unsqueeze(1) + torch.arange(x.shape[1], device=site.device)
        logits = _likely(rows, place, x)
        features = site.numbers(number, plan.sizes.rows, x.shape[1], plan.source.feature.shape[1])
        want = _by_operators(engine, x, logits, features)
        noted, length = made.changed_buffers(), state.length.clone()
        after(reference.filter(logits, plan.filter))
        made(noted, source.guide_states(features, length))
        found = _changes(engine)
        ours, theirs = found.pop("tokens")[:, :-1], want["tokens"][:, :-1]
        at, first = torch.arange(ours.shape[1], device=site.device), state.length.unsqueeze(1)
        known = at <= first
        yield Pair(ours[known], theirs[known], None, "tokens, with a draft head")
        drafts = ~known & (at < first + x.shape[1])
        other, every = other + int((ours != theirs)[drafts].sum()), every + int(drafts.sum())
        for name, value in found.items():
            if value.is_floating_point():
                # Of numbers what is more than a share of them off.
                value = (value - want[name]).abs() - 1e-4 * want[name].abs()
                yield Pair(value.clamp(min=0), torch.zeros_like(value), 1e-5, f"{name} of a head")
            else:
                yield Pair(value, want[name], None, f"{name}, with a draft head")
        state.tokens.copy_(want["tokens"])
    yield _share(other, every, 0.1, f"guesses that are not the operators', of {every}")


def _likely(rows: Tensor, place: Tensor, x: Tensor) -> Tensor:
    """Return logits by place and past, of which three codes are likely, at the ends and in the middle.

    So drafts are kept, and what earlier passes chose is recalled. ``rows``: numbers ``[64, V]``.
    """
    logits = rows[place] + 3 * rows[x % len(rows)]
    likely = torch.tensor([0, rows.shape[1] // 2, rows.shape[1] - 1], device=rows.device)
    return (logits - 30).index_copy(-1, likely, logits[..., likely])


def _model(ops: TensorOps, codes: int) -> tiny.TinyModel:
    """Return a tiny model of that many codes, with a draft head and without a drafter."""
    manifest: Any = family(family_names()[0]).tiny()
    wide = {"vocab_size": codes}
    parts = {
        "target": manifest.target.model_copy(update=wide),
        "draft_head": manifest.draft_head.model_copy(update=wide),
        "drafter": None,
    }
    generator = torch.Generator().manual_seed(11)

    def random_tensor(path: str, shape: torch.Size) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return drawn.to(ops.device)

    return fill_random(manifest.model_copy(update=parts), ops, ops.device, random_tensor)


def _engine(ops: TensorOps, drafts: NoTree | Window, images: int = 2, codes: int = CODES) -> Any:
    """Return an engine of some images on a tiny model with a request loaded, on the operators."""
    model, sampling = _model(ops, codes), Sampling(cfg_scale=2.5, top_k=12)
    strategy = Strategy(name="check", drafts=drafts, acceptance=Exact(), coupling="invariant")
    engine = Engine(model.target, None, ops, strategy, sampling, batch=images)
    vars(engine)["model"] = model
    tiny.start(engine, 0)
    return engine


def _plan(engine: tiny.TinyEngine) -> StepPlan:
    found = engine.longest.plan()
    assert isinstance(found, StepPlan)
    return found


def _by_operators(
    engine: tiny.TinyEngine, drafted: Any, logits: Tensor, features: Tensor
) -> dict[str, Tensor]:
    """Return what the operators write behind a pass, and put back what was there."""
    state, source = engine.state, engine.source
    held = {name: value.clone() for name, value in _changes(engine).items()}
    judged = source.judge(state, drafted, logits)
    source.commit(state, drafted, features, judged)
    engine.finite.end()
    want = {name: value.clone() for name, value in _changes(engine).items()}
    for name, value in _changes(engine).items():
        value.copy_(held[name])
    return want


def _changes(engine: tiny.TinyEngine) -> dict[str, Tensor]:
    """Return what follows a pass may change, except the row of what is past the image."""
    found = {**engine.state.buffers, **engine.finite.buffers}
    if "q" in found and found["q"].dim() == 3:
        found["q"] = found["q"][:, :-1]
    return {name: value for name, value in found.items() if value.numel()}


#: The comparison that a kernel passes before it serves.
KERNELS: Mapping[str, Callable[[Site], Measured]] = {
    "attend": attend,
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "rotate_write": rotate_write,
    "guide": guide,
    "filter": filters,
    "draw": samples,
    "race": race,
    "accept": walks,
    "rounded": quantized_matmuls,
    "tiles": tiles,
    "few": few,
    "enter": enter,
    "advance": advance,
    "guess": guesses,
}


def checks_of(site: Site) -> dict[str, Callable[[], object]]:
    """Return every kernel's comparison, to be run outside whatever traces or records.

    A kernel of :data:`~.options.BY_DTYPE` has one for each dtype, the walk one for each rule.
    """

    def of(check: Callable[[Site], Measured], here: Site) -> Callable[[], object]:
        def run() -> object:
            with _disable_current_modes(), torch.inference_mode():
                return check(here)

        return run

    single = {name: check for name, check in KERNELS.items() if name not in BY_DTYPE | BY_RULE}
    found = {name: of(check, site) for name, check in single.items()}
    for rule, residual in walk_forms():
        walk = partial(walks, forms=[(rule, residual)])
        found[check_name("accept", None, f"{rule.kind}, {residual}")] = of(walk, site)
    for dtype in site.dtypes:
        alone = replace(site, dtypes=(dtype,))
        found |= {check_name(name, dtype): of(KERNELS[name], alone) for name in sorted(BY_DTYPE)}
    return found
