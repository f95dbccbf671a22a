"""Measures candidates in turns and keeps what was measured, so that an interrupted search goes on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from lantern_accel.device.context import inference
from lantern_accel.errors import RequestError
from lantern_accel.generation.built_in_prompts import built_in_prompts
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.records import Record
from lantern_accel.strategy.choices import Choice, MeasuredStrategy, choice_path
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles import store
from lantern_accel_profiles.measure.environment import check_clock
from lantern_accel_profiles.measure.record import Cell
from lantern_accel_profiles.measure.samples import about, interleave, request, take_sample

#: The candidate that all are compared with.
PLAIN = "vanilla"


class Evidence(Record):
    """What a search has measured so far; ``settings`` tell whether a file is of the same search."""

    kind: str
    schema_version: Literal[1] = 1
    settings: dict[str, object]


EvidenceT = TypeVar("EvidenceT", bound=Evidence)


class Search(ABC, Generic[EvidenceT]):
    """Finds what one strategy decodes with here, and keeps it in the cache; an interrupted one goes on.

    ``prompts`` default to the half of the built-in ones that nothing is reported on; ``budget``: seconds
    at most, for those searches that ask.
    """

    #: What it measures is kept as.
    kind: type[EvidenceT]

    def __init__(
        self,
        pipeline: Pipeline,
        strategy: Strategy,
        *,
        temperature: float | None = None,
        prompts: Sequence[Prompt] | None = None,
        budget: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.pipeline, self.strategy, self.say = pipeline, strategy, say
        self.check()
        self.budget, self.began = budget, time.perf_counter()
        self.sampling = pipeline.sampling(temperature=temperature)
        self.temperature = self.sampling.temperature
        self.prompts = list(built_in_prompts(pipeline, "tuning") if prompts is None else prompts)
        key = self.key(0)
        settings = {"key": key, "prompts": self.prompts, **self.settings()}
        fresh = self.kind.model_validate({"settings": settings})
        self.path: Path = choice_path(key).with_suffix(".partial")
        self.evidence = store.resume_own(self.path, fresh, lambda one: one.settings)
        self.keep = store.Keeper(self.path, self.evidence)
        if self.evidence != fresh:
            say("going on with what was measured before")

    def key(self, batch: int) -> dict[str, object]:
        """Return what the choice for a batch depends on; 0: what was measured for all of them."""
        return self.pipeline.measurements.key(self.strategy, batch, self.sampling)

    def check(self) -> None:
        """Raise StrategyError where the strategy has nothing to tune."""

    def settings(self) -> dict[str, object]:
        """Return what the evidence depends on besides the key and the prompts."""
        return {}

    def prepare(self) -> None:
        """Measure what holds for all batches."""

    @abstractmethod
    def choose(self, batch: int, repeats: int) -> Choice:
        """Measure one batch, keep its choice and return it."""

    def run(self, batches: Sequence[int] = (1,), repeats: int = 3) -> list[Choice]:
        """Choose for each batch; finalists are decoded with ``repeats`` times.

        Raises BackendError on a simulated device, whose times say nothing.
        """
        check_clock(self.pipeline.backend)
        choices: list[Choice] = []
        with inference(self.pipeline.backend):
            self.prepare()
            for number, batch in enumerate(batches, 1):
                began = time.perf_counter()
                choices.append(self.choose(batch, repeats))
                spent = time.perf_counter() - began
                if number < len(batches):  # a batch takes about as long as its images do
                    ahead = min(sum(batches[number:]) / batch, 8 * (len(batches) - number))
                    self.say(f"{about(spent * ahead)} left at most")
        self.path.unlink(missing_ok=True)  # the choices are kept
        return choices

    def dump(self, choices: Sequence[Choice]) -> dict[str, object]:
        """Return choices, and what more is known of them, as ``tune -o`` writes it."""
        return {"choices": [one.model_dump(mode="json") for one in choices]}

    def sample(self, cell: Cell) -> None:
        """Decode once more with a cell's strategy, and keep the figures."""
        take_sample(self.pipeline, cell, self.prompts, seed=1 + len(cell.samples))
        self.keep()

    def warm(self, cell: Cell) -> None:
        """Decode once with a cell's strategy, uncounted: capturing and compiling are over then."""
        request(self.pipeline, cell, self.prompts, 0)

    def check_left(self, need: float, what: str) -> None:
        """Raise RequestError where ``what``, which takes ``need`` seconds, is more than is left."""
        spent = time.perf_counter() - self.began
        if self.budget is not None and spent + need > self.budget:
            raise RequestError(
                f"a limit of {self.budget:.0f} s is too short: {spent:.0f} s are used, and {what} takes "
                f"{need:.0f} s; give a larger --max-seconds (what was measured is kept) or fewer batches"
            )

    def race(self, cells: Mapping[str, Cell], repeats: int) -> None:
        """Decode with all candidates in turns, until each has ``repeats`` samples."""
        self.pipeline.engines.keep(len(cells))
        entries = list(cells.values())
        longest = 0.0

        def time_cell(measure: Callable[[Cell], None], cell: Cell) -> None:
            nonlocal longest
            self.check_left(longest, "the next decoding")
            began = time.perf_counter()
            measure(cell)
            longest = max(longest, time.perf_counter() - began)

        for cell in (one for one in entries if len(one.samples) < repeats):
            time_cell(self.warm, cell)
        for cell in interleave(
            entries, lambda c: len(c.samples), lambda c: len(c.samples) >= repeats
        ):
            time_cell(self.sample, cell)
            taken = sum(len(one.samples) for one in entries)
            self.say(f"finalists: {taken} of {repeats * len(entries)}")

    def make_choice(
        self,
        batch: int,
        strategy: Strategy,
        winner: str,
        cells: Mapping[str, Cell],
        **evidence: object,
    ) -> Choice:
        """Write and return the choice of a raced winner, with what was measured of all, plain first."""
        plain = cells[PLAIN].tokens_per_second
        choice = Choice(
            key=self.key(batch),
            strategy=strategy,
            speedup=cells[winner].tokens_per_second / plain,
            source="tune",
            measured=[
                MeasuredStrategy(
                    strategy=cell.strategy,
                    tokens_per_step=max(1.0, cell.step_compression),
                    tokens_per_second=cell.tokens_per_second,
                    speedup=cell.tokens_per_second / plain,
                )
                for cell in cells.values()
            ],
            evidence=evidence,
        )
        self.pipeline.measurements.keep(choice)
        return choice
