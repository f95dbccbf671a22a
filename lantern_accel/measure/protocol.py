"""The protocol of a profiling run, and the run that survives whatever ends it.

For each batch size and temperature: every strategy once cold and alone; warm-up rounds until no
strategy gets faster and no counter moves; then timed rounds, each strategy once a round in an order
that changes, until each has its samples and its seconds. Then the price of every relaxed strategy. The
file is written as the run goes on; what it holds is never measured again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lantern_accel.device.backend import check_clock
from lantern_accel.errors import BackendError, LanternError, RequestError
from lantern_accel.files import write_json
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure import environment, samples
from lantern_accel.measure.ceilings import measure_ceilings
from lantern_accel.measure.clock import check_stopwatch
from lantern_accel.measure.price import QualityStudy
from lantern_accel.measure.record import (
    WARMUPS,
    Cell,
    PromptSet,
    Run,
    Session,
    Settings,
    is_measured,
    not_measured,
)
from lantern_accel.measure.record import Plan as RunPlan
from lantern_accel.quality.features import is_there
from lantern_accel.report.reading import clock_fault, read_run
from lantern_accel.strategy.values import Strategy
from lantern_accel.testing.kit import run_checks

#: Seconds between two writes of the file while samples are taken.
WRITE_EVERY = 1.0
#: Timed samples a cell at most, however fast the device is.
MOST_SAMPLES = 300
Say = Callable[[str], None]


@dataclass
class Request:
    """What a profiling run is asked to measure."""

    strategies: Sequence[Strategy]
    prompts: PromptSet
    plan: RunPlan
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (1.0,)
    seed: int = 0
    name: str = "run"
    command: str = "lantern-accel profile"
    options: dict[str, Any] = field(default_factory=dict)
    load_seconds: float = 0.0
    trace: Path | None = None


class Profiler:
    """Carries a run from wherever its file is to its end."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: Request,
        out: Path,
        *,
        resume: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.pipeline, self.request, self.out, self.say = pipeline, request, out, say
        self.prompts = request.prompts.used
        self._written = 0.0
        self._began = time.perf_counter()
        fresh = self._fresh()
        self.run = self._resumed(fresh) if resume and out.is_file() else fresh
        self.session = len(self.run.sessions)
        self.cells = self._cells()

    # --- beginning -----------------------------------------------------------------------------

    def _fresh(self) -> Run:
        pipeline, request = self.pipeline, self.request
        manifest = pipeline.model.manifest
        return Run(
            name=request.name,
            state="running",
            command=request.command,
            settings=Settings(
                model=manifest.name,
                weights_hash=pipeline.model.weights_hash,
                tokens=manifest.target.num_tokens,
                sampling=pipeline.sampling(),
                prompts=request.prompts,
                seed=request.seed,
                dtype=str(pipeline.dtype).removeprefix("torch."),
                options=request.options,
                plan=request.plan,
            ),
            environment=environment.describe(pipeline),
            clock=not_measured("the run has just begun"),
            ceilings=not_measured("the run has just begun"),
            sessions=[],
            conformance=not_measured(
                "--quick leaves it out; "
                f"`lantern-accel conform {pipeline.backend.name} --json checks.json` checks it, and "
                "`lantern-accel compare` takes that file too"
            ),
        )

    def _resumed(self, fresh: Run) -> Run:
        """Return the stored run; raises RequestError where it is a run of something else."""
        stored = read_run(self.out)
        theirs = _identity(stored)
        for key, value in _identity(fresh).items():
            if theirs[key] != value:
                raise RequestError(
                    f"{self.out} cannot be resumed: its {key} is {theirs[key]!r}, not {value!r}; "
                    "name another file with -o"
                )
        stored.settings.plan = fresh.settings.plan
        return stored

    def _strategies(self, temperature: float) -> list[Strategy]:
        """Return the wanted strategies over the trees that were tuned here for this temperature."""
        return [self.pipeline.tuned(one, temperature) for one in self.request.strategies]

    def _cells(self) -> list[Cell]:
        """Return the wanted cells, those of the file where it has them."""
        known = {cell.key: cell for cell in self.run.cells}
        wanted = []
        for temperature in self.request.temperatures:
            for batch in self.request.batches:
                for strategy in self._strategies(temperature):
                    gap = not_measured("the run ended before")
                    cell = Cell(
                        strategy=strategy,
                        batch=batch,
                        temperature=temperature,
                        cold_seconds=gap,
                        warmup=[],
                        settled=False,
                        memory=gap,
                        step_ms=gap,
                        work=gap,
                    )
                    wanted.append(known.setdefault(cell.key, cell))
        self.run.cells = list(known.values())
        return wanted

    # --- the whole -----------------------------------------------------------------------------

    def measure(self) -> Run:
        """Measure what the file does not hold yet; raises BackendError where the device fails.

        Raises RequestError on a device in software, whose times say nothing of the device's.

        Whatever ends the run early, the file keeps what was finished and says why it ended.
        """
        run = self.run
        check_clock(self.pipeline.backend)
        open_ = [cell for cell in self.cells if not self._done(cell)]
        if not open_ and not self._unpriced() and run.state == "complete":
            self.say("the run is complete already")
            return run
        run.state = "running"
        session = Session(started=_now(), load_seconds=self.request.load_seconds)
        run.sessions.append(session)
        try:
            self._measure()
        except KeyboardInterrupt:
            self._end(session, "interrupted", "interrupted from the keyboard")
            self.say(f"interrupted; {self._kept()}")
            raise
        except BackendError as error:
            self._end(session, "interrupted", str(error))
            raise BackendError(f"{error}; {self._kept()}") from error
        except LanternError as error:
            self._end(session, "interrupted", str(error))
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._end(session, "interrupted", reason)
            device = self.pipeline.backend.device
            raise BackendError(
                f"the device {device} failed while profiling ({reason}); {self._kept()}"
            ) from error
        run.environment.conditions_after = environment.conditions(self.pipeline.backend)
        self._end(session, "complete", "")
        return run

    def _kept(self) -> str:
        done = sum(self._done(cell) for cell in self.cells)
        return (
            f"{done} of {len(self.cells)} cells are finished and kept in {self.out}; go on with the "
            "same command and --resume"
        )

    def _end(self, session: Session, state: str, reason: str) -> None:
        session.ended, session.reason = _now(), reason
        self.run.state = "complete" if state == "complete" else "interrupted"
        self._write(force=True)

    def _write(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._written >= WRITE_EVERY:
            try:
                write_json(self.out, self.run.model_dump(mode="json"))
            except OSError as error:
                raise RequestError(
                    f"{self.out} cannot be written ({error.strerror}); what was written before is "
                    "whole: make room and go on with the same command and --resume"
                ) from None
            self._written = time.monotonic()

    def _measure(self) -> None:
        run, backend = self.run, self.pipeline.backend
        self._write(force=True)
        self.say("checking the stopwatch")
        run.clock = check_stopwatch(backend)
        if isinstance(run.ceilings, str):
            run.ceilings = measure_ceilings(backend, self.pipeline.dtype, self.say)
            self._write(force=True)
        if isinstance(run.conformance, str) and not self.request.plan.quick:
            self.say("checking the backend")
            run.conformance = run_checks(backend)
            self._write(force=True)
        for temperature in self.request.temperatures:
            for batch in self.request.batches:
                here = [c for c in self.cells if (c.batch, c.temperature) == (batch, temperature)]
                self._group([cell for cell in here if not self._done(cell)])
            self._price(temperature)
        if self.request.trace is not None:
            from lantern_accel.measure.profiler import write_trace

            self.say(f"tracing a few steps into {self.request.trace}")
            write_trace(self.pipeline, self.cells[-1], self.prompts, self.request.trace)

    # --- speed ---------------------------------------------------------------------------------

    def _done(self, cell: Cell) -> bool:
        plan, n = self.request.plan, len(cell.samples)
        seconds = sum(s.wall for s in cell.samples if is_measured(s.wall))
        return n >= plan.samples and (seconds >= plan.seconds or n >= MOST_SAMPLES)

    def _group(self, cells: list[Cell]) -> None:
        """Measure cells of one batch size and temperature, interleaved."""
        if not cells:
            return
        for cell in cells:
            if isinstance(cell.work, str) and not cell.samples:
                self.say(f"{cell.name}: cold")
                cell.warmup = []
                samples.cold(self.pipeline, cell, self.prompts, self.session)
                self._write(force=True)
        self.pipeline.kept_engines = max(self.pipeline.kept_engines, len(cells))
        self._warm(cells)
        number = 0
        while open_ := [cell for cell in cells if not self._done(cell)]:
            for cell in self._shuffled(open_, number):
                self._sample(cell)
            number += 1

    def _shuffled(self, cells: list[Cell], number: int) -> list[Cell]:
        order = list(cells)
        random.Random(f"{self.request.seed}/{number}").shuffle(order)
        return order

    def _warm(self, cells: list[Cell]) -> None:
        """Decode in rounds until every cell has settled, or had its share."""
        for cell in cells:
            cell.settled = False
        most = samples.QUICK_WARMUPS if self.request.plan.quick else samples.MOST_WARMUPS
        for number in range(most):
            open_ = [cell for cell in cells if not cell.settled]
            if not open_:
                return
            for cell in open_:
                self.say(f"{cell.name}: warm-up")
                one = samples.warm_up(self.pipeline, cell, self.prompts, 2 + number, self.session)
                cell.warmup.append(one)
                here = [w for w in cell.warmup if w.session == self.session]
                cell.settled = len(here) >= WARMUPS and samples.has_settled(here)
                self._write()

    def _sample(self, cell: Cell) -> None:
        taken = samples.take_sample(
            self.pipeline,
            cell,
            self.prompts,
            number=len(cell.samples),
            session=self.session,
            order=sum(len(one.samples) for one in self.run.cells),
            at=time.perf_counter() - self._began,
            seed=self.request.seed + 1 + len(cell.samples),
        )
        cell.samples.append(taken)
        fault = clock_fault(cell)
        if fault:
            raise BackendError(f"{cell.name}: {fault}; correct the backend's stopwatch()")
        self.say(f"{cell.name}: {len(cell.samples)} samples")
        self._write()

    # --- quality -------------------------------------------------------------------------------

    def _unpriced(self) -> list[Cell]:
        """Return relaxed cells without a price, or with one that more images or a package complete."""

        def open_(cell: Cell) -> bool:
            price = self.run.quality_of(cell)
            if price is None or price.images < self.request.plan.quality_images:
                return True
            return isinstance(price.distance, str) and is_there()

        return [cell for cell in self.cells if cell.relaxed and open_(cell)]

    def _price(self, temperature: float) -> None:
        """Measure the price of every relaxed strategy at one temperature, and draw the sheet."""
        unpriced = [c for c in self._unpriced() if c.temperature == temperature]
        if not unpriced:
            return
        study = QualityStudy(
            self.pipeline,
            self.prompts,
            self.request.plan.quality_images,
            self.request.seed,
            temperature,
            self.say,
        )
        for strategy in self._strategies(temperature):
            # The same strategy has one price at every batch size.
            relaxed = any(cell.strategy == strategy for cell in unpriced)
            if relaxed:
                key = strategy, temperature
                others = [q for q in self.run.quality if (q.strategy, q.temperature) != key]
                self.run.quality = [*others, study.measure(strategy)]
            drawn = {(s.strategy, s.temperature) for s in self.run.contact_sheet}
            wanted = relaxed or strategy.name == "vanilla"
            if wanted and (strategy.name, temperature) not in drawn:
                self.run.contact_sheet.append(study.strip(strategy))
            self._write(force=True)


def _identity(run: Run) -> dict[str, Any]:
    """Return what a resumed run must share with its file, by the name a message gives it."""
    settings, environment = run.settings, run.environment
    # A plan may grow: more samples of the same thing.
    found = settings.model_dump(mode="json", exclude={"plan", "prompts", "sampling"})
    found |= {f"sampling {k}": v for k, v in settings.sampling.model_dump(mode="json").items()}
    given = settings.prompts
    found["prompts"] = f"{given.count} of SHA-256 {given.sha256[:12]}"
    return found | {
        "device": environment.device.name,
        "torch": environment.torch,
        "commit": environment.commit,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
