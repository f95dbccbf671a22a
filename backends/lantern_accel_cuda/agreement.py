"""Each Triton kernel against the reference's operators, on small data: quick enough for a first use.

Nothing here knows the backend: :mod:`.trust` runs one comparison before a kernel's first use on a card,
:mod:`.checks` runs all of them, and larger ones, for ``lantern-accel conform``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from lantern_accel_cuda.options import BY_DTYPE, BY_RULE, RESIDUALS, check_name

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


def _near(got: Tensor, want: Tensor, tolerance: float, what: str) -> Measured:
    error = float((got.float() - want.float()).abs().max())
    # A NaN is not a distance.
    return within(error if error == error else float("inf"), tolerance, what)


def rms_norm(site: Site, rows: int = 3, width: int = 1280) -> Measured:
    """Compare the norm."""
    from lantern_accel_cuda.kernels import fused

    found = Measured()
    for dtype in site.dtypes:
        x, weight = (
            site.numbers(n, *s, dtype=dtype) for n, s in ((0, (rows, width)), (1, (width,)))
        )
        want = TensorOps().rms_norm(x, weight, 1e-5)
        found = _near(fused.rms_norm(x, weight, 1e-5), want, TOLERANCE[dtype], f"norm in {dtype}")
    return found


def swiglu(site: Site, rows: int = 3, width: int = 1280) -> Measured:
    """Compare the gated product."""
    from lantern_accel_cuda.kernels import fused

    found = Measured()
    for dtype in site.dtypes:
        x = site.numbers(0, rows, 2 * width, dtype=dtype)
        want = TensorOps().swiglu(x)
        found = _near(fused.swiglu(x), want, TOLERANCE[dtype], f"gate in {dtype}")
    return found


def rotate_write(site: Site, nodes: int = 9) -> Measured:
    """Compare rotated queries and what is written to the caches, untouched slots included."""
    from lantern_accel_cuda.kernels import fused

    found, reference = Measured(), TensorOps()
    reference.device = site.device
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
            _near(q, turned[:, :, 0], at, f"rotation in {dtype}")
            for layer in range(2):
                _near(ours.keys[layer], theirs.keys[layer], at, f"written keys in {dtype}")
                found = _near(ours.values[layer], theirs.values[layer], at, f"values in {dtype}")
    return found


def attend(site: Site) -> Measured:
    """Compare attention of one query and of more, block by block, with slots that nobody sees."""
    from lantern_accel_cuda.kernels import tree_attention

    found = Measured()
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
            found = _near(got, want, ATTENTION[dtype], f"attention in {dtype}")
    return found


def guide(site: Site, size: int = 1000) -> Measured:
    """Compare guidance of two rows, without penalties and with."""
    from lantern_accel_cuda.kernels import sampling

    logits = site.numbers(0, 4, 3, size)
    scale = torch.tensor([1.0, 4.0, 7.5], device=site.device)
    kind = torch.tensor([0, 1, 1], device=site.device)
    penalty = torch.zeros(2, size, device=site.device)
    penalty[1, ::2] = -1e4
    token = (torch.arange(6, device=site.device) % 3).view(2, 3)
    found = Measured()
    for penalties, high in ((None, 1e1), ((kind, penalty), 1e4)):
        want = TensorOps().guide(logits, token, scale, None, penalties)
        got = sampling.guide(logits, token, scale, None, penalties)
        assert got is not None
        found = _near(got, want, 1e-6 * high, "guidance")
    return found


def filters(site: Site, sizes: tuple[int, ...] = (1000,)) -> Measured:
    """Compare filtered probabilities."""
    from lantern_accel_cuda.kernels import sampling

    found = Measured()
    for size in sizes:
        logits = 4 * site.numbers(size, 6, size)
        logits[1, ::3] = float("-inf")
        for given in FILTERS:
            want, got = TensorOps().filter(logits, given), sampling.filter(logits, given)
            assert got is not None
            ours, theirs = got.sort(dim=-1).values, want.sort(dim=-1).values
            what = f"probabilities of {given}, {size} codes"
            found = _near(ours, theirs, PROBABILITIES, what)
    return found


def samples(site: Site, sizes: tuple[int, ...] = (1000,)) -> Measured:
    """Compare draws without replacement with the reference's, and with themselves."""
    from lantern_accel_cuda.kernels import sampling

    reference, turned, drawn = TensorOps(), 0, 0
    for size in sizes:
        weights = (4 * site.numbers(size, 6, size)).softmax(-1)
        u = site.uniforms(size, 6, 8)
        theirs = reference.sample(weights, u)
        ours, again = (sampling.sample_codes(weights, u, torch.int64) for _ in range(2))
        assert ours is not None and again is not None
        if not torch.equal(ours, again):
            raise Failed(f"draws from the same {size} weights differ from call to call")
        turned += int((ours != theirs).any(-1).sum())
        drawn += len(u)
    return within(turned / drawn, 0.2, "rows whose draws are not torch's")


def race(site: Site, sizes: tuple[int, ...] = (CODES,)) -> Measured:
    """Compare the race and its siblings with the noise as the host makes it, code by code."""
    from lantern_accel_cuda.kernels import race as kernels

    reference = TensorOps()
    keys = noise_keys([7, -(2**40)], [0, 3])
    positions = torch.tensor([[0, 1, 300], [65535, 2, 40]])
    for size in sizes:
        weights = (4 * site.numbers(size, 2, 3, size)).softmax(-1)
        weights[0, 1, ::2] = 0.0
        want = reference.race(weights.cpu(), keys, positions, 8)
        given = weights, keys.to(site.device), positions.to(site.device)
        got = kernels.race(*given, 8, torch.int64)
        alone = kernels.race(*given, 1, torch.int64)
        assert got is not None and alone is not None
        for found, many in ((got, 8), (alone, 1)):
            wrong = int((found.cpu() != want[..., :many]).sum())
            if wrong:
                raise Failed(
                    f"{wrong} of {found.numel()} codes of the race are not the reference's"
                )
    return Measured("every code is the reference's", 0.0, 0.0)


def walks(
    site: Site,
    size: int = 500,
    images: int = 4,
    forms: Sequence[tuple[AcceptanceRule, Residual]] | None = None,
) -> Measured:
    """Compare walks down random drafts with the tensor code; ``forms``: rules with their residuals."""
    from lantern_accel_cuda.kernels import accept, sampling

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
                _near(found[3][same], want.weights[same], 1e-4, what)
    if not kept:
        raise Failed("no draft was kept, so the walk was not seen")
    cases = 2 * len(forms) * images
    # One walk of a few may be turned by rounding.
    return within(
        turned / cases, max(TURNED, 1.5 / cases), "images whose walk is not the tensor code's"
    )


#: Outputs and inputs of the matrices that are compared: no whole blocks, and inputs that programs share.
MATRICES = ((200, 136), (72, 1088))


def quantized_matmuls(site: Site, rows: tuple[int, int] = (1, 33)) -> Measured:
    """Compare matmuls with quantized weights: each matrix with each number of rows or a bias.

    Not every combination: each of them is compiled, and an image waits for that.
    """
    found, (few, many) = Measured(), rows
    for dtype in site.dtypes:
        for name in ROUNDINGS:
            for shape, count, biased in ((MATRICES[0], few, True), (MATRICES[1], many, False)):
                found, _ = _compare_product(site, name, shape, count, dtype, biased, tiled=False)
    return found


def tiles(site: Site, rows: tuple[int, int] = (33, 100)) -> Measured:
    """Compare the matmuls of tens of rows by such weights, and a row's among fewer rows and more."""
    from lantern_accel_cuda.kernels.tiles import DTYPES

    found, (some, many) = Measured(), rows
    for dtype in (one for one in site.dtypes if one in DTYPES):
        for name, how in ROUNDINGS.items():
            biased = how.bits == 4
            found, part = _compare_product(site, name, MATRICES[not biased], some, dtype, biased)
            if how.bits == 8:
                found, whole = _compare_product(site, name, MATRICES[1], many, dtype)
                if not torch.equal(part, whole[:some]):
                    raise Failed(
                        f"{name}: a row's matmul among {some} rows is another among {many}"
                    )
    return found


def _compare_product(
    site: Site, name: str, shape: tuple[int, int], count: int, dtype: torch.dtype,
    biased: bool = False, tiled: bool = True,
) -> tuple[Measured, Tensor]:  # fmt: skip
    """Compare a matmul of the first ``count`` of some rows with the dense matrix's; return it, too."""
    from lantern_accel_cuda.kernels import rounded as kernels

    outputs, inputs = shape
    weight = round_weights(site.numbers(0, outputs, inputs) * inputs**-0.5, ROUNDINGS[name])
    columns = kernels.Columns.of(weight)
    x = site.numbers(1, kernels.MOST_ROWS, inputs, dtype=dtype)[:count]
    bias = site.numbers(2, outputs, dtype=dtype) if biased else None
    want = x.double() @ weight.dense(torch.float64).t()
    want = want if bias is None else want + bias.double()
    got, again = (
        kernels.multiply(x, columns, bias, site.cores, tiled=tiled) for _ in range(2)
    )  # fmt: skip
    if not torch.equal(got, again):
        raise Failed(f"{name}: matmuls of {count} rows differ from call to call")
    return _near(got, want, TOLERANCE[dtype], f"matmul with {name} weights in {dtype}"), got


def few(site: Site, rows: tuple[int, ...] = (3, 33)) -> Measured:
    """Compare matmuls of few rows with what stands around them, stage by stage, with float64.

    Each shape with one number of rows, and inputs that programs share: a step's other rows and matrices
    are compared where they are first used.
    """
    from lantern_accel_cuda.kernels import few as kernels

    found, reference, inputs, hidden, heads = Measured(), TensorOps(), 640, 72, 3
    reference.device = site.device
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
            _near(kernels.sums(x, back, *last), plain, at, f"sums in {dtype}")
            residual = site.numbers(9, 1, count, hidden, dtype=dtype)
            plain = plain + residual.double()
            kernels.add(x, back, residual, *last)
            _near(residual, plain, at, f"product and residual in {dtype}")
            gate, up = (normed @ gates.double().t()).chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
            got = kernels.gate(x, gain, 1e-5, gates, *last)
            _near(got, want, at, f"norm, product and gate in {dtype}")
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
                kernels.rotate(x, gain, 1e-5, queries, *rotary, address, k, v, heads, *last)
                for _ in range(2)
            )
            if not torch.equal(got, again):
                raise Failed(f"matmuls of {count} rows differ from call to call")
            found = _near(got, turned[:, :, 0], at, f"norm, product and rotation in {dtype}")
            for mine, other in zip(ours.buffers, theirs.buffers, strict=True):
                _near(mine, other, at, f"written keys and values in {dtype}")
    return found


def advance(site: Site, passes: int = 5, codes: int = CODES) -> Measured:
    """Compare what follows a pass, every buffer to the bit, in plain steps and in windows of drafts."""
    from lantern_accel_cuda.steps import fused_step

    reference = TensorOps()
    reference.device, reference.index = site.device, site.index
    steps = 0
    for tree in (NoTree(), Window(length=6)):
        engine, rows = _engine(reference, tree, codes=codes), site.numbers(5, 64, codes)
        after = fused_step(reference, replace(_plan(engine), target=None))
        for _ in range(passes):
            state, source = engine.state, engine.source
            drafted = source.draft(state)
            x = drafted if isinstance(tree, Window) else drafted.tokens
            place = engine.state.length.unsqueeze(1) + torch.arange(x.shape[1], device=site.device)
            logits = _likely(rows, place, x)
            want = _by_operators(engine, drafted, logits, logits)
            after.run(logits)
            for name, value in _changes(engine).items():
                # The last column is for what is past the image.
                ours, theirs = (t[:, :-1] if name == "tokens" else t for t in (value, want[name]))
                if not torch.equal(ours, theirs):
                    raise Failed(f"{name} is not what the operators write, with {tree}")
            steps += 1
    return Measured(f"{steps} steps wrote what the operators write", 0.0, 0.0)


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


def enter(site: Site, codes: int = CODES) -> Measured:
    """Compare what a pass begins with, to the bit, in plain steps and windows, at an image's ends."""
    from lantern_accel_cuda.kernels.enter import enter as begun

    ops, cases = _Noting(), 0
    ops.device, ops.index = site.device, site.index
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
            got = begun(
                state.tokens, state.length, state.prefix_mask, target.tok_embeddings.weight,
                (target.rope_cos, target.rope_sin), at.nodes, at.branches,
                plan.sizes.slots - at.prefix - 1, layout.capacity, layout.heads,
            )  # fmt: skip
            for name, ours, theirs in zip(got._fields, got, (*ops.seen, ops.token), strict=True):
                shared = name == "mask" and len(ours) == 1
                if not torch.equal(ours.expand_as(theirs) if shared else ours, theirs):
                    raise Failed(f"{name} is not what the operators begin with, with {tree}")
            cases += 1
    return Measured(f"{cases} passes began as by the operators", 0.0, 0.0)


def guesses(site: Site, passes: int = 3, codes: int = CODES) -> Measured:
    """Compare what a draft head makes of a pass: buffers to the bit, and nearly all guesses."""
    from lantern_accel_cuda.kernels.advance import Advance
    from lantern_accel_cuda.kernels.guess import Guesses

    reference, same, every = TensorOps(), 0, 0
    reference.device, reference.index = site.device, site.index
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
        for name, value in _changes(engine).items():
            if name == "tokens":
                at = torch.arange(value.shape[1] - 1, device=site.device)
                known = at <= state.length.unsqueeze(1)
                equal = value[:, :-1] == want[name][:, :-1]
                drafts = ~known & (at < state.length.unsqueeze(1) + x.shape[1])
                same, every = same + int((equal & drafts).sum()), every + int(drafts.sum())
                equals = bool(equal[known].all())
            elif value.is_floating_point():
                equals = torch.allclose(value, want[name], rtol=1e-4, atol=1e-5)
            else:
                equals = torch.equal(value, want[name])
            if not equals:
                raise Failed(f"{name} is not what the operators write, with a draft head")
        state.tokens.copy_(want["tokens"])
    if same < 0.9 * every:
        raise Failed(f"{every - same} of {every} guesses are not those of the operators")
    return Measured(f"{same} of {every} guesses were those of the operators", 0.0, 0.0)


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
