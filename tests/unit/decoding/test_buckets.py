"""Buckets of the cache: how many there are, that none is left too late, and what a step looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, NAMED, SAMPLED, TREES, Late, Models, engine_of, start
from support.tiny import tiny_models
from torch import Tensor, nn
from unit.decoding.test_slots import any_path

from lantern_accel.decoding.buckets import APART, FIRST, buckets, usual
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.host_loop import HostLoop, SyncSchedule
from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.preferences import Preferences
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import Sampling, Strategy, Window
from lantern_accel.testing.static import without_data

WINDOW = Strategy(drafts=Window(length=5, passes=1), name="window")
ADAPTIVE_WINDOW = Strategy(drafts=Window.over((1, 2, 4)), name="adaptive window")
CASES: dict[str, Strategy] = {
    **{name: NAMED[name] for name in ("vanilla", "eagle2", "lantern++")},
    "window": WINDOW,
    "adaptive window": ADAPTIVE_WINDOW,
}


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models(0)


def parts(engine: Engine) -> list[int]:
    g = engine.geometry
    least = g.prefix + g.ahead
    return list(range(least + 3, g.target_slots, max((g.target_slots - least) // 4, 1)))


# --- sizes ----------------------------------------------------------------------------------------


@given(whole=st.integers(1, 6000), needed=st.integers(1, 300), by=st.sampled_from([1, 8, 128]))
def test_buckets_rise_and_are_worth_their_graphs(whole: int, needed: int, by: int) -> None:
    whole = -(-whole // by) * by
    found = buckets(whole, needed, lambda slots: -(-slots // by) * by)
    assert found == sorted(set(found))
    assert all(needed <= size and size % by == 0 for size in found)
    assert all(APART * a <= b for a, b in pairwise([*found, whole]))
    if whole <= 2 * FIRST:
        assert not found
    if whole > 3 * FIRST and needed <= FIRST:
        assert found[0] == FIRST
        # An image of one bucket after the other reads a part of what it would read of the whole.
        read = sum((b - a) * b for a, b in pairwise([0, *found, whole]))
        assert read < 0.75 * whole**2


@pytest.mark.parametrize(
    ("whole", "found"),
    [
        (64 + 57, []),
        (1 + 256 + 57, []),
        (120 + 256 + 57, []),
        (1 + 576, [256, 384]),
        (120 + 1024 + 57, [256, 512, 896]),
        (2400, [256, 512, 1024, 1664]),
    ],
)
def test_the_sizes_that_models_have(whole: int, found: list[int]) -> None:
    assert buckets(whole, 130) == found


class Wide(TensorOps):
    """Lays caches out in blocks of 384 slots."""

    def kv_layout(self, layers: int, rows: int, capacity: int, *rest: Any) -> KVLayout:
        return KVLayout(layers, rows, -(-capacity // 384) * 384, *rest)


def test_a_device_s_own_blocks_are_kept(models: Models) -> None:
    geometry = replace(engine_of(models, NAMED["vanilla"], SAMPLED).geometry, tokens=1500)
    for ops, found in ((TensorOps(), [256, 512, 1024]), (Wide(), [384, 768, 1152])):
        layout = ops.kv_layout(2, 2, 1505, 2, 16, torch.float32)
        assert usual(geometry, layout, ops) == found[:3]
    skips = TensorOps()
    skips.preferences = Preferences(skips_hidden=True)
    assert usual(geometry, layout, skips) == []


@pytest.mark.parametrize(("images", "found"), [(1, []), (8, [512]), (64, [256, 512])])
def test_where_graphs_compile_long_a_bucket_spares_a_share_of_a_step(
    images: int, found: list[int]
) -> None:
    """LlamaGen-XL with a caption and guidance: 1.55 GB of weights, 283 MB of cache an image."""
    ops = TensorOps()
    g = Geometry(images, 2, 120, 576, 1, 0, 16384, 1280)
    layout = KVLayout(36, 2 * images, 768, 20, 64, torch.bfloat16)
    weights = nn.Linear(1, 775_000_000, bias=False, device="meta", dtype=torch.bfloat16)
    assert usual(g, layout, ops, weights) == [256, 512, 640]
    ops.preferences = Preferences(compiles=True)
    assert usual(g, layout, ops, weights) == found
    # Without weights to read the cache is all there is.
    assert usual(g, layout, ops) == [256, 512]


@pytest.mark.parametrize("name", CASES)
def test_a_small_cache_is_one_bucket(models: Models, name: str) -> None:
    engine = engine_of(models, CASES[name], SAMPLED, 2)
    assert engine.sizes == (engine.verifying.cache.layout.capacity,)


def test_a_bucket_that_holds_no_step_is_refused(models: Models) -> None:
    engine = engine_of(models, NAMED["lantern++"], SAMPLED)
    g = engine.geometry
    with pytest.raises(StrategyError, match="serves no step"):
        engine.divide([g.prefix + g.ahead - 1])
    with pytest.raises(StrategyError, match="serves no step"):
        engine.divide([engine.verifying.cache.layout.capacity])


# --- which one is next ----------------------------------------------------------------------------


class Rows:
    """Images without a device: each step adds what ``gains`` says, and copies come ``lag`` steps late."""

    now, returns = 0, False

    def __init__(self, g: Geometry, lag: int, gains: Callable[[], list[int]]) -> None:
        self.geometry, self.lag, self.gains, self.now = g, lag, gains, g.depth + 1
        self.session = SimpleNamespace(progress=self)
        self.source = self
        self.lengths, self.posted = [0] * g.batch, list[list[int]]()

    def step(self, slots: int) -> None:
        self.seen(slots)
        added = zip(self.lengths, self.gains(), strict=True)
        self.lengths = [min(n + gain, self.geometry.tokens - 1) for n, gain in added]

    def post(self) -> None:
        self.posted.append([*self.lengths])

    def read(self) -> Tensor:
        lengths = self.posted.pop(0)
        return torch.tensor([lengths, [self.geometry.tokens] * len(lengths)])

    def move(self, length: int) -> None:
        assert length == self.now

    def run(self, sizes: list[int], schedule: SyncSchedule, seen: Callable[[int], None]) -> int:
        """Run until the host knows that every image is complete; return the steps."""
        self.sizes, self.seen = sizes, seen
        course = HostLoop(self, None, schedule, 1, None)
        while not course.advance().complete:
            pass
        return course.index


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_bucket_is_left_too_late(data: st.DataObject) -> None:
    """Under any acceptance, and reports that come late or seldom."""
    draw = data.draw
    tokens, prefix, nodes = (
        draw(st.integers(20, 90)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )
    depth, batch = draw(st.integers(0, min(nodes - 1, 4))), draw(st.integers(1, 3))
    g = Geometry(batch, 1, prefix, tokens, nodes, depth, 0, 8, 8)
    sizes = draw(st.lists(st.integers(prefix + nodes, g.target_slots - 1), max_size=4, unique=True))
    lag, every = draw(st.integers(0, 3)), draw(st.sampled_from([None, 4]))
    gains = st.lists(st.integers(1, depth + 1), min_size=batch, max_size=batch)
    rows, ends = Rows(g, lag, lambda: draw(gains)), [0]

    def check(size: int) -> None:
        open_ = [n for n in rows.lengths if n + 1 < tokens]
        ends[0] += bool(open_)
        assert not open_ or size >= prefix + max(open_) + nodes or size == g.target_slots

    steps = rows.run([*sizes, g.target_slots], SyncSchedule(lag, every, every), check)
    assert ends[0] <= steps <= ends[0] + lag


def test_reports_keep_an_image_in_its_bucket() -> None:
    """Steps bring one token each where five are possible: a bucket is left where it must be."""
    g = Geometry(1, 1, 4, 100, 6, 4, 0, 8, 8)
    sizes, found = [40, 80, g.target_slots], list[int]()
    Rows(g, 0, lambda: [1]).run(sizes, SyncSchedule(0, None, None), found.append)
    exact = [next(s for s in sizes if s >= 4 + n + 6) for n in range(g.tokens - 1)]
    assert found == exact


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", ["mc_sim", "chain4", "dynamic"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_what_a_step_needs_lies_in_the_first_slots(
    models: Models, tree: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions below length + nodes lie in slots below it, whatever was accepted before."""
    engine = engine_of(models, Strategy(drafts=TREES[tree]), SAMPLED, batch=3)
    monkeypatch.setattr(engine.source, "judge", any_path(engine, share))
    start(engine)
    g, state = engine.geometry, engine.state
    with torch.inference_mode():
        while int(state.length.min()) + 1 < g.tokens:
            for image, length in enumerate(state.length.tolist()):
                edge = length + g.nodes
                assert int(state.slot_of[image, :edge].max()) < edge
                later = torch.arange(edge, g.image_slots)
                assert torch.equal(state.slot_of[image, edge:], later)
            engine.step()


# --- steps ----------------------------------------------------------------------------------------


def note(seen: list[int], engine: Engine) -> None:
    """Let an engine's steps note how many slots they look at."""
    step = engine.step

    def noted(slots: int | None = None) -> None:
        seen.append(slots or engine.sizes[-1])
        step(slots)

    engine.step = noted  # type: ignore[method-assign]  # a spy on the real method


@pytest.mark.parametrize(("late", "sampling"), [(False, GREEDY), (True, SAMPLED)], ids=["", "late"])
@pytest.mark.parametrize("name", CASES)
def test_buckets_change_no_token(models: Models, name: str, late: bool, sampling: Sampling) -> None:
    engine = engine_of(models, CASES[name], sampling, 2)
    if late:
        engine.session.progress = Late(engine.finite.report)
        if name == "adaptive window":
            engine.longest.session.progress = engine.session.progress  # which reads the same copy
    start(engine)
    with torch.inference_mode():
        want = engine.run()
        engine.divide(parts(engine))
        assert len(engine.sizes) > (1 if name == "adaptive window" else 3)
        seen: list[int] = []
        note(seen, engine)
        start(engine)
        got = engine.run()
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.steps, want.steps)
    assert seen[0] == engine.sizes[0] and len(set(seen)) > 1


def test_images_that_only_fill_a_batch_need_no_slots(models: Models) -> None:
    engine = engine_of(models, NAMED["vanilla"], SAMPLED, batch=4)
    engine.divide(parts(engine))
    start(engine)
    with torch.inference_mode():
        engine.leave_out(3)
        seen: list[int] = []
        note(seen, engine)
        engine.run()
    assert seen[0] == engine.sizes[0] and set(seen) == set(engine.sizes)
    assert engine.state.steps.tolist()[:3] == [35] * 3 and not engine.state.steps[3]


def widths_of(engine: Engine) -> set[int]:
    """Note how many slots the target's masks have from now on."""
    seen: set[int] = set()
    run = partial(type(engine.verifying).run, engine.verifying)

    def noting(*given: Any) -> Any:
        seen.add(given[-1].shape[-1])
        return run(*given)

    vars(engine.verifying)["run"] = noting
    return seen


def test_a_step_that_came_alone_looks_at_all_slots(models: Models) -> None:
    engine = engine_of(models, NAMED["lantern++"], SAMPLED)
    engine.divide(parts(engine))
    with torch.inference_mode():
        for step in (None, engine.step):
            start(engine)
            seen = widths_of(engine)
            engine.run(step)
            assert engine.sizes[-1] in seen
            assert (engine.sizes[0] in seen) is (step is None)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("eagle2", "window") else pytest.param(name, marks=pytest.mark.long)
        for name in CASES
    ],
)
def test_a_step_reads_as_many_slots_as_its_bucket_has(models: Models, name: str) -> None:
    """Without data, in every bucket: attention gets masks of just this width."""
    engine = engine_of(models, CASES[name], SAMPLED, 2)
    engine.divide(parts(engine)[::3])
    start(engine)
    for slots in engine.sizes:
        seen = widths_of(engine)
        with torch.inference_mode(), without_data():
            engine.step(slots)
        assert seen == {slots}
