"""The interface of devices: everything that a backend's author imports.

``from lantern_accel.device import Backend, BackendSpec, Probe, hookimpl``. A name loads its module when
it is first asked for, so that a plug-in which only presents itself does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lantern_accel.device.backend import (
        CAPABILITIES,
        Backend,
        Conformance,
        DeviceConditions,
        DeviceFacts,
        DTypePolicy,
        MemoryUse,
        OperatorRule,
        Stopwatch,
        Support,
    )
    from lantern_accel.device.capture import KINDS, HostCopy, Replay, buffers_of
    from lantern_accel.device.hookspecs import hookimpl
    from lantern_accel.device.kv_cache import KVCache, KVLayout
    from lantern_accel.device.operations import TensorOps
    from lantern_accel.device.packed import Packed
    from lantern_accel.device.plan import PLAN_VERSION, FusedStep, Refused, StepPlan
    from lantern_accel.device.plugins import devices_report, open_backend
    from lantern_accel.device.preferences import Preferences
    from lantern_accel.device.spec import API_VERSION, BackendSpec, Probe, check_options

#: Modules in the order in which a name is looked for: those without torch first.
_HOMES = (
    "spec", "hookspecs", "plugins", "preferences", "packed", "plan", "capture", "kv_cache",
    "operations", "backend",
)  # fmt: skip

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "KINDS",
    "PLAN_VERSION",
    "Backend",
    "BackendSpec",
    "Conformance",
    "DTypePolicy",
    "DeviceConditions",
    "DeviceFacts",
    "FusedStep",
    "HostCopy",
    "KVCache",
    "KVLayout",
    "MemoryUse",
    "OperatorRule",
    "Packed",
    "Preferences",
    "Probe",
    "Refused",
    "Replay",
    "StepPlan",
    "Stopwatch",
    "Support",
    "TensorOps",
    "buffers_of",
    "check_options",
    "devices_report",
    "hookimpl",
    "open_backend",
]


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        found = vars(importlib.import_module(f"lantern_accel.device.{home}"))
        if name in found:
            globals()[name] = found[name]
            return found[name]
    raise AttributeError(f"module 'lantern_accel.device' has no attribute {name!r}")
