"""Estimates the memory of a model before it is loaded, and what to change where it is too much."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from lantern_accel._version import __version__
from lantern_accel.device.backend import DTYPES, Backend, dtype_policy
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.preferences import Preferences
from lantern_accel.errors import DeviceRequestError, RequestError, did_you_mean, show
from lantern_accel.families.base import Found
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.registry import family
from lantern_accel.memory.footprint import Footprint, measure, saved_bytes
from lantern_accel.records import digest, format_bytes
from lantern_accel.strategy.choose import choose_strategy
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

#: Held by a driver and its libraries on an accelerator that is not open here (assumed).
DRIVER_RESERVE = Preferences.runtime_bytes


class MemoryPlan(Footprint):
    """Bytes on the device, by what holds them, for one batch size, strategy and dtype.

    Phases follow each other, so that only the largest workspace counts. ``runtime`` is what is held
    next to the model. ``peak`` includes it.
    """

    model: str
    dtype: str
    batch: int
    strategy: str
    nodes: int = Field(description="nodes that one step verifies")
    text_device: Literal["device", "cpu"] = "device"
    runtime: int
    runtime_measured: bool = Field(description="read from the open device, or assumed")
    device: str = ""
    capacity: int | None = None

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        held = sum(self.weights.values()) + self.buffers + self.tables + self.runtime
        return held + max(self.workspace.values(), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether the device has that much; None where its memory is not known."""
        return None if self.capacity is None else self.peak <= self.capacity

    def report(self) -> dict[str, object]:
        """Return everything as JSON values, sums included."""
        return {**self.model_dump(mode="json"), "peak": self.peak, "fits": self.fits}


def most_images(needed: Callable[[int], int], free: int, limit: int) -> int:
    """Return the most images, ``limit`` at most, whose ``needed`` bytes are within ``free``; may be 0.

    ``needed`` grows with the batch, nearly in proportion: the line through two known batches guesses
    best.
    """
    if needed(limit) <= free:
        return limit
    if limit == 1 or needed(1) > free:
        return 0
    low, high, guesses = 1, limit, 0
    while high - low > 1:
        below, above = needed(low), needed(high)
        middle = low + (free - below) * (high - low) // max(above - below, 1)
        if guesses > 4:
            middle = (low + high) // 2
        middle, guesses = min(max(middle, low + 1), high - 1), guesses + 1
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    return low


@dataclass
class Planner:
    """Plans for one model on one device; traces are kept, so that trying batches is cheap.

    ``ops``: an open device's, whose layout buffers have; None: the reference's. ``shape``: of the
    images; None: the usual one.
    """

    manifest: Manifest
    dtype: torch.dtype
    text_bytes: int = 0
    text_device: Literal["device", "cpu"] = "device"
    runtime: int = DRIVER_RESERVE
    runtime_measured: bool = False
    device: str = ""
    capacity: int | None = None
    ops: TensorOps | None = None
    shape: Hashable = None

    def __post_init__(self) -> None:
        self.family = family(self.manifest.family)
        self._seen: dict[object, Footprint] = {}

    def strategy(self, name: str | None = None, **changes: object) -> Strategy:
        """Return a strategy by name; without one ``auto``, as :func:`lantern_accel.generate` has it.

        Raises StrategyError for one that needs a drafter where the model has none.
        """
        chosen = choose_strategy(self.manifest.defaults, AUTO if name is None else name, **changes)
        chosen.check_drafter(self.manifest.drafter is not None)
        return chosen

    def plan(
        self,
        strategy: Strategy | None = None,
        sampling: Sampling | None = None,
        *,
        batch: int = 1,
        shape: Hashable = None,
    ) -> MemoryPlan:
        """Return the plan for one batch size; what is left None is the model's or the planner's.

        ``shape``: of the image.
        """
        strategy = strategy or self.strategy()
        sampling = sampling or self.manifest.defaults.sampling
        key = strategy, sampling, batch, self.shape if shape is None else shape
        if key not in self._seen:
            self._seen[key] = self._measure(*key)
        found = self._seen[key].model_dump()
        if self.text_bytes and self.text_device == "device":
            # Loaded for a new caption, and freed before its image is decoded where both do not fit.
            found["workspace"]["text"] = self.text_bytes * max(self.dtype.itemsize, 2) // 4
        return MemoryPlan(
            model=self.manifest.name,
            dtype=str(self.dtype).removeprefix("torch."),
            batch=batch,
            strategy=strategy.name,
            nodes=strategy.drafts.size[0],
            text_device=self.text_device,
            **found,
            runtime=self.runtime,
            runtime_measured=self.runtime_measured,
            device=self.device,
            capacity=self.capacity,
        )

    def _measure(
        self, strategy: Strategy, sampling: Sampling, batch: int, shape: Hashable
    ) -> Footprint:
        """Return what decoding holds; for ``auto`` that may relax, the most of its windows and its tree.

        A quantized copy is left out: ``auto`` makes one only where it fits.
        """
        tried = [strategy]
        if (
            strategy.name == AUTO
            and strategy.acceptance.relaxed
            and self.manifest.drafter is not None
        ):
            tried.append(self.strategy("lantern++"))
        of_model = partial(measure, self.family, self.manifest, dtype=self.dtype, ops=self.ops)
        found = (of_model(one, sampling, batch=batch, shape=shape) for one in tried)
        return max(found, key=lambda one: one.buffers + max(one.workspace.values(), default=0))

    def largest_batch(
        self, strategy: Strategy, sampling: Sampling, capacity: int, limit: int = 1024
    ) -> int:
        """Return the most images that fit together within ``capacity`` bytes; 0 where one does not."""
        return most_images(
            lambda batch: self.plan(strategy, sampling, batch=batch).peak, capacity, limit
        )

    def advice(self, plan: MemoryPlan, strategy: Strategy, sampling: Sampling) -> list[str]:
        """Return what makes a plan of this planner fit that does not, the least change first.

        [] where nothing does.
        """
        if plan.fits is not False or plan.capacity is None:
            return []
        tips: list[str] = []

        def fits(
            what: str, chosen: Strategy = strategy, batch: int = plan.batch, by: Planner = self
        ) -> None:
            other = by.plan(chosen, sampling, batch=batch)
            if other.fits:
                tips.append(f"{what} ({format_bytes(other.peak)})")

        if plan.text_device == "device" and "text" in plan.workspace:
            host = replace(self, text_device="cpu")
            fits("run the text encoder on the host: --use text-device=cpu", by=host)
        if plan.dtype == "float32":
            narrow = replace(self, dtype=torch.bfloat16)
            fits("compute in bfloat16: --dtype bfloat16", by=narrow)
        largest = self.largest_batch(strategy, sampling, plan.capacity)
        if 0 < largest < plan.batch:
            fits(f"decode {largest} images at once: --batch {largest}", batch=largest)
        if self.manifest.drafter is not None and strategy.needs_drafter:
            smaller = self.strategy("lantern++", drafts="small_8")
            if smaller.drafts.size[0] < plan.nodes:
                named = f"--strategy {strategy.name}:drafts=small_8"
                fits(f"verify a smaller tree: {named}", smaller)
        if plan.nodes > 1:
            fits("use plain decoding: --strategy vanilla", self.strategy("vanilla"))
        # Quantized weights generate other images, so they are named where nothing else fits.
        for weights in () if tips else ("int8", "int4"):
            peak = plan.peak - saved_bytes(self.manifest, weights, self.dtype, self.ops)
            if peak <= plan.capacity:
                how = f"quantize the model's weights: --weights {weights}"
                tips.append(f"{how} ({format_bytes(peak)})")
                break
        return tips


def parse_size(text: str) -> int:
    """Return bytes of ``24GB``, ``24 GiB``, ``512MB`` or a plain number."""
    number = r"[0-9]{1,18}(?:\.[0-9]{0,9})?"
    match = re.fullmatch(rf"\s*({number})\s*([kMGT]?)(i?)B?\s*", text)
    base = 1024 if match is not None and match[3] else 1000
    size = 0 if match is None else int(float(match[1]) * base ** " kMGT".index(match[2] or " "))
    if size < 1:
        raise RequestError(f"{show(text)} is not a size; write 24GB, 24GiB or a number of bytes")
    if size < 2**20:  # nobody has so little, and everybody forgets a unit
        raise RequestError(f"{show(text)} means {size} bytes; did you mean {text.strip()}GB?")
    return size


def planner_for(
    model: str | Path,
    *,
    device: str = "",
    memory: int | None = None,
    dtype: str = "auto",
    text_device: Literal["device", "cpu"] = "device",
    picture: tuple[int, int] | None = None,
    head: str | Path | None = None,
) -> Planner:
    """Return a planner for a published name, a bundled name or a path, before anything is loaded.

    ``device``: a backend that is available here, or a device profile; ``memory``: bytes of a device that
    is neither; ``picture``: width and height in pixels, None for the model's own; ``head``: a draft head
    stored elsewhere. Raises :class:`DeviceRequestError` for a device that is unknown,
    :class:`RequestError` for a size that the model cannot generate.
    """
    from lantern_accel.families.registry import entry, is_published, known_as, parts_of
    from lantern_accel.models.bundle import with_head
    from lantern_accel.models.locate import find_model, named_parts

    text, parts = 0, named_parts(head=head)
    name = str(model) if Path(model).exists() else known_as(str(model))
    if is_published(name):
        one = entry(name)
        manifest: Manifest = with_head(
            Found(family(one.family).from_entry(one), {}), parts
        ).manifest
        if "text" in parts_of(one):
            text = 4 * parts_of(one)["text"].config["encoder_parameters"]
    else:
        found = find_model(model, parts)
        manifest = found.manifest
        text = family(manifest.family).text_bytes(found)
    shape = None if picture is None else family(manifest.family).shape_for(manifest, picture)
    compute = DTYPES.get("bfloat16" if dtype == "auto" else dtype)
    if compute is None:
        raise DeviceRequestError(
            f"no dtype is named {dtype!r}{did_you_mean(dtype, ['auto', *DTYPES])}"
        )
    planner = Planner(manifest, compute, text, text_device, device=device, shape=shape)
    planner = _on_device(planner, dtype) if device else planner
    if memory:
        planner = replace(planner, device=device or format_bytes(memory), capacity=memory)
    return planner


def usual_peaks(model: str, dtypes: Sequence[str]) -> dict[str, int]:
    """Return the peak of one image by dtype, without a device, kept on disk from call to call."""
    from lantern_accel.files import cache_dir, read_record, write_record

    planner = planner_for(model, dtype=dtypes[0])
    key = [__version__, torch.__version__, planner.manifest.model_dump_json(), planner.text_bytes]
    path = cache_dir() / "plans" / f"{digest([*key, *dtypes])[:24]}.json"
    kept = read_record(path)
    if kept is not None and set(kept) == set(dtypes):
        return {name: int(kept[name]) for name in dtypes}
    peaks = {name: replace(planner, dtype=DTYPES[name]).plan().peak for name in dtypes}
    write_record(path, peaks)
    return peaks


def runtime_of(backend: Backend) -> int:
    """Return what is held next to the model on an open device, with what decoding will add to it."""
    return (backend.memory().in_use or 0) + backend.preferences.runtime_bytes


def _on_device(planner: Planner, dtype: str) -> Planner:
    """Return the planner with the memory of its device, the name of a backend or of a profile."""
    from lantern_accel.device.datasheets import load_profile, profile_names
    from lantern_accel.device.plugins import devices_report, open_backend

    device = planner.device
    report = devices_report()
    ready = [one.name for one in report if one.state == "ready"]
    if device.partition(":")[0] in ready:
        with open_backend(device) as backend:
            use = backend.memory()
            measured = use.in_use is not None
            return replace(
                planner,
                # Without what other programs hold.
                capacity=None if use.left is None else use.left + (use.in_use or 0),
                runtime=runtime_of(backend) if measured else DRIVER_RESERVE,
                runtime_measured=measured,
                dtype=dtype_policy(backend, dtype).compute,
            )
    if device in profile_names():
        figure = load_profile(device).memory_bytes
        return replace(planner, capacity=None if figure is None else int(figure.value))
    if device in {one.name for one in report}:  # a kind of device, and none of it is here
        return planner
    names: Sequence[str] = sorted({*ready, *profile_names()})
    raise DeviceRequestError(
        f"no device here and no profile is named {device!r}{did_you_mean(device, names)} (or give "
        "its memory: --memory 24GB)"
    )
