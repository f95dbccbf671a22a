"""Profiling through the command: the protocol kept, nothing lost, every fault told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.device.backend import Stopwatch
from lantern_accel.errors import BackendError, RequestError
from lantern_accel.measure import ceilings, clock, samples, store
from lantern_accel.measure import run as measuring
from lantern_accel.measure.prompts import read_prompts
from lantern_accel.measure.reading import read_run
from lantern_accel.measure.record import PHASES, Interval, Plan, PromptSet, is_measured
from lantern_accel.measure.request import Request, choose_strategies
from lantern_accel.measure.run import Profiler
from lantern_accel.report import projection, published

STRATEGIES = "vanilla,eagle,lantern++"
PROMPTS = ("red heart", "dog face")
FEW = ("--quick", "--samples", "2", "--quality-images", "4", "--strategies", STRATEGIES)


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    monkeypatch.setattr(projection, "SIZES", ())
    monkeypatch.setattr(ceilings, "READING", 2e-4)
    monkeypatch.setattr(ceilings, "REPEATS", 2)
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER", 2**20)
    monkeypatch.setattr(ceilings, "LARGEST_MATRIX", 512)
    monkeypatch.setattr(clock, "LONG", 0.004)
    monkeypatch.setattr(clock, "RATIO", (0.3, 3))  # other work on the machine is not the question


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    """What the tiny model knows, with blank lines."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture
def profiler(tiny_model, prompt_file, tmp_path):
    """Make profilers of the tiny model in this process."""
    opened = []

    def make(out=tmp_path / "run.json", names=("vanilla", "lantern++"), resume=False, **changes):
        pipeline = lantern_accel.load(tiny_model, device="cpu")
        opened.append(pipeline)
        values = {
            "strategies": choose_strategies(pipeline, names, [1.0]),
            "prompts": read_prompts(prompt_file, pipeline),
            "plan": Plan(quick=True, samples=3, seconds=0, quality_images=4),
        }
        return Profiler(pipeline, Request(**(values | changes)), out, resume=resume)

    yield make
    for pipeline in opened:
        pipeline.close()


# --- a run, and the report on it ----------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_model, prompt_file, tmp_path_factory):
    """One run of the tiny model through the command."""
    folder = tmp_path_factory.mktemp("profiled")
    out = folder / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANTERN_ACCEL_CACHE", str(folder / "cache"))
        patch.setattr(ceilings, "LARGEST_BUFFER", 2**20)
        patch.setattr(ceilings, "LARGEST_MATRIX", 512)
        patch.setattr(clock, "RATIO", (0.3, 3))
        words = ["profile", "--device", "cpu", "--model", str(tiny_model), *FEW, "-o", str(out)]
        words += [
            "--prompts",
            str(prompt_file),
            "--batch",
            "1",
            "--batch",
            "2",
            "--trace",
            str(folder / "trace.json"),
        ]
        patch.setattr(sys, "argv", ["lantern-accel", *words])
        assert main(words) == 0
    return out


def test_a_run_fits_the_published_schema(measured):
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(published.published("run-2.json"))
    check.validate(json.loads(measured.read_text()))


def test_a_run_has_what_the_protocol_promises(measured):
    run = read_run(measured)
    assert run.state == "complete"
    assert run.command.startswith("lantern-accel profile --device cpu")
    assert {(c.strategy.name, c.batch) for c in run.cells} == {
        (name, batch) for name in STRATEGIES.split(",") for batch in (1, 2)
    }
    assert run.clock.stopwatch == Stopwatch.name
    assert run.ceilings.copy_bytes_per_s > 0
    assert run.environment.device.backend == "cpu"
    assert run.environment.versions["torch"]
    assert run.settings.prompts.used == list(PROMPTS)
    for cell in run.cells:
        assert len(cell.warmup) >= 3
        assert cell.cold_seconds > 0
        assert cell.memory.definition
        assert set(cell.step_ms) == {"draft", "verify", "accept", "commit", "host"}
        assert all(work.launches > 0 for name, work in cell.work.items() if name != "draft")
        assert len(cell.samples) == 2
        for sample in cell.samples:
            assert sample.images == cell.batch
            assert sample.tokens == 16 * cell.batch
            assert 0 < sample.decode < sample.total <= sample.wall
    assert {cell.step_ms["draft"] > 0 for cell in run.cells if cell.strategy.name == "eagle"} == {
        True
    }


def test_strategies_take_turns(measured):
    run = read_run(measured)
    for batch in (1, 2):
        taken = sorted(
            (sample.order, cell.strategy.name, sample.round)
            for cell in run.cells
            if cell.batch == batch
            for sample in cell.samples
        )
        rounds = [number for _, _, number in taken]
        assert rounds == sorted(rounds)
        assert all({n for _, n, r in taken if r == number} == set(STRATEGIES.split(","))
                   for number in set(rounds))  # fmt: skip
        # All strategies of a round draw the same prompts.
        seeds = {cell.samples[0].seed for cell in run.cells if cell.batch == batch}
        assert len(seeds) == 1


def test_every_relaxed_strategy_has_its_price(measured):
    run = read_run(measured)
    (price,) = run.quality
    assert price.strategy.name == "lantern++"
    assert isinstance(price.total_variation, Interval)
    assert 0 <= price.agreement.value <= 1
    assert price.images == 4
    assert {strip.strategy for strip in run.contact_sheet} == {"vanilla", "lantern++"}
    assert run.conformance == (
        "not measured: a quick run leaves it out; `lantern-accel conform cpu --json checks.json` checks "
        "it, and `lantern-accel compare` takes that file too"
    )


def test_a_trace_names_the_phases(measured):
    trace = json.loads((measured.parent / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"step", "draft", "verify", "accept", "commit"} <= names


def test_reports_are_made_from_runs(command, measured, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.json"
    data = json.loads(measured.read_text())
    other.write_text(json.dumps(data | {"name": "other"}))
    for kind in ("html", "md", "json"):
        out = tmp_path / f"report.{kind}"
        done = command("compare", measured, other, tmp_path / "none-*.json", "-o", out)
        assert done.returncode == 0, done.stderr
        assert "nothing matches" in done.stderr
        text = out.read_text()
        assert all(phase in text for phase in PHASES)
        assert "lantern++" in text
    assert "Device against device" in (tmp_path / "report.html").read_text()
    before = other.read_text()
    done = command("compare", measured, other, "-o", other)
    assert (done.returncode, other.read_text()) == (2, before)
    assert "is one of the files to compare" in done.stderr
    done = command("compare", measured, f"again={measured}", "-o", tmp_path / "report.md")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["settings"].update(weights_hash="f" * 16), "model hash is"),
        (lambda d: d["settings"]["sampling"].update(top_p=0.9), "sampling top_p is 0.9"),
        (lambda d: d.update(name="cpu run"), "two runs are named 'cpu run'"),
        (lambda d: d.update(quality=[]), "relaxed strategy without its quality figures"),
        (lambda d: d["cells"][0].update(warmup=[]), "after 0 warm-up decodings"),
        (lambda d: d.update(schema_version=9), "schema version 9"),
    ],
)
def test_faults_are_refused_in_one_line(command, measured, tmp_path, change, says):
    data = json.loads(measured.read_text())
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(data | {"name": "cpu run"}))
    data["name"] = "another"
    change(data)
    second.write_text(json.dumps(data))
    done = command("compare", first, second, "-o", tmp_path / "report.md")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "report.md").exists()


def test_the_command_refuses_before_it_loads(command, tiny_model, tmp_path):
    out = tmp_path / "run.json"
    out.write_text("{}")
    done = command("profile", "--device", "cpu", "--model", tiny_model, "-o", out)
    assert (done.returncode, out.read_text()) == (2, "{}")
    assert "exists already" in done.stderr
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("red heart\n\N{SNOWMAN}\n")
    words = ("profile", "--device", "cpu", "--model", tiny_model, "-o", tmp_path / "new.json")
    for more, says in (
        (("--prompts", unknown, *FEW), "has no word that this model knows"),
        (("--quick", "--strategies", "lantern"), "k = 1000 is too many for a codebook of 48"),
        (("--quick", "--strategies", "lantrn"), "unknown strategy 'lantrn'; did you mean lantern"),
        (("--quick", "--option", "compile"), "not of the form NAME=VALUE"),
    ):
        done = command(*words, *more)
        assert done.returncode == 2
        assert says in done.stderr
        assert not (tmp_path / "new.json").exists()
    done = command("compare", tmp_path / "none-*.json", "-o", tmp_path / "a.html")
    assert done.returncode == 2
    assert "there is no run to report on" in done.stderr
    done = command("compare", f"{'n' * 81}={out}", "-o", tmp_path / "a.html")
    assert done.returncode == 2
    assert "has 81 characters; 80 are the most" in done.stderr
    done = command("compare", out, "-o", tmp_path / "a.pdf")
    assert "no report's name" in done.stderr


# --- interruptions ------------------------------------------------------------------------------


def test_a_killed_run_is_completed(tiny_model, prompt_file, tmp_path):
    """Kill the process itself, in the middle of its samples."""
    out = tmp_path / "run.json"
    root = Path(lantern_accel.__file__).parents[1]
    paths = os.pathsep.join([str(root), str(root / "backends")])
    environ = os.environ | {
        "LANTERN_ACCEL_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]),
    }
    program = (
        "import sys; from lantern_accel.measure import ceilings, clock, store\n"
        "ceilings.LARGEST_BUFFER = 2**20; ceilings.LARGEST_MATRIX = 512\n"
        "clock.RATIO = (0.3, 3); store.WRITE_EVERY = 0.0\n"
        "from lantern_accel.cli import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", program, "profile", "--device", "cpu", "--model"]
    words += [str(tiny_model), *FEW, "--prompts", str(prompt_file), "-o", str(out), "--resume"]
    running = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE)
    until = time.monotonic() + 300
    while time.monotonic() < until and running.poll() is None:
        if out.is_file() and _samples(out) >= 2:
            break
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    said = running.communicate()[1].decode()
    assert running.returncode == -signal.SIGKILL, said
    assert read_run(out).state == "running"
    before = {(c.key, i): s for c in read_run(out).cells for i, s in enumerate(c.samples)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = read_run(out)
    assert after.state == "complete"
    assert len(after.sessions) == 2
    kept_samples = {(c.key, i): s for c in after.cells for i, s in enumerate(c.samples)}
    assert all(kept_samples[key] == sample for key, sample in before.items())
    assert len(after.quality) == 1


def test_a_run_that_ends_after_any_of_its_writes_is_completed(profiler, tmp_path, monkeypatch):
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
    for writes in (1, 2, 4, 9, 13, 6, 5, 4):
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


def _samples(out: Path) -> int:
    return sum(len(cell["samples"]) for cell in json.loads(out.read_text())["cells"])


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


def test_an_interrupted_run_is_no_other_run(profiler, tmp_path, monkeypatch):
    out = tmp_path / "run.json"
    monkeypatch.setattr(Profiler, "_price", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    stopped, said = profiler(out), []
    stopped.say = said.append
    with pytest.raises(KeyboardInterrupt):
        stopped.measure()
    assert said[-1].startswith("interrupted; 2 of 2 cells are finished and kept in")
    assert said[-1].endswith("go on with the same command and --resume")
    assert read_run(out).sessions[0].reason == "interrupted from the keyboard"
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
    assert [price.images for price in priced.quality] == [4]
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
    monkeypatch.setattr(clock, "RATIO", (0.0, 10.0))
    monkeypatch.setattr("lantern_accel.measure.reading.CLOCK_SLACK", 0.0)
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
    from lantern_accel.measure.price import PriceStudy

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        study = PriceStudy(pipeline, ["red heart", "dog face"], 3, 0, 1.0)
        nothing = study.measure(pipeline.strategy("lantern++", lam=1.0, k=4))
        assert nothing.agreement.value == 1.0
        assert nothing.total_variation.value == pytest.approx(0, abs=1e-12)  # float64's rounding
        assert nothing.first_difference.value == 16
        much = study.measure(pipeline.strategy("lantern", delta=1.0, k=40))
        assert much.total_variation.value > 0
        assert much.agreement.value < 1
        assert is_measured(much.chance_agreement)


def test_a_price_that_lacked_its_package_is_completed(profiler, tmp_path, monkeypatch):
    from lantern_accel.quality import features

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
    from lantern_accel.device.backend import Replay

    class Recorded(Replay):
        captured, nbytes, seconds = True, 1000, 0.25

        def timed(self):
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
