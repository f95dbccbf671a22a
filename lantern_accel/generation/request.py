"""Checks a request and fills in defaults before any work is done; lets one call run at a time."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import Field

from lantern_accel.bounds import MOST_BATCH, MOST_IMAGES, SEEDS
from lantern_accel.device import forks
from lantern_accel.device.context import callers
from lantern_accel.errors import BackendError, RequestError, show
from lantern_accel.families.manifest import Manifest
from lantern_accel.generation.settings import check_prompts, read_settings
from lantern_accel.records import Frozen
from lantern_accel.strategy.choose import CHANGES, choose_strategy
from lantern_accel.strategy.presets import preset_for
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend

#: A strategy over the drafts that were tuned for a device, from the strategy, the images that are decoded
#: together (None: as many as is usual), at most all of them, and the sampling.
Tuned = Callable[[Strategy, int | None, int, Sampling], Strategy]


@dataclass(eq=False)
class ImageJob:
    """An image to generate: its index for the caller, its prompt, and what picks its random stream.

    ``seed`` and ``number`` (under this seed) decide its randomness. ``partials``: partial images to make
    while it is generated; ``shown``: how many were made; ``drafts``: how many its steps have tried.
    """

    index: int
    prompt: str | int
    seed: int
    number: int
    partials: int = 0
    shown: int = 0
    drafts: int = 0


class GenerationRequest(Frozen):
    """One call of ``generate``: prompts, and settings of which none is left open."""

    prompts: tuple[str | int, ...] = Field(min_length=1)
    strategy: Strategy
    sampling: Sampling
    num_images: int = Field(1, ge=1, le=MOST_IMAGES, description="images per prompt")
    seed: int = Field(ge=0, lt=SEEDS)
    seeds: tuple[int, ...] | None = Field(None, description="of each image; None: one for all")
    negative_prompt: str | None = Field(None, description="what guidance leads away from")
    batch_size: int | None = Field(None, ge=1, le=MOST_BATCH, description="images decoded together")
    size: tuple[int, int] | None = Field(None, description="width and height in pixels")

    @property
    def count(self) -> int:
        """Images in all."""
        return len(self.prompts) * self.num_images

    def randomness(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return what decides these images: their seeds, and their numbers under these.

        An image with a seed of its own is the one that this seed gives alone.
        """
        if self.seeds is None:
            return [self.seed] * len(indices), list(indices)
        return [self.seeds[index] for index in indices], [0] * len(indices)

    def jobs(self, indices: Sequence[int], partials: int = 0) -> list[ImageJob]:
        """Return these images, each with ``partials`` partial images."""
        prompts = [self.prompts[index // self.num_images] for index in indices]
        given = zip(indices, prompts, *self.randomness(indices), strict=True)
        return [ImageJob(*one, partials) for one in given]


def build_request(
    manifest: Manifest,
    prompt: object,
    given: Mapping[str, object],
    tuned: Tuned | None = None,
    named: Callable[[str], str] = str,
) -> GenerationRequest:
    """Check keywords and fill in a preset's or the model's defaults.

    Raises :class:`RequestError` or :class:`StrategyError` in one sentence, with fields as ``named``.
    """
    prompts = check_prompts(prompt)
    settings = read_settings(given, named)
    changes = {name: one for name, one in settings if name in CHANGES}
    sampling: dict[str, object] = {}
    name = settings.strategy
    if settings.preset is not None:
        published = preset_for(settings.preset, manifest)
        sampling = dict(published.sampling)
        if name is None or name == published.strategy:
            name = published.strategy
            given_changes = {name: one for name, one in changes.items() if one is not None}
            known = published.overrides
            if "accept" in given_changes:  # a rule of the request's own has its own values
                known = {n: one for n, one in known.items() if n not in ("k", "delta", "lam")}
            changes = {**known, **given_changes}
    if settings.sampling is not None:
        sampling = settings.sampling.model_dump()
    strategy = choose_strategy(manifest.defaults, AUTO if name is None else name, **changes)
    values = {**manifest.defaults.sampling.model_dump(), **sampling, **settings.sampling_changes()}
    final = validate_model(Sampling, values, "sampling")
    images, seed, seeds = settings.num_images or 1, settings.seed, None
    if isinstance(seed, tuple):
        if len(seed) != images * len(prompts):
            raise RequestError(
                f"there are {len(seed)} seeds for {images * len(prompts)} images; give one for each, or "
                "one number for all",
                field="seed",
            )
        seed, seeds = seed[0], seed
    free = changes.get("drafts") is None and changes.get("window") is None
    if tuned is not None and free and not isinstance(name, Strategy):
        strategy = tuned(strategy, settings.batch_size, images * len(prompts), final)
    return GenerationRequest(
        prompts=prompts,
        strategy=strategy,
        sampling=final,
        num_images=images,
        seed=secrets.randbits(31) if seed is None else seed,
        seeds=seeds,
        negative_prompt=settings.negative_prompt or None,
        batch_size=settings.batch_size,
        size=settings.size,
    )


def wanted_images(request: GenerationRequest, only: Sequence[int] | None) -> list[int]:
    """Return the indices of the images to generate; raises RequestError for others."""
    if only is None:
        return list(range(request.count))
    given: list[object] = list(only) if isinstance(only, Iterable) else []
    wanted = sorted({one for one in given if type(one) is int and 0 <= one < request.count})
    if not wanted or len(wanted) < len(set(map(str, given))):
        raise RequestError(
            f"only={show(only)} does not name images of this request; give 0 to {request.count - 1}"
        )
    return wanted


class Suspended(Protocol):
    """Work that has begun on a pipeline and goes on later, such as a stream between two events."""

    def set_aside(self) -> None:
        """Keep what it needs out of the engines, which another call is about to use; never raises."""


class CallersError(BaseException):
    """Carries an error of a caller's function past all that explains a device's; see :func:`passing`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def passing(function: Callable[..., None] | None) -> Callable[..., None] | None:
    """Return a caller's function whose errors leave :meth:`RequestLock.hold` as they are."""
    if function is None:
        return None
    if not callable(function):
        raise RequestError(f"{show(function)} cannot be called; give a function for progress")

    inside = callers(function)

    def call(*given: object) -> None:
        try:
            inside(*given)
        except Exception as error:
            raise CallersError(error) from None

    return call


class RequestLock:
    """Lets one call of a pipeline run at a time, from whatever thread, until :attr:`closed` is set.

    It is free in a child of ``fork``, whichever thread of the parent held it.
    """

    def __init__(self, backend: Callable[[], Backend]) -> None:
        """``backend``: what calls run on; none is let in where that cannot be used."""
        self.closed = False
        self._backend = backend
        self.after_fork()
        forks.report_in_children(self)
        #: Whose rows lie in the engines. A weak reference: nobody waits for what is not wanted any more.
        self._begun: weakref.ref[Suspended] | None = None

    def after_fork(self) -> None:
        """Begin with a free lock."""
        self._lock = threading.Lock()
        self._inside: int | None = None

    @contextmanager
    def hold(self, by: Suspended | None = None, *, last: bool = False) -> Iterator[None]:
        """Hold the lock for one call; ``last``: also where the pipeline is closed already.

        ``by``: what goes on later; any other call has it set aside first. Raises RequestError where a
        call is made from within another, or too late, and BackendError where the device cannot be used.
        """
        me = threading.get_ident()
        if self._inside == me:
            raise RequestError(
                "this pipeline is generating, and was called again from within (by on_progress or "
                "on_images); wait until the call returns, or load a second pipeline"
            )
        own: Exception | None = None
        with self._lock:
            try:
                self._inside = me
                if self.closed and not last:
                    raise RequestError("this pipeline is closed; load the model again")
                if (reason := self._backend().unusable) and not last:
                    raise BackendError(reason)
                begun = None if self._begun is None else self._begun()
                if begun is not None and begun is not by and not last:
                    begun.set_aside()
                self._begun = None if by is None else weakref.ref(by)
                yield
            except CallersError as carried:
                own = carried.error
            finally:
                self._inside = None
        if own is not None:  # here, so that its cause and context stay its own
            raise own
