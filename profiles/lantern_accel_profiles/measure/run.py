"""Runs the measuring protocol, and resumes it after whatever ends it.

For each batch size and temperature: every strategy once cold and alone; warm-up rounds until no
strategy gets faster and no counter moves; then timed rounds, each strategy once per round in an order
that changes, until each has its samples and its seconds. Then the quality loss of every relaxed
strategy. The file is written as the run proceeds; what it holds is never measured again.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.errors import BackendError, Ended, LanternError, StrategyError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.choose import read_strategy
from lantern_accel.strategy.values import AUTO, Strategy, Window
from lantern_accel_profiles import store
from lantern_accel_profiles.measure import environment, samples
from lantern_accel_profiles.measure.ceilings import check_stopwatch, measure_ceilings
from lantern_accel_profiles.measure.prompts import prompts_of
from lantern_accel_profiles.measure.quality_loss import PLAIN, QualityStudy, images_for
from lantern_accel_profiles.measure.reading import clock_fault
from lantern_accel_profiles.measure.record import (
    WARMUPS,
    Cell,
    Plan,
    PromptSet,
    Run,
    RunSession,
    RunSettings,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.measure.samples import MOST_SAMPLES, about, interleave, seconds_left
from lantern_accel_profiles.measure.trace import write_trace
from lantern_accel_profiles.quality.features import is_there

if TYPE_CHECKING:
    from fastapi import FastAPI

QUICK = Plan(quick=True, samples=5, seconds=0.0, quality_images=16)
FULL = Plan(quick=False, samples=30, seconds=10.0, quality_images=64)
#: Seconds between two lines about samples, at least.
PACE = 10.0
#: What is measured where nobody names strategies; those with a drafter only where the model has one.
USUAL = (AUTO, "eagle", "eagle2", "lantern", "lantern++", "scd")


@dataclass
class ProfileRequest:
    """What a run is asked to measure; ``conform`` checks the backend, None leaves that out.

    ``window``: somebody chose the length of windows, so that batches do not shorten them; ``wait``:
    seconds that other programs of the machine have to end.
    """

    strategies: Sequence[Strategy]
    prompts: PromptSet
    plan: Plan
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (1.0,)
    seed: int = 0
    name: str = "run"
    command: str = "lantern-accel profile"
    options: dict[str, object] = field(default_factory=dict)
    load_seconds: float = 0.0
    trace: Path | None = None
    conform: Callable[[Backend], ConformanceReport] | None = None
    window: bool = False
    wait: float = 0.0


def usual_names(pipeline: Pipeline) -> list[str]:
    """Return the names of :data:`USUAL` that the model can decode with: auto is always among them."""
    drafter = pipeline.model.drafter is not None
    return [name for name in USUAL if drafter or not pipeline.strategy(name).needs_drafter]


def choose_strategies(
    pipeline: Pipeline,
    names: Sequence[str],
    temperatures: Sequence[float],
    drafts: str | None = None,
    window: int | None = None,
) -> list[Strategy]:
    """Return strategies by name, or by settings or a file (which name all but auto), vanilla first.

    ``drafts`` is for those with a drafter, ``window`` (its length) for those that draft in one; settings
    of a strategy's own come first.
    Raises StrategyError for one that the model cannot decode with at one of the temperatures.
    """
    wanted = list(dict.fromkeys(["vanilla", *names]))
    asked = {name: one for name, one in (("drafts", drafts), ("window", window)) if one is not None}
    found, left = [], set(asked)
    for text in wanted:
        own = read_strategy(text)
        if "preset" in own:
            raise StrategyError(f"{text} is a preset with its own sampling; write its strategy")
        one = pipeline.strategy(**own)
        takes = {"drafts": one.needs_drafter, "window": isinstance(one.drafts, Window)}
        changes = {name: value for name, value in asked.items() if takes[name]}
        left -= changes.keys()
        one = pipeline.strategy(**(changes | own))
        own_name = one.name != AUTO and (":" in text or text.endswith(".json"))
        found.append(one.override(name=text) if own_name else one)
        if found[-1].name in {other.name for other in found[:-1]}:
            raise StrategyError(f"two strategies are named {one.name!r}; measure them in two runs")
    if left:
        raise StrategyError(f"--{min(left)} changes none of {', '.join(wanted)}; leave it out")
    for temperature in temperatures:
        sampling = pipeline.sampling(temperature=temperature)
        for one in found:
            pipeline.engines.check(pipeline.measurements.tune_strategy(one, 1, sampling), sampling)
    return found


def fresh_name(device: str) -> str:
    """Return a name that no other run has."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M")
    return f"{device.replace(':', '-')}-{moment}-{secrets.token_hex(4)}"


def command_of(arguments: Sequence[str], program: str = "lantern-accel") -> str:
    """Return what to type to measure again: no ``--resume``, and no machine's folders before names."""
    words = []
    for word in arguments:
        if word != "--resume":
            option, sign, value = word.partition("=") if word.startswith("-") else ("", "", word)
            words.append(option + sign + re.split(r"[/\\]", value.rstrip("/\\"))[-1])
    return f"{program} {shlex.join(words)}"


Say = Callable[[str], None]


def settings_of(pipeline: Pipeline, request: ProfileRequest) -> RunSettings:
    """Return what a run of this request on this pipeline is a run of."""
    model = pipeline.model
    return RunSettings(
        model=model.manifest.name,
        weights_hash=model.weights_hash,
        tokens=model.manifest.target.num_tokens,
        sampling=pipeline.sampling(),
        prompts=request.prompts,
        seed=request.seed,
        dtype=str(pipeline.dtype).removeprefix("torch."),
        options=request.options,
        weights=model.rounding.weights if model.rounding else "full",
        rounding=model.rounding,
        plan=request.plan,
    )


def add_service_run(app: FastAPI, pipeline: Pipeline) -> None:
    """Add ``GET /run`` to a service: a run without figures that says what it serves, and on what.

    A client that loads the service adds its prompts and its figures.
    """
    plan = Plan(quick=False, samples=1, seconds=0.0, quality_images=0)
    request = ProfileRequest([], prompts_of("the client's", []), plan)

    @app.get("/run")
    def run() -> dict[str, object]:
        settings = settings_of(pipeline, request)
        found = fresh_run(pipeline.backend, pipeline.dtype, settings, "service", "")
        return found.model_dump(mode="json")


def fresh_run(
    backend: Backend, dtype: torch.dtype, settings: RunSettings, name: str, command: str
) -> Run:
    """Return a run on an opened device that nothing was measured of yet."""
    begun = not_measured("the run has just begun")
    return Run(
        name=name,
        state="running",
        command=command,
        settings=settings,
        environment=environment.describe(backend, dtype),
        clock=begun,
        ceilings=begun,
        sessions=[],
        conformance=not_measured(
            "a quick run leaves it out; "
            f"`lantern-accel conform {backend.name} -o checks.json` checks it, and "
            "`lantern-accel compare` takes that file too"
        ),
    )


@contextmanager
def working_on(run: Run, keep: store.Keeper, load_seconds: float) -> Iterator[None]:
    """Add a session to a run that lasts as long as the block; where it ends early, the file says why."""
    run.state = "running"
    run.sessions.append(session := RunSession(started=now(), load_seconds=load_seconds))
    keep()
    try:
        yield
        run.state = "complete"
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, CancelledError)):
            session.reason = "interrupted from the keyboard"
        elif isinstance(error, Ended):
            session.reason = "ended by SIGTERM"
        else:
            own = "" if isinstance(error, LanternError) else f"{type(error).__name__}: "
            session.reason = own + (str(error).splitlines() or [""])[0]
        run.state = "interrupted"
        raise
    finally:
        session.ended = now()
        keep()


class Measurement:
    """A run and its file: opened or resumed, written as it grows; without ``out`` nothing is written."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        fresh: Run,
        out: Path | None = None,
        *,
        resume: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.backend, self.dtype, self.out, self.say = backend, dtype, out, say
        self.run = store.resume(out if resume else None, fresh, identity)
        self.run.settings.plan = fresh.settings.plan
        self.keep = store.Keeper(out, self.run)
        self.number = len(self.run.sessions)

    @contextmanager
    def session(self, load_seconds: float = 0.0, wait: float = 0.0) -> Iterator[None]:
        """Measure inside the block, ceilings first; whatever ends it early, the file says why.

        ``wait``: seconds that other programs have to end. Raises BackendError where the device fails, or
        the machine is busy for longer; RequestError on a simulated device, whose times say nothing about
        the device.
        """
        environment.check_clock(self.backend)
        environment.wait_for_quiet(wait, self.say)
        run = self.run
        try:
            with working_on(run, self.keep, load_seconds):
                self.say("checking the stopwatch")
                run.clock = check_stopwatch(self.backend)
                if isinstance(run.ceilings, str):
                    run.ceilings = measure_ceilings(self.backend, self.dtype, self.say)
                    self.keep()
                yield
                run.environment.conditions_after = environment.conditions(self.backend)
        except (KeyboardInterrupt, Ended):
            self.say(f"interrupted; {self.describe_rest()}")
            raise
        except BackendError as error:  # of its own type, with what is left
            error.args = (f"{error}; {self.describe_rest()}",)
            raise
        except LanternError:
            raise
        except Exception as error:
            raise BackendError(
                f"the device {self.backend.device} failed while measuring ({run.sessions[-1].reason}); "
                + self.describe_rest()
            ) from error

    def describe_rest(self) -> str:
        """Say what an interruption leaves, and how to go on."""
        where = "lost; -o keeps it" if self.out is None else f"kept in {self.out}"
        return f"what was finished is {where}; go on with the same command"


class Profiler(Measurement):
    """Carries a run of requests from wherever its file is to its end."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: ProfileRequest,
        out: Path | None = None,
        *,
        resume: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.pipeline, self.request, self.resumes = pipeline, request, resume
        self.prompts = request.prompts.used
        self._began = time.perf_counter()
        self._said = float("-inf")
        settings = settings_of(pipeline, request)
        fresh = fresh_run(pipeline.backend, pipeline.dtype, settings, request.name, request.command)
        super().__init__(pipeline.backend, pipeline.dtype, fresh, out, resume=resume, say=say)
        self.cells = self._cells()

    def _strategies(self, temperature: float, batch: int) -> list[Strategy]:
        """Return the wanted strategies as a request would have them: trees tuned, windows fitted."""
        sampling = self.pipeline.sampling(temperature=temperature)
        tuned, asked = self.pipeline.measurements.tune_strategy, self.request.window  # which stays
        return [
            one if asked and one.drafts.kind == "window" else tuned(one, batch, sampling)
            for one in self.request.strategies
        ]

    def _cells(self) -> list[Cell]:
        """Return the wanted cells, those of the file where it has them."""
        known = {cell.key: cell for cell in self.run.cells}
        wanted = [
            samples.new_cell(strategy, batch, temperature)
            for temperature in self.request.temperatures
            for batch in self.request.batches
            for strategy in self._strategies(temperature, batch)
        ]
        wanted = [known.setdefault(cell.key, cell) for cell in wanted]
        self.run.cells = list(known.values())
        return wanted

    # --- the whole -----------------------------------------------------------------------------

    def measure(self) -> Run:
        """Measure what the file does not hold yet; raises as :meth:`session`."""
        complete = all(map(self._is_done, self.cells)) and not any(
            map(self._list_without_loss, self.request.temperatures)
        )
        if complete and self.run.state == "complete":
            self.say("the run is complete already")
            return self.run
        with self.session(self.request.load_seconds, self.request.wait):
            self._measure()
        return self.run

    def describe_rest(self) -> str:
        """Say what an interruption leaves, and how to go on."""
        done = f"{sum(map(self._is_done, self.cells))} of {len(self.cells)} cells"
        if self.out is None:
            return f"{done} were finished; -o keeps them"
        way = "" if self.resumes else " and --resume"
        return f"{done} are finished and kept in {self.out}; go on with the same command{way}"

    def _measure(self) -> None:
        run, request = self.run, self.request
        if isinstance(run.conformance, str) and request.conform is not None:
            self.say("checking the backend")
            run.conformance = request.conform(self.backend)
            self.keep()
        for temperature in request.temperatures:
            for batch in request.batches:
                here = [c for c in self.cells if (c.batch, c.temperature) == (batch, temperature)]
                self._group([cell for cell in here if not self._is_done(cell)])
            self._measure_loss(temperature)
        if request.trace is not None:
            # One image, where there is such a cell; auto, where it is among them.
            cell = min(self.cells[::-1], key=lambda one: (one.batch, one.strategy.name != AUTO))
            self.say(f"tracing a request of {cell.name} into {request.trace}")
            texts = samples.batch_prompts(self.prompts, cell.batch, 0)
            write_trace(self.pipeline, cell, texts, request.trace)

    # --- speed ---------------------------------------------------------------------------------

    def _is_done(self, cell: Cell) -> bool:
        plan, n = self.request.plan, len(cell.samples)
        seconds = sum(s.wall for s in cell.samples if is_measured(s.wall))
        return n >= plan.samples and (seconds >= plan.seconds or n >= MOST_SAMPLES)

    def _group(self, cells: list[Cell]) -> None:
        """Measure cells of one batch size and temperature, interleaved."""
        for cell in cells:
            if isinstance(cell.step_ms, str) and not cell.samples:
                self.say(f"{cell.name}: cold")
                samples.measure_cold(self.pipeline, cell, self.prompts, self.number)
                self.keep(force=False)
        if not cells:
            return
        self.say(
            f"batch {cells[0].batch}, temperature {cells[0].temperature:g}{self._describe_left()}"
        )
        self.pipeline.engines.keep(len(cells))
        self._warm(cells)
        for cell in interleave(cells, lambda c: len(c.samples), self._is_done, self.request.seed):
            self._sample(cell)

    def _describe_left(self) -> str:
        """Say how long the whole run still takes, quality included; empty before anything has run."""
        images = sum(
            images_for(len(self._list_without_loss(temperature)), self.request.plan.quality_images)
            for temperature in self.request.temperatures
        )
        seconds = seconds_left(self.cells, self.request.plan, images)
        return "" if seconds is None else f"; {about(seconds)} left"

    def _warm(self, cells: list[Cell]) -> None:
        """Decode in rounds until every cell has settled, or had its share."""
        for cell in cells:
            cell.settled = False
        most = samples.QUICK_WARMUPS if self.request.plan.quick else samples.MOST_WARMUPS
        for number in range(most):
            for cell in [cell for cell in cells if not cell.settled]:
                self.say(f"{cell.name}: warm-up{self._describe_left()}")
                cell.warmup.append(
                    samples.warm_up(self.pipeline, cell, self.prompts, 2 + number, self.number)
                )
                here = [w for w in cell.warmup if w.session == self.number]
                cell.settled = len(here) >= WARMUPS and samples.has_settled(here)
                self.keep(force=False)

    def _sample(self, cell: Cell) -> None:
        samples.take_sample(
            self.pipeline,
            cell,
            self.prompts,
            session=self.number,
            order=sum(len(one.samples) for one in self.run.cells),
            at=time.perf_counter() - self._began,
            seed=self.request.seed + 1 + len(cell.samples),
        )
        fault = clock_fault(cell)
        if fault:
            raise BackendError(f"{cell.name}: {fault}; correct the backend's stopwatch()")
        taken, wanted = len(cell.samples), self.request.plan.samples
        if time.monotonic() - self._said > PACE:  # in a pipe each is a line
            of = f" of {wanted}" if taken <= wanted else ""
            self.say(f"{cell.name}: sample {taken}{of}{self._describe_left()}")
            self._said = time.monotonic()
        self.keep(force=False)

    # --- quality -------------------------------------------------------------------------------

    def _list_without_loss(self, temperature: float) -> list[Strategy]:
        """Return the relaxed strategies whose quality loss is missing, or lacks images or a package.

        The same strategy has one quality loss at every batch size.
        """
        found, images = dict[Strategy, None](), self.request.plan.quality_images
        for cell in self.cells:
            if images and cell.relaxed and cell.temperature == temperature:
                loss = self.run.quality_of(cell)
                if (
                    loss is None
                    or loss.images < images
                    or (isinstance(loss.distance, str) and is_there())
                ):
                    found[cell.strategy] = None
        return list(found)

    def _measure_loss(self, temperature: float) -> None:
        """Measure the quality loss of every relaxed strategy at one temperature; make the sheet."""
        run, relaxed = self.run, self._list_without_loss(temperature)
        if not relaxed:
            return
        images = self.request.plan.quality_images
        self.say(f"quality loss: {images} images per strategy{self._describe_left()}")
        study = QualityStudy(
            self.pipeline, self.prompts, images, self.request.seed, temperature, self.say
        )
        for strategy in [PLAIN, *relaxed]:
            key = strategy, temperature
            if strategy is not PLAIN:
                others = [q for q in run.quality if (q.strategy, q.temperature) != key]
                run.quality = [*others, study.measure(strategy)]
            if (strategy.name, temperature) not in {
                (one.strategy, one.temperature) for one in run.contact_sheet
            }:
                run.contact_sheet.append(study.strip(strategy))
            self.keep()


def identity(run: Run) -> dict[str, object]:
    """Return what a resumed run must share with its file, by the name a message gives it."""
    settings, where = run.settings, run.environment
    # A plan may grow: more samples of the same thing.
    found = settings.model_dump(mode="json", exclude={"plan", "prompts", "sampling"})
    found |= {f"sampling {k}": v for k, v in settings.sampling.model_dump(mode="json").items()}
    prompts = settings.prompts
    found["list of prompts"] = f"{prompts.count} of SHA-256 {prompts.sha256[:12]}"
    return found | {"device": where.device.name, "torch": where.torch, "commit": where.commit}


def now() -> str:
    """Return the time in UTC, as sessions have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
