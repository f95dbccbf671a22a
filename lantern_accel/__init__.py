"""LANTERN and LANTERN++ on any accelerator: relaxed speculative decoding of visual AR models.

>>> import lantern_accel
>>> result = lantern_accel.generate("red heart", seed=7)  # doctest: +SKIP
>>> result.images[0].save("heart.png")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lantern_accel._version import __version__ as __version__

if TYPE_CHECKING:
    from lantern_accel.api import generate as generate
    from lantern_accel.api import load as load
    from lantern_accel.device.backend import Backend as Backend
    from lantern_accel.device.hookspecs import hookimpl as hookimpl
    from lantern_accel.device.plugins import devices_report as devices_report
    from lantern_accel.device.spec import BackendSpec as BackendSpec
    from lantern_accel.errors import BackendError as BackendError
    from lantern_accel.errors import CheckpointError as CheckpointError
    from lantern_accel.errors import DataError as DataError
    from lantern_accel.errors import LanternError as LanternError
    from lantern_accel.errors import LanternWarning as LanternWarning
    from lantern_accel.errors import ModelError as ModelError
    from lantern_accel.errors import RequestError as RequestError
    from lantern_accel.errors import StrategyError as StrategyError
    from lantern_accel.generation.decision import Decision as Decision
    from lantern_accel.generation.pipeline import Pipeline as Pipeline
    from lantern_accel.generation.result import GenerationResult as GenerationResult
    from lantern_accel.generation.result import GenerationStats as GenerationStats
    from lantern_accel.strategy.values import Sampling as Sampling
    from lantern_accel.strategy.values import Strategy as Strategy

#: The public names of each module that they come from: a name is imported when it is first used.
_HOMES = {
    "api": "generate load",
    "device.backend": "Backend",
    "device.hookspecs": "hookimpl",
    "device.plugins": "devices_report",
    "device.spec": "BackendSpec",
    "errors": "BackendError CheckpointError DataError LanternError LanternWarning ModelError "
    "RequestError StrategyError",
    "generation.decision": "Decision",
    "generation.pipeline": "Pipeline",
    "generation.result": "GenerationResult GenerationStats",
    "strategy.values": "Sampling Strategy",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'lantern_accel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lantern_accel.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
