"""Defines the record of a profiling run: everything that was measured, raw samples included.

Units are in the names, as everywhere: seconds unless a name ends in ``_ms``, bytes, FLOP. A figure
that could not be had is the text ``not measured: reason``, never a zero and never left out.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Literal, TypeGuard

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from lantern_accel.device.backend import DeviceFacts
from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.generation.result import QuantizationLoss
from lantern_accel.records import NOT_MEASURED as NOT_MEASURED
from lantern_accel.records import Record
from lantern_accel.records import not_measured as not_measured
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import Sampling, Strategy
from lantern_accel_profiles.quality.interval import LOSS
from lantern_accel_profiles.quality.interval import Interval as Interval
from lantern_accel_profiles.store import LONGEST_NAME

SCHEMA: Literal[2] = 2
"""Version of the file's shape."""
PROTOCOL = 2
"""Version of how the figures are measured; runs of two protocols are not compared."""
KIND: Literal["lantern_accel.run"] = "lantern_accel.run"
STEP_PHASES = ("draft", "verify", "accept", "commit")
PHASES = ("text", "prefill", *STEP_PHASES, "host", "pixels")
"""Where the time of a request goes, in order."""
WARMUPS = 3
"""Warm-up decodings a cell needs at least: the cold one, and two to see the times settle."""

NotMeasured = Annotated[str, StringConstraints(pattern=r"^not measured: \S")]
Reading = float | NotMeasured
Positive = Annotated[float, Field(gt=0)] | NotMeasured
"""A reading that others are divided by."""
Part = Annotated[float, Field(ge=0, le=1e9)] | NotMeasured
Seconds = Annotated[float, Field(ge=1e-9, le=1e9)] | NotMeasured
"""Those of a request, to thirty years: further out, figures made from them are not finite."""


def is_measured(reading: float | str | None) -> TypeGuard[float]:
    """Tell a number from its absence."""
    return isinstance(reading, int | float)


def _is_a_share(value: float | str | Interval) -> float | str | Interval:
    """Refuse a total variation that no two distributions have."""
    figures = (value.value, value.low, value.high) if isinstance(value, Interval) else (value,)
    for one in figures:
        if not isinstance(one, str) and not -1e-6 <= one <= 1 + 1e-6:
            raise ValueError(f"a total variation lies between 0 and 1, and {one:g} does not")
    return value


class _FiniteRecord(Record):
    model_config = ConfigDict(allow_inf_nan=False)


class PromptSet(_FiniteRecord):
    """What was generated: all prompts by digest, and the first ones in words."""

    source: str = Field(description="where they come from; for a file its name")
    count: int = Field(ge=0, description="0: a step on random weights has none")
    sha256: str
    used: list[str | int] = Field(description="the prompts that were used, at most 64")


class Plan(_FiniteRecord):
    """How much is measured; the same for every cell."""

    quick: bool
    samples: int = Field(ge=1, description="timed decodings per cell, at least")
    seconds: float = Field(ge=0, description="timed seconds per cell, at least")
    quality_images: int = Field(ge=0, description="images per strategy for quality; 0: none")
    latency_s: float | None = Field(
        None, gt=0, description="the most seconds of p95 that a load was sought for; null: none was"
    )


class RunSettings(_FiniteRecord):
    """What a run is a run of; a resumed run must have the same."""

    model: str
    weights_hash: str
    tokens: int = Field(ge=1, description="tokens per image")
    sampling: Sampling = Field(description="without the temperature, which a cell names")
    prompts: PromptSet
    seed: int
    dtype: str
    options: dict[str, object] = Field(default_factory=dict, description="given to the backend")
    weights: str = Field("full", description="the target's: full, int8, int6 or int4")
    rounding: QuantizationLoss | None = Field(
        None,
        description="the quality loss of the target's quantized weights, which every figure has; null: "
        "full weights",
    )
    plan: Plan


class Environment(_FiniteRecord):
    """What a reader needs to judge the figures."""

    device: DeviceFacts
    backend: str
    dtype: str
    torch: str
    threads: int | None = None
    python: str
    system: str
    lantern_accel: str
    load_average: list[float] | None = None
    commit: str = not_measured("this file does not say")
    dirty: bool | NotMeasured = not_measured("this file does not say")
    versions: dict[str, str] = Field(default_factory=dict)
    conditions_before: dict[str, Reading] = Field(default_factory=dict)
    conditions_after: dict[str, Reading] = Field(default_factory=dict)


def _is_a_moment(text: str | None) -> str | None:
    with suppress(ValueError):
        if not text or ("T" in text and datetime.fromisoformat(text.replace("Z", "+00:00"))):
            return text
    raise ValueError(f"{str(text)[:40]!r} is not a date and time as ISO 8601 writes them")


class RunSession(_FiniteRecord):
    """One process that worked on the run; a resumed run has several."""

    started: str = Field(description="UTC, ISO 8601")
    load_seconds: float = Field(description="opening the device and loading the model, cold")
    ended: str | None = None
    reason: str = Field("", description="why it ended before the run was complete")
    _moments = field_validator("started", "ended")(_is_a_moment)


class ClockCheck(_FiniteRecord):
    """The backend's stopwatch against the host's clock on work of a known end."""

    stopwatch: str = Field(description="what the stopwatch reads")
    work_seconds: float = Field(gt=0, description="host clock until a result had arrived")
    ratio: float = Field(description="stopwatch over host clock; 1 is right")


class Ceilings(_FiniteRecord):
    """What the device reached on simple work, best of several."""

    copy_bytes_per_s: Positive = Field(description="bytes read plus bytes written per second")
    read_bytes_per_s: Positive = Field(description="bytes per second of a sum over the buffer")
    copy_bytes: int = Field(description="size of the buffer")
    matmul_flops: dict[str, Positive] = Field(description="FLOP/s by dtype, square matrices")
    matmul_sizes: dict[str, int] = Field(default_factory=dict)
    launch_seconds: Reading = Field(description="one tiny operator, run eagerly")
    captured_launch_seconds: Reading = Field(description="one tiny operator within a replay")
    raised_by: str = Field(
        "", description="the step whose rate is a ceiling; empty: simple work's are"
    )

    @property
    def bandwidth(self) -> Positive:
        """Bytes per second that floors and fractions use: the better of copying and reading."""
        found = [one for one in (self.copy_bytes_per_s, self.read_bytes_per_s) if is_measured(one)]
        return max(found) if found else self.copy_bytes_per_s


class MemoryPeak(_FiniteRecord):
    """Memory while this cell ran alone."""

    peak_bytes: Reading
    definition: str
    buffers_bytes: int = Field(description="static caches and state of the decoding engine")


class Warmup(_FiniteRecord):
    """One decoding that is not counted."""

    session: int
    seconds: float
    rising: dict[str, int] = Field(
        default_factory=dict, description="counters of the device that one step more still raised"
    )


class Sample(_FiniteRecord):
    """One timed request of ``images`` images; seconds by the backend's stopwatch."""

    session: int
    round: int
    order: int = Field(description="position among all samples of the run, from 0")
    at: float = Field(description="seconds after the session's start")
    seed: int
    text: Part
    prefill: float = Field(ge=0, le=1e9, description="0 where decode holds both")
    decode: float = Field(ge=1e-9, le=1e9)
    pixels: Part
    total: Seconds
    wall: Seconds = Field(description="the same request by the host's clock")
    images: int = Field(ge=1)
    tokens: int = Field(ge=1)
    steps: int = Field(ge=1)
    accepted_histogram: list[int]
    total_variation_per_token: float = Field(
        validation_alias=LOSS, description="relaxed mass used per generated token"
    )
    energy_mj: float | None = None
    _share = field_validator("total_variation_per_token")(_is_a_share)
    others_cpu: Reading = Field(description="share of the host's cores that others used meanwhile")


def _has_every_phase(value: dict[str, object] | str) -> dict[str, object] | str:
    if isinstance(value, dict) and (missing := [n for n in STEP_PHASES if n not in value]):
        raise ValueError(f"a step has no {', '.join(missing)}")
    return value


class Cell(_FiniteRecord):
    """One strategy at one batch size and temperature."""

    strategy: Strategy
    batch: int = Field(ge=1)
    temperature: float = Field(ge=0)
    cold_seconds: Reading = Field(description="the first decoding: buffers, capture, compilation")
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    captured: bool = Field(False, description="steps are replayed, not run operator by operator")
    capture_kind: str = Field(
        "", description="recorded, compiled, traced, eager; captured where the backend says no more"
    )
    tracing_seconds: float | None = Field(
        None,
        ge=0,
        description="host seconds per step in which Python traces it again; None: it does not",
    )
    stands_for: str = Field(
        "", description="what auto decoded with, in words; empty: the strategy is its own name"
    )
    warmup: list[Warmup] = Field(description="the cold decoding is the first")
    settled: bool = Field(description="warm-up ended because times and counters stood still")
    memory: MemoryPeak | NotMeasured
    step_ms: dict[str, float] | NotMeasured = Field(description="one step by phase")
    step_ms_from: Literal["eager", "recording"] = Field(
        "eager",
        description="eager: the Python step, the device waited for at every edge; recording: the "
        "captured step itself",
    )
    work: object = Field(None, exclude=True, description="in older files; nothing reads it")
    samples: list[Sample] = Field(default_factory=list)
    _whole = field_validator("step_ms")(_has_every_phase)

    @property
    def key(self) -> tuple[str, int, float]:
        """What tells cells apart."""
        return self.strategy.model_dump_json(), self.batch, self.temperature

    @property
    def name(self) -> str:
        """A short name for messages."""
        return f"{self.strategy.name}, batch {self.batch}, temperature {self.temperature:g}"

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each sample, prefill included."""
        return [s.tokens / (s.prefill + s.decode) for s in self.samples]

    @property
    def tokens_per_second(self) -> float:
        """Their median: image tokens of the whole batch."""
        return statistics.median(self.rates)

    @property
    def step_compression(self) -> float:
        """Tokens per target forward of an image, prefill's first token not counted."""
        made = sum(s.tokens - s.images for s in self.samples)
        return made / max(sum(s.steps for s in self.samples), 1)

    @property
    def relaxed(self) -> bool:
        """Whether speed is bought with a change of the distribution."""
        return not isinstance(self.strategy.acceptance, Exact)


class StepCell(_FiniteRecord):
    """One kind of step, on its own: its samples, vanilla's taken in turns with them, and what it needs.

    A ``pass`` is the target's alone, without guidance, so that it has as many rows as nodes; what it is
    taken in turns with is a pass of as many rows as vanilla's.
    """

    kind: Literal["pass", "vanilla", "verify", "step"]
    strategy: Strategy
    batch: int = Field(ge=1)
    nodes: int = Field(ge=1)
    at: float = Field(0.5, ge=0, le=1, description="share of the image that is known before it")
    rows: int | None = Field(None, description="of a pass of the target; null: an older file")
    ms: list[float] = Field(default_factory=list)
    vanilla_ms: list[float] = Field(default_factory=list)
    floor_flops: float = 0.0
    floor_bytes: float = 0.0
    operators: int = 0
    captured: bool = False
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    phase_ms: dict[str, float] | None = None

    @property
    def key(self) -> tuple[str, str, int, int, float]:
        """What tells cells of steps apart."""
        return self.kind, self.strategy.model_dump_json(), self.batch, self.nodes, self.at

    @property
    def label(self) -> str:
        """What tables call it."""
        name = f"pass {self.nodes}" if self.kind == "pass" else self.strategy.name
        return name if self.at == 0.5 else f"{name} at {self.at:.0%}"


class LoadSample(_FiniteRecord):
    """One request to a service as its client saw it; moments are seconds since the level began."""

    prompt: str
    seed: int
    began: float
    first: Reading = Field(description="when the first partial image came")
    ended: float
    outcome: str = Field(description="ok, or what came in place of the image")
    counted: bool = Field(
        description="false: it filled the service before or after those that count"
    )
    stages: dict[str, float] | NotMeasured = Field(
        description="seconds by the service's clock: waiting, text, engine, prefill, decode, pixels"
    )
    tokens: int | None = None
    steps: int | None = None
    total_variation_per_token: Reading = Field(
        validation_alias=LOSS, description="relaxed mass used per generated token"
    )

    @property
    def seconds(self) -> float:
        """From request to image; infinite where none came."""
        return self.ended - self.began if self.outcome == "ok" else math.inf


class LoadCell(_FiniteRecord):
    """A service under a steady number of requests: each client asks again when it has its image."""

    strategy: str = Field(description="its name, as the service calls it")
    relaxed: bool
    clients: int = Field(ge=1, description="requests at once")
    slots: int | None = Field(description="images that the service decodes together")
    partials: int = Field(ge=0, description="partial images that every client asked for")
    began: float = Field(description="when the first request that counts began")
    ended: float = Field(description="when the last one that counts had ended")
    joules: Reading = Field(description="by the service's meter, between these two moments")
    others_cpu: Reading = Field(description="share of the host's cores that others used meanwhile")
    samples: list[LoadSample]

    @property
    def key(self) -> tuple[str, int]:
        """What tells cells of loads apart."""
        return self.strategy, self.clients

    @property
    def latencies(self) -> list[float]:
        """Seconds of the requests that count, rising; infinite where no image came."""
        return sorted(one.seconds for one in self.samples if one.counted)

    @property
    def first_partials(self) -> list[float]:
        """Seconds to the first partial image of the requests that count, rising."""
        counted = [one for one in self.samples if one.counted]
        return sorted(one.first - one.began for one in counted if is_measured(one.first))

    def latency(self, share: float) -> float:
        """Return the latency that this share of the requests stays within, one that was seen."""
        found = self.latencies
        return found[max(math.ceil(share * len(found)) - 1, 0)] if found else math.inf

    def rate(self, within: float = math.inf) -> float:
        """Return the images per second of the whole service that took at most ``within`` seconds."""
        came = [one for one in self.samples if self.began < one.ended <= self.ended]
        good = sum(one.seconds <= within and one.outcome == "ok" for one in came)
        return good / (self.ended - self.began) if self.ended > self.began else 0.0

    @property
    def joules_per_image(self) -> Reading:
        """Energy per image that came, or why it is not known."""
        images = self.rate() * (self.ended - self.began)
        if not is_measured(self.joules):
            return self.joules
        return self.joules / images if images else not_measured("no image came")


class Distance(_FiniteRecord):
    """How far the images are from exact decoding's in a network's feature space."""

    metric: str
    network: str
    value: Interval
    floor: Interval = Field(description="the same between two exact sets of other seeds")
    p_value: float = Field(
        ge=0, le=1, description="of a sign-flip permutation test within prompts, one-sided"
    )
    detectable: float = Field(
        description="distance that this many images find in four of five cases at p < 0.05"
    )


class Quality(_FiniteRecord):
    """The quality loss of one relaxed strategy, measured in the same run as its speed."""

    strategy: Strategy
    temperature: float
    images: int = Field(ge=1)
    total_variation_per_token: Interval | NotMeasured = Field(
        validation_alias=LOSS, description="relaxed mass per generated token"
    )
    agreement: Interval | NotMeasured = Field(
        description="share of tokens equal to exact decoding with the same tree and uniforms"
    )
    chance_agreement: Reading = Field(description="the same between two exact sets of other seeds")
    first_difference: Interval | NotMeasured = Field(
        description="equal tokens before the first different one, mean"
    )
    distance: Distance | NotMeasured
    _share = field_validator("total_variation_per_token")(_is_a_share)


class Strip(_FiniteRecord):
    """One strategy's row of the contact sheet."""

    strategy: str
    temperature: float
    prompts: list[str | int]
    png_base64: str


class Run(_FiniteRecord):
    """A whole profiling run."""

    kind: Literal["lantern_accel.run"] = KIND
    schema_version: Literal[2] = SCHEMA
    protocol_version: int = PROTOCOL
    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    state: Literal["running", "interrupted", "complete"]
    command: str = Field(description="what to type to measure this again")
    settings: RunSettings
    environment: Environment
    clock: ClockCheck | NotMeasured
    ceilings: Ceilings | NotMeasured
    sessions: list[RunSession]
    cells: list[Cell] = Field(default_factory=list)
    steps: list[StepCell] = Field(default_factory=list, description="steps alone, of `stepcost`")
    loads: list[LoadCell] = Field(
        default_factory=list,
        description="a service under load, of `python -m lantern_accel_profiles.load`",
    )
    quality: list[Quality] = Field(default_factory=list)
    contact_sheet: list[Strip] = Field(default_factory=list)
    conformance: ConformanceReport | NotMeasured

    def quality_of(self, cell: Cell) -> Quality | None:
        """Return the quality loss of a cell's strategy at its temperature."""
        key = cell.strategy, cell.temperature
        return next((one for one in self.quality if (one.strategy, one.temperature) == key), None)

    @model_validator(mode="after")
    def _has_everything_once(self) -> Run:
        cells = [cell.key for cell in self.cells]
        prices = [(one.strategy.model_dump_json(), one.temperature) for one in self.quality]
        steps = [one.key for one in self.steps]
        loads = [one.key for one in self.loads]
        every = (("cells", cells), ("prices", prices), ("steps", steps), ("loads", loads))
        for what, keys in every:
            if len(set(keys)) < len(keys):
                raise ValueError(f"two of its {what} are of one strategy and one setting")
        return self

    @model_validator(mode="after")
    def _keeps_the_protocol(self) -> Run:
        for cell in self.cells:
            for session in sorted({s.session for s in cell.samples}):
                warm = sum(w.session == session for w in cell.warmup)
                if warm < WARMUPS:
                    raise ValueError(
                        f"{cell.name}: has samples of session {session} after {warm} warm-up "
                        f"decodings; the protocol asks for {WARMUPS} or more"
                    )
            wanted = self.state == "complete" and self.settings.plan.quality_images
            if wanted and cell.relaxed and self.quality_of(cell) is None:
                raise ValueError(
                    f"{cell.name}: a relaxed strategy without its quality figures; "
                    "`lantern-accel profile --resume` measures them"
                )
        return self
