"""Measures candidates in turns and keeps what was measured, so that an interrupted search goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure import store
from lantern_accel.measure.prompts import built_in_prompts
from lantern_accel.measure.record import Cell
from lantern_accel.measure.rounds import interleave
from lantern_accel.measure.samples import take_sample, warm_sample
from lantern_accel.records import Record
from lantern_accel.strategy.choices import Choice, Measured, choice_path, write_choice
from lantern_accel.strategy.values import Strategy

#: The candidate that all are compared with.
PLAIN = "vanilla"


class Evidence(Record):
    """What a search has measured so far; ``settings`` tell whether a file is of the same search."""

    kind: str
    schema_version: Literal[1] = 1
    settings: dict[str, Any]


EvidenceT = TypeVar("EvidenceT", bound=Evidence)


class Search(Generic[EvidenceT]):
    """The search for one key's choice: its candidates' cells, and everything measured so far.

    ``kind``: of the evidence, and ``settings`` what it depends on beside the key and the prompts. These
    default to the half of the built-in ones that nothing is reported on.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        key: dict[str, Any],
        kind: type[EvidenceT],
        settings: Mapping[str, Any],
        prompts: Sequence[Prompt] | None,
        say: Callable[[str], None],
    ) -> None:
        self.pipeline, self.key, self.say = pipeline, key, say
        self.prompts = list(built_in_prompts(pipeline, "tuning") if prompts is None else prompts)
        fresh = kind.model_validate({"settings": {"key": key, "prompts": self.prompts, **settings}})
        self.path: Path = choice_path(key).with_suffix(".partial")
        self.evidence = store.resume_own(self.path, fresh, lambda one: one.settings)
        self.keep = store.Keeper(self.path, self.evidence)
        if self.evidence != fresh:
            say("going on with what was measured before")

    def sample(self, cell: Cell) -> None:
        """Decode once more with a cell's strategy, and keep the figures."""
        take_sample(self.pipeline, cell, self.prompts, seed=1 + len(cell.samples))
        self.keep()

    def warm(self, cell: Cell) -> None:
        """Decode once with a cell's strategy, uncounted: capturing and compiling are over then."""
        warm_sample(self.pipeline, cell, self.prompts)

    def race(
        self, cells: Mapping[str, Cell], repeats: int, say: Callable[[int, int], None] | None = None
    ) -> None:
        """Decode with all candidates in turns, until each has ``repeats`` samples.

        ``say`` gets the samples that are taken and those that are wanted.
        """
        self.pipeline.kept_engines = max(self.pipeline.kept_engines, len(cells))
        entries = list(cells.values())
        for cell in (one for one in entries if len(one.samples) < repeats):
            self.warm(cell)
        for cell in interleave(
            entries, lambda c: len(c.samples), lambda c: len(c.samples) >= repeats
        ):
            self.sample(cell)
            if say is not None:
                say(sum(len(one.samples) for one in entries), repeats * len(entries))

    def finish(self) -> None:
        """Forget what was measured on the way: the choices are kept."""
        self.path.unlink(missing_ok=True)


def chosen(
    key: dict[str, Any],
    strategy: Strategy,
    winner: str,
    cells: Mapping[str, Cell],
    **evidence: Any,
) -> Choice:
    """Write and return the choice of a raced winner, with what was measured of all, plain first."""
    plain = cells[PLAIN].tokens_per_second
    choice = Choice(
        key=key,
        strategy=strategy,
        speedup=cells[winner].tokens_per_second / plain,
        source="tune",
        measured=[
            Measured(
                strategy=cell.strategy,
                tokens_per_step=max(1.0, cell.step_compression),
                tokens_per_second=cell.tokens_per_second,
                speedup=cell.tokens_per_second / plain,
            )
            for cell in cells.values()
        ],
        evidence=evidence,
    )
    write_choice(choice)
    return choice
