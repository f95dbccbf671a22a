"""Invented profiling runs: the shape of real ones, the figures made up and smooth."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image

from lantern_accel.device.backend import DeviceFacts
from lantern_accel.generation.result import QuantizationLoss
from lantern_accel.records import digest
from lantern_accel.strategy.values import (
    DynamicTree,
    Sampling,
    StaticTree,
    Strategy,
    named_strategy,
)
from lantern_accel_profiles.measure.record import (
    Ceilings,
    Cell,
    ClockCheck,
    Distance,
    Environment,
    Interval,
    LoadCell,
    LoadSample,
    MemoryPeak,
    Plan,
    PromptSet,
    Quality,
    Run,
    RunSession,
    RunSettings,
    Sample,
    Strip,
    Warmup,
    not_measured,
)

PROMPTS: list[str | int] = ["red heart", "dog face", "pizza", "rocket"]
TREE = StaticTree(paths=((0,), (1,), (0, 0)))
#: Tokens a step, slowness of a step against vanilla's, mass moved.
SHAPES = {
    "vanilla": (1.0, 1.0, 0.0),
    "eagle": (1.9, 1.6, 0.0),
    "eagle2": (1.7, 2.2, 0.0),
    "lantern": (2.1, 1.9, 0.06),
    "lantern++": (2.4, 1.6, 0.08),
}
TOKENS = 256
#: What int8 weights cost, in a run of them.
ROUNDED = QuantizationLoss(
    weights="int8",
    bits_per_weight=8,
    by_image=(0.008, 0.012, 0.016),
    tokens=16,
    sampling=Sampling(),
)


def strategies(names: Sequence[str] = tuple(SHAPES)) -> list[Strategy]:
    """Return strategies by name on small trees."""
    dynamic = DynamicTree(top_k=2, depth=1, total=5)
    return [named_strategy(name, static=TREE, dynamic=dynamic) for name in names]


def invented_sample(
    strategy: Strategy, batch: int, number: int, speed: float, noise: float = 0.02
) -> Sample:
    """Return a sample of ``speed`` vanilla tokens a second at batch 1."""
    steps, slow, moved = SHAPES[strategy.name]
    rng = random.Random(f"{strategy.name}/{batch}/{number}")
    seconds = TOKENS / speed * slow / steps * batch**0.5 * (1 + rng.uniform(-noise, noise))
    count = round((TOKENS - 1) / steps)
    return Sample(
        session=1,
        round=number,
        order=number,
        at=float(number),
        seed=number,
        text=0.004,
        prefill=0.05 * seconds,
        decode=0.95 * seconds,
        pixels=0.03,
        total=seconds + 0.035,
        wall=seconds + 0.036,
        images=batch,
        tokens=TOKENS * batch,
        steps=count * batch,
        accepted_histogram=[count * batch],
        total_variation_per_token=moved,
        energy_mj=None,
        others_cpu=0.02,
    )


def invented_cell(
    strategy: Strategy, batch: int, speed: float, samples: int = 8, **changes: Any
) -> Cell:
    """Return a measured cell; ``changes`` replace its fields."""
    slow = SHAPES[strategy.name][1]
    step = 1e3 / speed * slow
    share = {"draft": 0.25, "verify": 0.5, "accept": 0.15, "commit": 0.05, "host": 0.05}
    values: dict[str, Any] = {
        "strategy": strategy,
        "batch": batch,
        "temperature": 1.0,
        "cold_seconds": 2.5,
        "captured": False,
        "warmup": [Warmup(session=1, seconds=1.0) for _ in range(4)],
        "settled": True,
        "memory": MemoryPeak(
            peak_bytes=3.4e8, definition="what a test says", buffers_bytes=5_000_000
        ),
        "step_ms": {name: step * part for name, part in share.items()},
        "samples": [invented_sample(strategy, batch, n, speed) for n in range(samples)],
    }
    return Cell(**(values | changes))


def invented_price(strategy: Strategy, temperature: float = 1.0) -> Quality:
    """Return the quality loss of a relaxed strategy."""
    moved = SHAPES[strategy.name][2]
    near = Interval(value=4.0, low=-3.0, high=11.0, n=64)
    return Quality(
        strategy=strategy,
        temperature=temperature,
        images=64,
        total_variation_per_token=Interval(value=moved, low=moved * 0.95, high=moved * 1.05, n=64),
        agreement=Interval(value=0.14, low=0.1, high=0.18, n=16),
        chance_agreement=0.03,
        first_difference=Interval(value=8.0, low=6.0, high=10.0, n=16),
        distance=Distance(
            metric="KID x 1000",
            network="a test's",
            value=near,
            floor=Interval(value=0.5, low=-5.0, high=6.0, n=64),
            p_value=0.2,
            detectable=9.0,
        ),
    )


def invented_strip(strategy: Strategy) -> Strip:
    """Return a row of coloured squares."""
    sheet = Image.new("RGB", (16 * len(PROMPTS), 16), "white")
    for i in range(len(PROMPTS)):
        sheet.paste((40 * i + 60, 90, 150), (16 * i, 0, 16 * i + 15, 16))
    stream = io.BytesIO()
    sheet.save(stream, format="png")
    return Strip(
        strategy=strategy.name,
        temperature=1.0,
        prompts=PROMPTS,
        png_base64=base64.b64encode(stream.getvalue()).decode(),
    )


def invented_run(
    name: str = "abacus-1",
    *,
    speed: float = 350.0,
    device: str = "Abacus, 10 rods",
    names: Sequence[str] = tuple(SHAPES),
    batches: Sequence[int] = (1,),
    cells: list[Cell] | None = None,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Return a complete run; ``settings`` and ``changes`` replace fields."""
    chosen = strategies(names)
    given: dict[str, Any] = {
        "model": "tiny",
        "weights_hash": "0123456789abcdef",
        "tokens": TOKENS,
        "sampling": Sampling(cfg_scale=2.0),
        "prompts": PromptSet(
            source="built-in", count=len(PROMPTS), sha256=digest(PROMPTS), used=PROMPTS
        ),
        "seed": 0,
        "dtype": "bfloat16",
        "plan": Plan(quick=True, samples=8, seconds=0, quality_images=64),
    }
    values: dict[str, Any] = {
        "name": name,
        "state": "complete",
        "command": f"lantern-accel profile -o {name}.json",
        "settings": RunSettings(**(given | (settings or {}))),
        "environment": Environment(
            device=DeviceFacts(backend="abacus", device="abacus", name=device, torch="2.9"),
            backend="abacus 1.0",
            dtype="bfloat16",
            torch="2.9",
            python="3.11",
            system="a test",
            lantern_accel="0.1.0",
            load_average=[0.1, 0.1, 0.1],
            commit="0" * 40,
            dirty=False,
            conditions_before={
                "clock_mhz": 2600.0,
                "power_w": "not measured: backend 'abacus' does not read it",
            },
        ),
        "clock": ClockCheck(stopwatch="beads", work_seconds=0.05, ratio=1.0),
        "ceilings": Ceilings(
            copy_bytes_per_s=4e10,
            read_bytes_per_s=3e10,
            copy_bytes=2**28,
            matmul_flops={"bfloat16": 5e11, "float32": 1e11},
            launch_seconds=3e-6,
            captured_launch_seconds="not measured: backend 'abacus' runs each step eagerly",
        ),
        "sessions": [RunSession(started="2026-01-01T00:00:00+00:00", load_seconds=0.3)],
        "cells": cells
        if cells is not None
        else [invented_cell(s, b, speed) for b in batches for s in chosen],
        "quality": [invented_price(s) for s in chosen if s.acceptance.kind != "exact"],
        "contact_sheet": [invented_strip(s) for s in chosen],
        "conformance": "not measured: a test has none; `lantern-accel conform abacus`",
    }
    return Run(**(values | changes))


def invented_load(
    clients: int, spans: Sequence[tuple[float, float, float]], **changes: object
) -> LoadCell:
    """Return a level of load; spans: when requests began, showed a first partial image, ended."""
    gap = not_measured("no meter")
    samples = [
        LoadSample(
            prompt="fish", seed=n, began=began, first=first, ended=ended, outcome="ok", counted=True,
            stages=gap, total_variation_per_token=0.0,
        )
        for n, (began, first, ended) in enumerate(spans)
    ]  # fmt: skip
    values = {
        "strategy": "auto", "relaxed": False, "clients": clients, "slots": 4, "partials": 1,
        "began": 0.0, "ended": max(ended for *_, ended in spans), "joules": gap, "others_cpu": 0.0,
        "samples": samples,
    }  # fmt: skip
    return LoadCell.model_validate({**values, **changes})


def change_samples(cells: Sequence[Cell], **changes: object) -> None:
    """Replace fields of all samples of cells."""
    for cell in cells:
        cell.samples = [s.model_copy(update=changes) for s in cell.samples]
