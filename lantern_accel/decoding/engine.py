"""Runs requests on static buffers, whatever drafts: a request comes in, steps run, tokens go out.

``prefill -> [draft -> verify -> judge -> commit] -> tokens``. A step has one of a few fixed lengths,
the most tokens that it adds to an image, each captured by the device; the host chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.drafts import Sizing, Source
from lantern_accel.decoding.geometry import Geometry, geometry_of
from lantern_accel.decoding.host_loop import DRAFTING_BLOCK, PLAIN_BLOCK, HostLoop, SyncSchedule
from lantern_accel.decoding.session import GIVEN, Session
from lantern_accel.decoding.sources import serving
from lantern_accel.decoding.step import Step
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import BackendError, NotFiniteError, StrategyError
from lantern_accel.strategy.length_policy import CHAIN_GAIN, GAIN, AcceptancePolicy
from lantern_accel.strategy.lengths import usual_tokens_per_step
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.sources import DraftConfig, DraftLength, with_tokens_per_step
from lantern_accel.strategy.strategy import Strategy


class Engine:
    """Loads requests into a session's buffers and steps until every image is complete.

    A device captures :attr:`functions`. Lengths move by :attr:`chosen`; None: by acceptance, among the
    lengths whose costs are known, or all of them where none is.
    """

    chosen: AcceptancePolicy | None = None
    functions: dict[str, Callable[[], None]]
    """What a request runs, by name; captured functions take their places (:meth:`host_functions`)."""
    sizes: tuple[int, ...]
    """Buckets of the target's cache, rising: how many slots a step may look at. The last is the whole."""
    now: int
    """The length of the next step: the most tokens that it adds to an image."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        copy: Target | None = None,
    ) -> None:
        """Make the buffers; ``batch`` images are decoded together.

        ``drafter``, ``neighbours`` and ``copy``, the target with quantized weights, are left alone by
        strategies that need none.

        Raises :class:`StrategyError` where the strategy needs a drafter, a neighbour table or a copy that
        is not there, and for more drafts in a row than the image has tokens.
        """
        lengths, source = [0], strategy.drafts
        if strategy.lengths:
            every = [one.length for one in strategy.lengths]
            lengths = [length for length in every if length <= target.config.num_tokens] or every
            source = source.of_length(lengths[-1])
        self.ops, self.greedy = ops, sampling.greedy

        def choose_source(
            source: DraftConfig, longest: Geometry | None
        ) -> tuple[type[Source], Geometry]:
            part = strategy.with_drafts(source)
            made_by = serving(part, sampling.greedy)
            g = geometry_of(target, drafter, part, sampling, batch)
            given = Sizing(target, sampling.greedy, longest)
            return made_by, made_by.add_sizes(g, source, given)

        kind, g = choose_source(source, None)
        self.session = session = Session(
            target, drafter if g.drafted else None, ops, strategy, sampling, g, kind.state_type,
            neighbours=neighbours, rewritten=kind.rewrites,
        )  # fmt: skip
        self.state, self.finite, self.geometry = session.state, session.finite, session.geometry
        #: See :meth:`.Session.configure` and :meth:`.Session.randomness`.
        self.configure, self.randomness = session.configure, session.randomness
        self.longest = Step(session, source, kind, session.geometry, copy)
        #: The target and the drafts of the longest step.
        self.verifying, self.source = self.longest.verifying, self.longest.source
        self.by_length = {}
        for length in lengths[:-1]:
            part = kind.shorter(source, length)
            self.by_length[length] = Step(
                session, part, *choose_source(part, session.geometry), longest=self.source
            )
        self.now = lengths[-1] or self.geometry.depth + 1
        self.by_length[self.now] = self.longest
        self.divide(usual(self.geometry, self.verifying.cache.layout, ops, target))

    @property
    def strategy(self) -> Strategy:
        return self.session.strategy

    @property
    def sampling(self) -> Sampling:
        return self.session.sampling

    @property
    def lengths(self) -> list[int]:
        """The lengths that a step may have, rising; 1 is plain decoding."""
        return sorted(self.by_length)

    @property
    def draft_lengths(self) -> tuple[DraftLength, ...]:
        """What is known of those lengths that steps may have, and what is usual."""
        every = tuple(one for one in self.strategy.lengths if one.length in self.by_length)
        settles = self.source.settles
        usual = {n: usual_tokens_per_step(n) if settles else float(n) for n in self.by_length}
        return with_tokens_per_step(every, usual)

    @property
    def caches(self) -> list[KVCache]:
        """The target's cache and, where there is a drafter, the drafter's."""
        return [*self.session.caches.values()]

    @property
    def changes(self) -> dict[str, Tensor]:
        """Every tensor that prefill and steps change in place, by name: state, soundness and caches."""
        found = {
            f"state.{name}": value
            for name, value in self.state.buffers.items()
            if name not in GIVEN and value.numel()
        }
        found |= {f"finite.{name}": value for name, value in self.finite.buffers.items()}
        found |= {f"source.{name}": t for name, t in self.source.buffers.items() if t.numel()}
        for owner, cache in self.session.caches.items():
            for side, buffers in (("keys", cache.keys), ("values", cache.values)):
                for layer, buffer in enumerate(buffers):
                    found[f"{owner}.{side}.{layer}"] = buffer
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers, which all lengths share: caches, state and settings."""
        held = sum(one.nbytes for one in (self.state, self.session.runtime_params, self.finite))
        own = sum(int(one.nbytes) for one in self.source.buffers.values())
        return held + own + sum(cache.layout.nbytes for cache in self.caches)

    # --- what a device captures ----------------------------------------------------------------

    def divide(self, sizes: Sequence[int]) -> None:
        """Take other buckets below the whole, which is always one; every one holds some step.

        An engine of several lengths takes the one that spares an image most, since each is a function
        for every length. Raises :class:`StrategyError` for a bucket that holds no step, or more than the
        cache.
        """
        whole = self.verifying.cache.layout.capacity
        least = self.geometry.prefix + self.geometry.ahead
        for size in sizes:
            if not least <= size < whole:
                raise StrategyError(
                    f"a bucket of {size} slots serves no step: the first one needs {least}, and the "
                    f"cache has {whole}"
                )
        if len(self.by_length) > 1:
            # Slots that are not looked at, for as long as the bucket serves.
            sizes = sorted(sizes, key=lambda size: (size - least) * (size - whole))[:1]
        self.sizes = (*sorted(set(sizes)), whole)
        self.functions = self.host_functions()

    def step_name(self, length: int, slots: int | None) -> str:
        """Return the name of a step among :attr:`functions`; ``slots`` None: of the whole cache."""
        step = "step" if len(self.by_length) == 1 else f"step {length}"
        return step if slots is None else f"{step} within {slots}"

    def host_functions(self) -> dict[str, Callable[[], None]]:
        """Return what a device captures: prefill, a step of each length and bucket, and moving to it."""
        found: dict[str, Callable[[], None]] = {"prefill": self.prefill}
        for one, step in self.by_length.items():
            widen = step.source.widening(self.state)
            for slots in (*self.sizes[:-1], None):
                found[self.step_name(one, slots)] = partial(self._do, step.run, slots)
            if widen is not None and one > min(self.by_length):
                found[f"widen {one}"] = partial(self._do, widen)
        return found

    def _do(self, one: Callable[..., None], *given: int | None) -> None:
        """Call a function; as a method it names what it may change (:attr:`changes`)."""
        one(*given)

    def prefill(self) -> None:
        """Run the prompt, draw the first token and get drafts ready. No value is read by the host."""
        session, step = self.session, self.longest
        session.choices.prepare()
        features, logits = step.verifying.prefill(session.state)
        weights = session.first_token(logits)
        step.source.begin(session.state, features, weights)

    def step(self, slots: int | None = None) -> None:
        """Run one step of the present length. No value is read by the host, but by an observer.

        ``slots``: one of :attr:`sizes`, as many of the target's cache are looked at; None: all.
        """
        slots = None if slots == self.sizes[-1] else slots
        if self.session.observer is not None:  # a captured step shows nobody what it judges
            self.by_length[self.now].run(slots)
        else:
            self.functions[self.step_name(self.now, slots)]()

    def move(self, length: int) -> None:
        """Go on with another length; its steps find what they need (:meth:`.DraftSource.widening`)."""
        widen = self.functions.get(f"widen {length}")
        if length > self.now and widen is not None:
            widen()
        self.now = length

    # --- requests ------------------------------------------------------------------------------

    def start(self, condition: Tensor, prefix_mask: Tensor, randomness: Tensor) -> None:
        """Load a request (:meth:`.Session.load`) and prefill."""
        self.session.load(condition, prefix_mask, randomness)
        self.functions["prefill"]()

    def leave_out(self, first: int) -> None:
        """Finish the images from ``first`` on, which only fill a batch; call after :meth:`start`."""
        length = self.state.length
        done = torch.zeros(length.shape, dtype=length.dtype)
        done[first:] = self.geometry.tokens - 1
        length.copy_(done)

    def begin(
        self, schedule: SyncSchedule, known: int = 1, step: Callable[[], None] | None = None
    ) -> None:
        """Begin to advance images of which ``known`` tokens are known, all of them where it has none.

        ``step`` runs in place of :meth:`step`, for whoever watches the state.
        """
        policy = self.chosen
        if policy is None and len(self.by_length) > 1:
            # A draft head guesses all drafts again: nothing has to settle after a move.
            settles = self.source.settles and not self.geometry.guesses
            every = self.draft_lengths
            timed = tuple(one for one in every if one.cost is not None)
            gain = GAIN if settles else CHAIN_GAIN
            policy = AcceptancePolicy(timed or every, gain, self.geometry.batch)
        self.course = HostLoop(self, policy, schedule, known, step)
        self.now = max(self.lengths)  # what prefill has prepared
        if policy is not None:
            self.move(policy.begin())

    def schedule(self, watched: bool) -> SyncSchedule:
        """Return when the host looks at images that begin together; ``watched``: in any case."""
        moving, lag = len(self.by_length) > 1, self.session.progress.lag
        plain = PLAIN_BLOCK if watched or (moving and self.source.returns) else None
        return SyncSchedule(lag, DRAFTING_BLOCK if moving else plain, plain)

    def run(
        self,
        step: Callable[[], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
        known: int = 1,
    ) -> Decoded:
        """Step until every image is complete; call :meth:`start` first.

        ``step`` and ``known`` as in :meth:`begin`. ``on_progress`` gets the tokens known by the slowest
        image. Raises :class:`NotFiniteError` if logits are infinite or NaN.
        """
        self.begin(self.schedule(on_progress is not None), known, step)
        while True:
            progress = self.course.advance()
            if progress.failed:
                raise self.not_finite(*min(progress.failed.items()))
            if on_progress is not None:
                on_progress(min(progress.known))
            if progress.complete:
                self.finish()
                return self.read_tokens()

    def finish(self) -> None:
        """Read what is posted, so that the next request reads none of it; check the steps."""
        while self.course.posted:
            self.course.read()
        self._require_replayed(self.course.index)

    def read_tokens(self, rows: slice = slice(None)) -> Decoded:
        """Return the tokens and counters of the request, or of some of its images, on the host."""
        state = self.state
        counts = state.tokens[:, : self.geometry.tokens], state.steps, state.histogram
        with torch.inference_mode(False):  # a caller's own, to learn from
            a, b, c = (one[rows].to("cpu", torch.int64, copy=True) for one in counts)
            return Decoded(a, b, c, state.quality_loss[rows].to("cpu", copy=True))

    def not_finite(self, row: int, passes: int) -> NotFiniteError:
        """Return the error of NaN or infinite logits after ``passes`` passes."""
        self._require_replayed(self.course.index, complete=False)
        dtype = str(self.verifying.target.weight.dtype).removeprefix("torch.")
        return NotFiniteError(row, passes, dtype)

    def _require_replayed(self, calls: int, complete: bool = True) -> None:
        """Raise BackendError if some of ``calls`` replays had no effect."""
        lacks = int(self.state.length.min()) + 1 < self.geometry.tokens
        if int(self.state.step) <= calls or (complete and lacks):
            raise self.not_replayed(calls)

    def not_replayed(self, calls: int) -> BackendError:
        """Return the error that some of ``calls`` replays had no effect."""
        done, known = int(self.state.step), int(self.state.length.min()) + 1
        return BackendError(
            f"the captured step has no effect: after {calls} replays the device counts {done} of "
            f"{1 + calls} calls, and {known} of {self.geometry.tokens} tokens are committed; turn "
            "capture off (`lantern-accel devices NAME` lists options) and run `lantern-accel conform "
            "NAME --only replay`"
        )
