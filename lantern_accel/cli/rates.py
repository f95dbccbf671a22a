"""Remembers the rates of earlier commands, so that one that is slower than plain decoding can say so."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from lantern_accel.files import cache_dir, read_record, write_record

if TYPE_CHECKING:
    from pathlib import Path

    from lantern_accel.generation.result import GenerationStats

#: What others are compared with: no drafts, and what is chosen by measurement.
BASES = ("vanilla", "auto")
#: Below this share of a base it is said; processes vary by less.
SLOWER = 0.85
#: A strategy that drafts and brings fewer tokens per step has hardly drafted anything.
FEW_TOKENS = 1.15


def remark(stats: GenerationStats) -> str | None:
    """Keep a base's rate, or say that a named strategy was slower than one; None: nothing to say.

    Rates are kept for the device, model, dtype, batch and guidance, the highest of each base.
    """
    rate = stats.tokens_per_second
    if rate is None or stats.simulated:
        return None
    name = "auto" if stats.auto is not None else stats.strategy.name
    path = _path(stats)
    found = read_record(path) or {}
    kept = {n: float(found[n]) for n in BASES if isinstance(found.get(n), int | float)}
    if name in BASES:
        if rate > kept.get(name, 0.0):
            write_record(path, {**kept, name: rate})
        return None
    base = max(kept, key=lambda one: kept[one], default=None)
    if base is not None and rate < SLOWER * kept[base]:
        plain = "plain decoding" if base == "vanilla" else "auto"
        return (
            f"{stats.strategy.name} drew {rate:.0f} tokens/s, and {plain} drew {kept[base]:.0f} here "
            "before; leave --strategy and --preset out to let auto choose"
        )
    if stats.step_compression < FEW_TOKENS:
        return (
            f"{stats.step_compression:.2f} tokens per step: hardly a draft was accepted, so plain "
            "decoding is likely faster; leave --strategy and --preset out to let auto choose"
        )
    return None


def _path(stats: GenerationStats) -> Path:
    kind = [stats.device_name, stats.device, stats.backend, stats.backend_version, stats.model]
    kind += [stats.weights_hash, stats.dtype, str(stats.batch_size), str(stats.sampling.guided)]
    kind += [stats.torch, "" if stats.rounding is None else stats.rounding.text()]
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:24]
    return cache_dir() / "rates" / f"{digest}.json"
