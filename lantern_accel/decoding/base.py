"""Runs requests on static buffers, whatever drafts: a request comes in, steps run, tokens go out.

``prefill -> [draft -> verify -> accept -> commit] -> tokens``. One engine serves one batch size, one
strategy and one set of sampling settings; calls with other prompts reuse all of its buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lantern_accel.decoding.buckets import Reach, Steps
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.invariant import Choices
from lantern_accel.decoding.length_policy import Block, FixedLength, LengthPolicy
from lantern_accel.decoding.logits import Filters
from lantern_accel.decoding.looks import FixedSchedule, Look, LookSchedule
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.sources.base import Drafts
from lantern_accel.decoding.sources.drafter import Drafting
from lantern_accel.decoding.state import FiniteGuard, RuntimeParams, State
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.capture import HostCopy, own_step
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.noise import draw_uniforms, image_keys
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DynamicTree, FusedStep, StaticTree, StepPlan
from lantern_accel.errors import BackendError, NotFiniteError, RequestError, StrategyError
from lantern_accel.strategy.values import Sampling, Strategy

#: What engines of several lengths have in common.
SHARED = (
    "sampling", "ops", "greedy", "runtime_params", "filters", "rule", "choices", "verifying",
    "drafter_cache", "state", "finite", "_progress",
)  # fmt: skip
#: Buffers of the state that a request fills and no step changes.
GIVEN = ("condition", "prefix_mask", "uniforms", "keys", "start")


@dataclass(frozen=True)
class Decoded:
    """What decoding gives, on the host: tokens int64 ``[B, N]`` and counters.

    ``steps [B]`` target forwards after prefill; ``histogram [B, D + 1]`` steps by accepted drafts;
    ``price [B]`` what relaxation cost, summed over tokens (:class:`~.accept.Accepted`).
    """

    tokens: Tensor
    steps: Tensor
    histogram: Tensor
    price: Tensor

    @property
    def step_compression(self) -> float:
        """Tokens known through steps over target forwards (prefill's first token not counted)."""
        steps = int(self.steps.sum())
        gained = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return gained / steps if steps else 1.0


def steps_by_accepted(parts: Iterable[Decoded]) -> list[int]:
    """Return how many steps accepted 0, 1, ... drafts; parts may have drafted to other depths."""
    rows = [part.histogram.sum(0) for part in parts]
    totals: list[int] = pad_sequence(rows, batch_first=True).sum(0).tolist()
    return totals


class FusedSteps:
    """What a device does of a plan at once: the whole step, or what follows a pass (:attr:`after`).

    A plan with a drafter is taken whole or not at all. A source of drafts may have none.
    """

    def __init__(self, ops: TensorOps, plan: StepPlan | None) -> None:
        self.whole: FusedStep | None = None
        self.after: FusedStep | None = None
        if plan is None:
            return
        trees = isinstance(plan.source, StaticTree | DynamicTree)
        complete = plan.target is not None and (plan.drafter is not None or not trees)
        self.whole = own_step(ops, plan) if complete else None
        if not trees:
            self.after = own_step(ops, replace(plan, target=None))

    def step(self) -> bool:
        """Do a step; return whether that was possible, else only caches may have changed."""
        return self.whole is not None and self.whole.run(None)

    def guess(self) -> bool:
        """Guess the drafts that no pass has seen; return whether that was possible."""
        return self.whole is not None and self.whole.guess is not None and self.whole.guess()

    def follow(self, logits: Tensor) -> bool:
        """Do what follows a pass with guided ``logits [B, T, V]``; return whether that was possible."""
        return self.after is not None and self.after.run(logits)


class EngineBase(ABC):
    """Loads a request into static buffers and steps until every image is complete.

    A device captures two functions of it, :meth:`prefill` and :meth:`step`.
    """

    strategy: Strategy
    sampling: Sampling
    greedy: bool
    """Fixed with the engine: a traced step that read ``sampling`` would be bound to its temperature."""
    ops: TensorOps
    geometry: Geometry
    runtime_params: RuntimeParams
    filters: Filters
    rule: Rule
    choices: Choices
    verifying: Verifying
    drafter_cache: KVCache | None
    sizes: tuple[int, ...]
    """Buckets of the target's cache, rising: how many slots a step may look at. The last is the whole."""
    source: Drafts[Any] | None = None
    """The drafts of a tree; None in an engine of windows."""
    drafting: Drafting | None = None
    """The same, where they are a drafter's."""
    state: State
    #: How a step prices relaxation: by a bound that every step can afford, or exactly, on the host, in
    #: steps that run operator by operator (:mod:`~.pricing`).
    accounting: Literal["bound", "exact"] = "bound"
    finite: FiniteGuard
    fused: FusedSteps
    """What the device does of a step at once."""
    now: int
    """The length of the next step: the most tokens that it brings an image."""
    counted: dict[int, list[int]]
    """Tokens gained and steps of the last request by length, summed over images that needed them all."""
    returns: bool = True
    """Whether drafts can be taken up again after plain steps."""
    settles: bool = False
    """Whether drafts outlive a step: after a move they take some steps to be as good as they get."""
    untimed: int = 1
    """Steps of a length before the one that is timed: they find other steps' data in the caches."""
    _progress: HostCopy

    def _step_on(self, longest: EngineBase) -> None:
        """Take the buffers and settings of an engine of more drafts, to step on them."""
        for name in SHARED:
            setattr(self, name, getattr(longest, name))

    def moves(self) -> dict[str, Callable[[], None]]:
        """Return what must run first: ``widen`` after shorter steps, ``gather`` after longer ones.

        A step that drafts anew, from where every step leaves the buffers, needs neither.
        """
        return {}

    @abstractmethod
    def prefill(self) -> None:
        """Run the prompt, draw the first token and get drafts ready. No value is read by the host."""

    @abstractmethod
    def step(self, slots: int | None = None) -> None:
        """Run one step. No value is read by the host.

        ``slots``: one of :attr:`sizes`, as many of the target's cache are looked at; None: all.
        """

    def divide(self, sizes: Sequence[int]) -> None:
        """Take other buckets below the whole, which is always one; every one holds some step.

        Raises :class:`StrategyError` for a bucket that holds no step, or more than the cache.
        """
        whole, least = (
            self.verifying.cache.layout.capacity,
            self.geometry.prefix + self.geometry.ahead,
        )
        for size in sizes:
            if not least <= size < whole:
                raise StrategyError(
                    f"a bucket of {size} slots serves no step: the first one needs {least}, and the "
                    f"cache has {whole}"
                )
        self.sizes = (*sorted(set(sizes)), whole)

    @property
    def steps(self) -> dict[int, Callable[[], None]]:
        """The steps that a device captures, by the slots that each looks at."""
        smaller = {slots: partial(self.step, slots) for slots in self.sizes[:-1]}
        return {**smaller, self.sizes[-1]: self.step}

    def configure(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take other values of the settings that are data (:class:`RuntimeParams`).

        Raises :class:`StrategyError` for settings of another bucket, which need an engine of their own.
        """
        if (strategy.bucket, sampling.bucket) != (self.strategy.bucket, self.sampling.bucket):
            raise StrategyError(
                f"an engine made for {self.strategy.name!r} cannot decode {strategy.name!r} with these "
                "settings: their shapes differ; make another engine"
            )
        self._apply(strategy, sampling)

    def _apply(self, strategy: Strategy, sampling: Sampling) -> None:
        """Take the values of settings whose bucket is this engine's."""
        self.strategy, self.sampling = strategy, sampling
        self.runtime_params.set(strategy, sampling)

    @property
    def caches(self) -> list[KVCache]:
        """The target's cache and, where there is a drafter, the drafter's."""
        return [self.verifying.cache, *(() if self.source is None else self.source.caches)]

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name: state, soundness and caches.

        They read further ones, such as weights and the request's conditions, and change none of those.
        """
        found = {
            f"state.{name}": value
            for name, value in self.state.buffers.items()
            if name not in GIVEN and value.numel()
        }
        own = {} if self.source is None else self.source.buffers
        found |= {f"finite.{name}": value for name, value in self.finite.buffers.items()}
        found |= {f"source.{name}": value for name, value in own.items()}
        owners = ("target", "drafter")
        for owner, cache in zip(owners, self.caches, strict=False):
            for side in ("keys", "values"):
                for layer, buffer in enumerate(getattr(cache, side)):
                    found[f"{owner}.{side}.{layer}"] = buffer
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers: caches, state and settings."""
        own = () if self.source is None else self.source.buffers.values()
        held = (self.state, self.runtime_params, self.finite, *own)
        return sum(one.nbytes for one in (*(cache.layout for cache in self.caches), *held))

    def start(
        self,
        condition: Tensor,
        prefix_mask: Tensor,
        randomness: Tensor,
        prefill: Callable[[], None] | None = None,
    ) -> None:
        """Load a request and prefill; ``prefill`` replays a captured :meth:`prefill`."""
        self.load(condition, prefix_mask, randomness)
        (prefill or self.prefill)()

    def load(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Clear the buffers and copy a request into them.

        ``condition``: rows ``[cond; uncond]`` with guidance, else ``[cond]``, each caption features
        ``[prefix, caption_dim]`` or a class id; ``prefix_mask`` bool ``[B, prefix]``; ``randomness``
        as :meth:`randomness` gives it. Raises :class:`RequestError` for another shape.
        """
        state = self.state
        drawn = "keys" if self.geometry.keyed else "uniforms"
        given = {"condition": condition, "prefix_mask": prefix_mask, drawn: randomness}
        for name, value in given.items():
            if value.shape != getattr(state, name).shape:
                raise RequestError(
                    f"{name} has shape {list(value.shape)}, this engine takes "
                    f"{list(getattr(state, name).shape)}"
                )
        self._progress.clear()
        state.reset()
        for name, value in given.items():
            getattr(state, name).copy_(value)
        if self.geometry.own_prompts:
            state.start.copy_(prefix_mask.sum(dim=1))

    def randomness(self, seed: int | Sequence[int], images: list[int]) -> Tensor:
        """Return what decides a request's images, on the engine's device.

        Keys of their noise, int32 ``[B, 3]``, where the seed decides every token; with the coupling
        ``maximal`` uniforms float32 ``[B, N, columns]``. ``seed``: of all, or of each; ``images``: their
        numbers in the request. Image i gets the same alone and in a batch.
        """
        g, device = self.geometry, self.state.length.device
        if g.keyed:
            return image_keys(seed, images).to(device)
        return draw_uniforms(seed, images, g.tokens, g.columns).to(device)

    def run(
        self,
        step: Steps | None = None,
        on_progress: Callable[[int], None] | None = None,
        check_every: int = 1,
    ) -> Decoded:
        """Step until every image is complete; call :meth:`start` first.

        ``step`` replays a captured :meth:`step`, or all of :attr:`steps`. ``on_progress`` gets the tokens
        known by the slowest image. The host looks at the lengths where :meth:`schedule` says, in a fixed
        engine ``check_every`` steps apart, and lets :meth:`length_policy` choose the length of the steps
        after that. A device that lets its copies lag runs some steps more (no-ops on complete images).
        Raises :class:`NotFiniteError` where logits were infinite or no numbers.
        """
        tokens, policy = self.geometry.tokens, self.length_policy()
        schedule = self.schedule(on_progress is not None, check_every)
        # One that came alone looks at the whole cache.
        steps = {self.sizes[-1]: step} if callable(step) else step or self.steps
        reach = Reach([*steps], self.geometry)
        self.now, self.counted = self.longest_length, {}  # what prefill has prepared
        self.move(policy.begin())
        schedule.begin(self.now)
        known = [1] * self.geometry.batch
        posted: list[Look] = []
        index = last = 0

        def read_block() -> Block:
            """Read the oldest posted lengths, and return what its steps have brought."""
            nonlocal known
            look = posted.pop(0)
            lengths, finite = self._progress.read().tolist()
            self._require(finite, 1 + look.index, index)
            reach.record_lengths(lengths, look.index)
            lengths = [one + 1 for one in lengths]
            gained = tuple(after - before for after, before in zip(lengths, known, strict=True))
            known = lengths
            if on_progress is not None:
                on_progress(min(known))
            return Block(look.length, look.steps, gained, tuple(tokens - one for one in known))

        for index in range(1, tokens):
            steps[reach.size()]()
            reach.record_step(self.now)
            if schedule.due(index, reach):
                self._progress.post()
                posted.append(Look(self.now, index, index - last))
                last = index
            if not schedule.readable(index, posted):
                continue
            block = read_block()
            self._count(block)
            if not any(block.left):
                break
            if self.now > 1 or self.returns:
                self.move(policy.observe(block))
            schedule.record(block, self.now, posted)
        while posted:  # so that the next request does not read this one's
            read_block()
        self._check_replayed(index)
        self._require(self.finite.count.tolist(), 1 + index, index)
        return self.decoded()

    def length_policy(self) -> LengthPolicy:
        """Return what chooses the lengths of a request's steps."""
        return FixedLength(self.longest_length)

    def schedule(self, watched: bool, check_every: int) -> LookSchedule:
        """Return when the host looks at the lengths; ``watched``: somebody waits for progress."""
        return FixedSchedule(self.geometry, self._progress.lag, check_every, watched)

    def move(self, length: int) -> None:
        """Go on with steps of another length."""
        self.now = length

    @property
    def longest_length(self) -> int:
        """The most tokens that a step can bring an image, and the length that prefill prepares."""
        return self.geometry.depth + 1

    def _count(self, block: Block) -> None:
        """Add what a block's steps have brought to what is counted, of images that lack tokens still."""
        open_ = [gained for gained, left in zip(block.gained, block.left, strict=True) if left]
        counts = self.counted.setdefault(block.length, [0, 0])
        counts[0] += sum(open_)
        counts[1] += len(open_) * block.steps

    def leave_out(self, first: int) -> None:
        """Finish the images from ``first`` on, which only fill a batch; call after :meth:`start`.

        One copy of one shape, so that no number of images is a shape of its own.
        """
        length = self.state.length
        done = torch.zeros(length.shape, dtype=length.dtype)
        done[first:] = self.geometry.tokens - 1
        length.copy_(done)

    def rehearse(
        self,
        condition: Tensor,
        prefix_mask: Tensor,
        randomness: Tensor,
        prefill: Callable[[], None],
        step: Callable[[], None],
    ) -> Decoded:
        """Do once what a request does besides its steps, so that a device has compiled that too.

        Loading, one step, the host's look at the lengths, and reading what was decoded. Arguments as
        :meth:`start` takes them.
        """
        self.start(condition, prefix_mask, randomness, prefill)
        self.leave_out(0)
        step()
        self._progress.post()
        self._progress.read()
        self._check_replayed(1)
        self.finite.count.cpu()
        return self.decoded()

    def decoded(self) -> Decoded:
        """Return the tokens and counters of the request, on the host."""
        g, state = self.geometry, self.state
        return Decoded(
            state.tokens[:, : g.tokens].to("cpu", torch.int64, copy=True),
            state.steps.to("cpu", torch.int64, copy=True),
            state.histogram.to("cpu", torch.int64, copy=True),
            state.price.to("cpu", copy=True),
        )

    def _require(self, finite: Sequence[int], passes: int, calls: int) -> None:
        """Raise where numbers are not finite: NotFiniteError, or what is wrong with the replays."""
        least = min(finite)
        if least >= passes:
            return
        self._check_replayed(calls, complete=False)  # numbers of steps that were not run
        dtype = str(self.verifying.target.weight.dtype).removeprefix("torch.")
        raise NotFiniteError(finite.index(least), least, dtype)

    def _check_replayed(self, calls: int, complete: bool = True) -> None:
        """Raise BackendError where so many replays left steps undone; what they drew is no image."""
        done, known = int(self.state.step), int(self.state.length.min()) + 1
        if done <= calls or (complete and known < self.geometry.tokens):
            raise BackendError(
                f"after the prefill and {calls} steps the device shows {done} of these {1 + calls} as "
                f"done and {known} of {self.geometry.tokens} tokens, so what it replays is not the step; "
                "decode without captured steps if the backend has an option for it, and run "
                "`lantern-accel conform` with --only replay"
            )
