"""Counts of accepted drafts, recorded with one model and replayed with another: for speed at a size.

Random weights of a real size cost what trained ones do, but accept drafts as nothing does. So steps of
the large model run as they are, and then every image is moved on by what a step of that length brought
the recorded one, at the same place of the image. What such a race says is labelled as replayed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lantern_accel.errors import RequestError
from lantern_accel.strategy.length_policy import AcceptancePolicy
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import ChainTree, SelfDrafts, Strategy, Window

#: An image's steps in order: where each began, in tokens known, and what it brought.
Steps = list[tuple[int, int]]


def source_of(tree: Any) -> str:
    """Name where drafts come from; raises RequestError for a source that is not recorded."""
    if isinstance(tree, Window):
        return "window" if tree.fresh != "head" else "window by a draft head"
    if isinstance(tree, SelfDrafts):
        own = f", {tree.passes} passes of windows of {tree.window}" if tree.window else ""
        return f"copy in {tree.weights}, {tree.length} drafts{own}"
    kind = "the drafter's chains" if isinstance(tree, ChainTree) else f"drafts of kind {tree.kind}"
    raise RequestError(f"no counts of {kind} were recorded; race without them")


class Counts:
    """What steps of every source and length brought the images of a model's requests."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.steps: dict[tuple[str, int, int, int], list[Steps]] = {}

    def gain(
        self, source: str, length: int, request: tuple[int, int], image: int, share: float
    ) -> int:
        """Return what the recorded step brought that began at, or last before, a share of an image.

        ``request``: the prompt's number and the seed. Raises RequestError where nothing was recorded.
        """
        found = self.steps.get((source, length, *request))
        if found is None:
            raise RequestError(
                f"no steps of {length} tokens from a {source} were recorded for prompt {request[0]} and "
                f"seed {request[1]}; record them first"
            )
        steps = found[image]
        at = bisect_right([place for place, _ in steps], share * self.tokens) - 1
        return steps[max(at, 0)][1]


class Recorder:
    """Decodes every prompt with every seed and length of a source, when steps of it are asked for."""

    def __init__(
        self,
        pipeline: Any,
        prompts: Sequence[Any],
        batch: int,
        seeds: Sequence[int],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.pipeline, self.prompts, self.batch, self.seeds = pipeline, prompts, batch, seeds
        self.say = say
        self.counts = Counts(pipeline.model.manifest.target.num_tokens)
        self._done: set[tuple[str, int]] = set()

    def record(self, tree: Window | SelfDrafts) -> None:
        """Count what steps of a tree's lengths bring, once."""
        name = source_of(tree)
        lengths = [one.length for one in tree.draft_lengths if one.length > 1]
        lengths = [length for length in lengths if (name, length) not in self._done]
        if not lengths:
            return
        self._done.update((name, length) for length in lengths)
        strategy = Strategy(name="recorded", drafts=tree)
        for number in range(len(self.prompts)):
            for seed in self.seeds:
                for length in lengths:
                    self.counts.steps[name, length, number, seed] = self._steps(
                        strategy, number, seed, length
                    )
            self.say(f"recorded {name}: {number + 1} of {len(self.prompts)} prompts")
        self.pipeline.release_engines()

    def _steps(self, strategy: Strategy, number: int, seed: int, length: int) -> list[Steps]:
        sampling = self.pipeline.sampling()
        shape = self.pipeline.model.family.usual_shape(self.pipeline.model)
        engine = self.pipeline.engine(self.batch, strategy, sampling, shape).engine
        found: list[Steps] = [[] for _ in range(self.batch)]

        def step() -> None:
            before = engine.state.length.tolist()
            engine.step()
            after = engine.state.length.tolist()
            for image, (a, b) in enumerate(zip(before, after, strict=True)):
                if b > a:
                    found[image].append((a, b - a))

        given = [self.prompts[number]] * self.batch
        engine.chosen = AcceptancePolicy((DraftLength(length=length),))
        try:
            self.pipeline.decode_only(given, strategy, sampling, seed, step=step)
        finally:
            engine.chosen = None
        return found


class Replay:
    """Lets a pipeline's engines bring what was recorded; ``request`` is the prompt and seed under way.

    What a source brings is recorded when the first engine of it is made.
    """

    def __init__(self, pipeline: Any, recorder: Recorder) -> None:
        self.recorder, self.counts, self.request = recorder, recorder.counts, (0, 0)
        capture, wrapped = pipeline.engines._capture_all, list[Any]()

        def captured(engine: Any, steps: bool) -> None:
            if any(engine is one for one in wrapped):  # all is captured, and its steps are wrapped
                return
            capture(engine, steps)
            if steps and len(engine.lengths) > 1:
                self._wrap(engine)
                wrapped.append(engine)

        pipeline.engines._capture_all = captured
        # Counts that are replayed are no reason to choose anything later.
        auto = pipeline.measurements
        auto.keep = lambda choice: auto._known.__setitem__(repr(choice.key), choice)

    def _wrap(self, engine: Any) -> None:
        source = source_of(engine.strategy.drafts)
        self.recorder.record(engine.strategy.drafts)
        for name, step in list(engine.functions.items()):
            kind, _, rest = name.partition(" ")
            length = int(rest.split(" ")[0]) if kind == "step" else 0
            if length > 1:
                engine.functions[name] = self._moved(engine, step, source, length)

    def _moved(
        self, engine: Any, step: Callable[[], None], source: str, length: int
    ) -> Callable[[], None]:
        last = engine.geometry.tokens - 1

        def moved() -> None:
            before = engine.state.length.tolist()
            step()
            after = [
                min(
                    at
                    + self.counts.gain(
                        source, length, self.request, image, at / engine.geometry.tokens
                    ),
                    last,
                )
                for image, at in enumerate(before)
            ]
            engine.state.length.copy_(torch.tensor(after))
            engine.finite.report[0].copy_(engine.state.length)  # what the host reads

        return moved
