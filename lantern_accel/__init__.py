"""LANTERN and LANTERN++ on any accelerator: relaxed speculative decoding of visual AR models.

>>> import lantern_accel
>>> result = lantern_accel.generate("red heart", seed=7)  # doctest: +SKIP
>>> result.images[0].save("heart.png")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lantern_accel.api import generate, load
    from lantern_accel.device.backend import Backend
    from lantern_accel.device.hookspecs import hookimpl
    from lantern_accel.device.plugins import devices_report
    from lantern_accel.device.spec import BackendSpec
    from lantern_accel.errors import (
        BackendError,
        CheckpointError,
        DataError,
        LanternError,
        LanternWarning,
        ModelError,
        RequestError,
        StrategyError,
    )
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.generation.result import GenerationResult, GenerationStats
    from lantern_accel.strategy.values import Sampling, Strategy

from lantern_accel._version import __version__

_HOMES = {
    "generate": "api",
    "load": "api",
    "Backend": "device.backend",
    "BackendSpec": "device.spec",
    "BackendError": "errors",
    "CheckpointError": "errors",
    "DataError": "errors",
    "LanternError": "errors",
    "LanternWarning": "errors",
    "ModelError": "errors",
    "RequestError": "errors",
    "StrategyError": "errors",
    "hookimpl": "device.hookspecs",
    "Pipeline": "generation.pipeline",
    "devices_report": "device.plugins",
    "Sampling": "strategy.values",
    "Strategy": "strategy.values",
    "GenerationResult": "generation.result",
    "GenerationStats": "generation.result",
}

__all__ = [
    "Backend",
    "BackendError",
    "BackendSpec",
    "CheckpointError",
    "DataError",
    "GenerationResult",
    "GenerationStats",
    "LanternError",
    "LanternWarning",
    "ModelError",
    "Pipeline",
    "RequestError",
    "Sampling",
    "Strategy",
    "StrategyError",
    "__version__",
    "devices_report",
    "generate",
    "hookimpl",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lantern_accel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lantern_accel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
