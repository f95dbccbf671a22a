"""Step costs on random weights: floors by hand, resuming, bad input."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import engine_of
from support.profiles import small_ceilings

from lantern_accel.device.backend import Backend, MemoryUse
from lantern_accel.device.plan import Refused
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import (
    DeviceMemoryError,
    DoesNotFitError,
    ModelError,
    RequestError,
    StrategyError,
)
from lantern_accel.families.random_weights import RandomModel, manifest_of_size, random_model
from lantern_accel.families.registry import family
from lantern_accel.memory.footprint import weight_bytes
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57, parse_drafts
from lantern_accel.strategy.values import Sampling, Strategy, named_strategy
from lantern_accel_profiles.commands.tables import numbers
from lantern_accel_profiles.measure import steps, work
from lantern_accel_profiles.measure.record import Run, StepCell
from lantern_accel_profiles.report.table import step_rows, step_table

TINY = {
    "dim": 32, "n_layer": 3, "n_head": 4, "ffn_dim": 48, "vocab_size": 128, "grid": 6,
    "conditioning": "class", "prefix_length": 1,
}  # fmt: skip

ROWS = steps.ROWS


def no_passes(run: Run) -> list[StepCell]:
    """Return what was measured next to passes."""
    return [cell for cell in run.steps if cell.kind != "pass"]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ROWS", (1, 2, 4))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    small_ceilings(monkeypatch)
    with open_backend("cpu") as opened:
        yield opened


def test_sizes_by_name_by_pattern_and_from_a_file(tiny: str, tmp_path: Path) -> None:
    assert manifest_of_size("llamagen-xl-384").target.num_tokens == 576
    assert manifest_of_size("llamagen-3b-512").target.num_tokens == 1024
    anole = manifest_of_size("anole-7b")
    # A table of 65,536 tokens, but a head of 8,192 codes.
    assert (anole.target.token_count, anole.target.vocab_size) == (65536, 8192)
    block, width = 4 * 4096**2 + 3 * 4096 * 11008, 4096
    numbers = 32 * block + (65536 + 8192) * width + (65536 + 2 * width) * width + block
    held = weight_bytes(anole, torch.float32)
    assert (held["target"] + held["drafter"]) / 4 == pytest.approx(numbers, rel=1e-3)
    assert manifest_of_size(tiny).target.num_tokens == 36
    bad = tmp_path / "bad.json"
    bad.write_text('{"dim": 30, "n_layer": 1, "n_head": 4}')
    for name, fragment in (
        ("llamagen-xs-384", "did you mean"),
        ("llamagen-b-250", "no size is named 'llamagen-b-250'"),
        (str(bad), "bad.json: the sizes: .*dim 30"),
        (str(tmp_path / "none.json"), "cannot be read as JSON"),
    ):
        with pytest.raises(ModelError, match=fragment):
            manifest_of_size(name)


def test_random_weights_are_seeded_and_of_the_asked_dtype(backend: Backend, tiny: str) -> None:
    config = manifest_of_size(tiny)
    one, two = (random_model(config, backend, torch.float32) for _ in range(2))
    assert torch.equal(one.target.tok_embeddings.weight, two.target.tok_embeddings.weight)
    assert one.target.tok_embeddings.weight.std() == pytest.approx(0.02, rel=0.1)
    assert one.target.rope_cos.abs().max() == 1
    assert one.neighbours.max() < config.target.vocab_size
    half = random_model(config, backend, torch.bfloat16)
    assert {p.dtype for p in half.target.parameters()} == {torch.bfloat16}
    assert half.target.rope_cos.dtype == torch.float32


@pytest.mark.parametrize("nodes", [2, 8, 16, 32, 60])
def test_a_bush_has_as_many_nodes_as_it_says(nodes: int) -> None:
    assert steps.bush(nodes).size[0] == nodes


def test_floors_by_hand(backend: Backend, tiny: str) -> None:
    model = random_model(manifest_of_size(tiny), backend, torch.float32)
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    head, row, length = 128 * 32, 2 * 2 * 32, 18
    seen = 1 + length + 1

    def floor(strategy: Strategy, *phases: str) -> float:
        models = model.target, model.drafter
        engine = engine_of(models, strategy, Sampling(cfg_scale=3.0), ops=backend)
        needs = work.step_needs(engine, work.visible_slots(engine, length))
        assert work.step_needs(engine) == needs  # the middle of 36 tokens
        return sum(needs[phase][1] for phase in phases)

    vanilla = 4 * (3 * block + head) + 4 * 3 * row * (seen + 1)
    assert floor(Strategy(), "verify") == vanilla
    tree = parse_drafts("0,1,00,01,000")
    eagle = Strategy(drafts=tree)
    verify = vanilla + 4 * 3 * row * 5
    assert floor(eagle, "verify") == verify
    # The drafter catches up, then runs two levels of inner nodes; the head reads all three.
    drafter = 4 * (2 * 32 * 32 + 32 + block - 32)
    assert floor(eagle, "draft", "verify") == verify + 3 * (drafter + 4 * row * seen) + 3 * 4 * head


@pytest.mark.long
def test_steps_from_several_places_need_what_the_cache_holds_there(
    backend: Backend, tiny: str
) -> None:
    options = {"nodes": (4,), "repeats": 1, "top_k": 20, "dtype": "float32"}
    run = steps.measure(backend, manifest_of_size(tiny), strategy="eagle", at=(0.0, 1.0), **options)
    plain = [cell for cell in run.steps if cell.kind == "vanilla"]
    assert [cell.label for cell in plain] == ["vanilla at 0%", "vanilla at 100%"]
    # Two rows of three layers, keys and values; ten steps and one must be left of 36 tokens.
    assert plain[1].floor_bytes - plain[0].floor_bytes == 4 * 2 * 3 * 2 * 32 * (36 - 11)
    with pytest.raises(RequestError, match="numbers from 0 to 1"):
        numbers("--at", ["0,1.5"], 0, 1)


def test_a_measurement_goes_on_where_it_stopped(
    backend: Backend, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cost.json"
    said: list[str] = []
    arguments = {"nodes": (4,), "repeats": 2, "drafts": "0,1,00", "out": out, "dtype": "float32"}
    seen = steps.StepTimer.ms

    def stops(self: steps.StepTimer) -> float:
        if self.cell.kind == "step":
            raise KeyboardInterrupt
        return seen(self)

    monkeypatch.setattr(steps.StepTimer, "ms", stops)
    with pytest.raises(KeyboardInterrupt):
        steps.measure(backend, manifest_of_size(tiny), **arguments)
    stored = Run.model_validate_json(out.read_text())
    assert [cell.label for cell in no_passes(stored)] == ["vanilla", "verify 4"]
    # Passes of the usual windows come before, as they decide most.
    assert [cell.label for cell in stored.steps if cell.kind == "pass"] == ["pass 1", "pass 2"]
    assert stored.state == "interrupted" and "keyboard" in stored.sessions[0].reason
    monkeypatch.setattr(steps.StepTimer, "ms", seen)
    # Operators are counted that a native step has none of.
    monkeypatch.setattr(backend, "fused_step", lambda plan: Refused("not here"))
    run = steps.measure(backend, manifest_of_size(tiny), **arguments, say=said.append)
    assert not any("vanilla" in line or "ceilings" in line for line in said)
    assert [cell.label for cell in no_passes(run)] == ["vanilla", "verify 4", "lantern++"]
    assert (run.state, len(run.sessions)) == ("complete", 2)
    assert run.steps[0].ms == stored.steps[0].ms
    assert run.ceilings == stored.ceilings
    rows = step_rows(run)
    passes = [row["step"] for row in rows[3:]]
    assert passes == [f"pass {n}" for n in (1, 2, 4)]
    assert [row["nodes"] for row in rows[:3]] == [1, 4, 4]
    assert [row["rows"] for row in rows] == [2, 8, 8, 1, 2, 4], "with guidance two a node"
    assert rows[4]["over_plain"] == 1, "a plain pass has two rows"
    floors = {row["rows"]: row["floor_ms"] for row in rows[3:]}
    assert floors[1] <= floors[2] <= floors[4] <= 4 * floors[1]
    assert rows[0]["over_plain"] == 1
    assert rows[0]["operators"] < rows[2]["operators"]
    for row in rows:
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["ms"])
        assert row["over_plain"] == row["ms"] / row["plain_ms"], "as the milliseconds next to it"
    assert step_table(run).count("\n") == 6 + len(passes)
    with pytest.raises(RequestError, match="its dtype is 'float32', not 'bfloat16'"):
        steps.measure(backend, manifest_of_size(tiny), **{**arguments, "dtype": "bfloat16"})


def test_what_a_cell_took_is_free_for_the_next(backend: Backend, tiny: str) -> None:
    model = steps.make_model(backend, manifest_of_size(tiny), "float32", 1)
    sampling = steps.sampling_of(manifest_of_size(tiny), None, None)
    gc.disable()  # the engine is in a cycle, which must not wait for a collection
    try:
        for cell in steps.whole_steps(steps.PLAIN, 1, [4], drafter=False):
            with backend.inference(), steps.StepTimer(backend, model, cell, sampling) as timer:
                timer.ms()
                state = weakref.ref(timer.engine.state)
            assert state() is None
    finally:
        gc.enable()


def test_two_steps_that_do_not_fit_at_once_have_the_memory_in_turns(
    backend: Backend, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = weakref.WeakSet[Any]()
    made = RandomModel.engine

    def engine(*given: Any) -> Any:
        if len(alive):
            raise DoesNotFitError("there is memory for one engine")
        alive.add(found := made(*given))
        return found

    monkeypatch.setattr(RandomModel, "engine", engine)
    run = steps.measure(
        backend, manifest_of_size(tiny), strategy="vanilla", nodes=(4,), repeats=2, dtype="float32"
    )
    assert [(len(cell.ms), len(cell.vanilla_ms)) for cell in run.steps] == [(2, 2)] * len(run.steps)


def test_the_time_of_an_image_is_projected_from_its_plain_steps(
    backend: Backend, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ROWS", ())
    monkeypatch.setattr(steps.StepTimer, "ms", lambda self: 1.0 + 100 * self.cell.at**2)
    asked: Any = {"strategy": "vanilla", "nodes": (), "repeats": 2, "dtype": "float32"}
    run = steps.measure(backend, manifest_of_size(tiny), at=(0.0, 0.5, 1.0), **asked)
    seconds = run.settings.tokens * (0.25 * (1 + 26) + 0.25 * (26 + 101)) / 1e3
    assert f"projected, not measured: {run.settings.tokens} plain steps" in step_table(run)
    assert f"take {seconds:.3g} s" in step_table(run)
    run = steps.measure(backend, manifest_of_size(tiny), at=(0.0, 0.5), **asked)
    assert "projected" not in step_table(run)


def test_passes_are_timed_next_to_the_plain_one(
    backend: Backend, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows cost is known where nothing else is asked for, in plain passes."""
    monkeypatch.setattr(steps, "ROWS", ROWS)
    monkeypatch.setattr(steps.StepTimer, "ms", lambda self: 1.0 + 0.5 * self.cell.nodes)
    report = steps.measure(
        backend, manifest_of_size(tiny), strategy="vanilla", nodes=(), repeats=2, dtype="float32"
    )
    passes = {row["nodes"]: row for row in step_rows(report) if row["step"].startswith("pass")}
    assert {n: row["over_plain"] for n, row in passes.items()} == {
        n: (1 + 0.5 * n) / 2 for n in (1, 2, 4, 8, 16, 32)
    }, "an image has 36 tokens"
    alone = steps.passes(tokens=256, branches=1)
    assert [cell.nodes for cell in alone] == [1, 32, 64, 2, 4, 8, 16, 48]
    assert [cell.nodes for cell in steps.passes(256, 3, 2)] == [3, 32, 64]


@pytest.mark.long
def test_a_dynamic_tree_and_several_batches(backend: Backend, tiny: str) -> None:
    report = steps.measure(
        backend, manifest_of_size(tiny), strategy="eagle2", drafts="dynamic:3,2,9", batches=(1, 2),
        nodes=(), repeats=1, dtype="float32",
    )  # fmt: skip
    assert [(c.label, c.batch) for c in no_passes(report)] == [
        ("vanilla", 1), ("eagle2", 1), ("vanilla", 2), ("eagle2", 2),
    ]  # fmt: skip


@pytest.mark.long
def test_a_window_by_a_draft_head_is_timed_with_one_that_fits(backend: Backend, tiny: str) -> None:
    given = {"strategy": "scd", "drafts": "window:4,head", "nodes": [2], "repeats": 1, "top_k": 0}
    for manifest in (manifest_of_size(tiny), family("janus").tiny()):
        found = steps.measure(backend, manifest, **given)
        assert len(next(one for one in found.steps if one.label.startswith("scd")).ms) == 1


def test_the_middle_of_an_image_is_where_steps_are_timed(backend: Backend, tiny: str) -> None:
    model = random_model(manifest_of_size(tiny), backend, torch.float32)
    tree = parse_drafts("0,00,000")
    with torch.inference_mode():
        cell = StepCell(kind="step", strategy=Strategy(drafts=tree), batch=1, nodes=4)
        timed = steps.StepTimer(backend, model, cell, Sampling(cfg_scale=3.0))
        for _ in range(3):
            timed.ms()
            # No image may end while the clock runs: its steps would do nothing.
            assert 18 < int(timed.engine.state.length) < 35


@pytest.mark.long
def test_what_does_not_fit_is_told_before_it_is_made(
    backend: Backend, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = weight_bytes(manifest_of_size(tiny), torch.float32)
    need = held["target"] + held["drafter"]
    monkeypatch.setattr(backend, "memory", lambda: MemoryUse(limit=2**34, free=need - 1))
    with pytest.raises(DeviceMemoryError, match=r"takes .* device cpu has .* free.*use the dtype"):
        steps.measure(backend, manifest_of_size(tiny), dtype="float32", strategy="eagle")
    free = iter([need])
    monkeypatch.setattr(backend, "memory", lambda: MemoryUse(limit=2**34, free=next(free, 2000)))
    with pytest.raises(DoesNotFitError, match="a batch of 1 takes"):
        steps.measure(
            backend,
            manifest_of_size(tiny),
            strategy="eagle",
            drafts="0",
            dtype="float32",
            batches=(64,),
        )


def test_bad_input(backend: Backend, tiny: str) -> None:
    for kind, given, fragment in (
        (RequestError, {"cfg_scale": float("inf")}, "finite"),
        (StrategyError, {"strategy": "lanten"}, "did you mean lantern"),
        (StrategyError, {"strategy": "lantern"}, "a codebook of 128"),
    ):
        with pytest.raises(kind, match=fragment):
            steps.measure(backend, manifest_of_size(tiny), **given)


def test_the_papers_sampling_by_kind_of_model() -> None:
    text, classes = manifest_of_size("anole-7b"), manifest_of_size("llamagen-xl-384")
    assert steps.sampling_of(text, None, None) == Sampling(cfg_scale=7.5, top_k=1000)
    assert steps.sampling_of(classes, None, None) == Sampling(cfg_scale=4.0)
    assert steps.sampling_of(classes, 2.0, 5) == Sampling(cfg_scale=2.0, top_k=5)
    chosen = named_strategy("lantern++", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    assert steps.whole_steps(chosen, 1, (8,))[-1].nodes == 58


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("janus", False), pytest.param("glm_image", True, marks=pytest.mark.long)],
)
def test_models_without_a_drafter_have_windows(name: str, drafter: bool) -> None:
    """Their steps have a floor too; a prior without guidance has one row per image."""
    kind = family(name)
    manifest = kind.tiny().model_copy(update={"drafter": None})
    if drafter:
        manifest = kind.fitting_drafter(manifest)
    with open_backend("cpu") as backend:
        report = steps.measure(
            backend, manifest, strategy="eagle2" if drafter else "lantern++", drafts=None,
            top_k=20, nodes=(4,), repeats=2, dtype="float32",
        )  # fmt: skip
    drafted = ["verify 4", "eagle2"] if drafter else ["scd 4"]
    assert [cell.label for cell in no_passes(report)] == ["vanilla", *drafted]
    plain = next(c for c in report.steps if c.kind == "pass" and c.ms == c.vanilla_ms)
    assert plain.rows == (1 if name == "glm_image" else 2)
    assert all(cell.floor_bytes > 0 and len(cell.ms) == 2 for cell in report.steps)
