"""The interface of devices: everything that a backend's author imports.

``from lantern_accel.device import Backend, BackendSpec, Probe, hookimpl``. A name loads its module when
it is first asked for, so that a plug-in which only presents itself does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lantern_accel.device.backend import CAPABILITIES as CAPABILITIES
    from lantern_accel.device.backend import Backend as Backend
    from lantern_accel.device.backend import Conformance as Conformance
    from lantern_accel.device.backend import DeviceConditions as DeviceConditions
    from lantern_accel.device.backend import DeviceFacts as DeviceFacts
    from lantern_accel.device.backend import DTypePolicy as DTypePolicy
    from lantern_accel.device.backend import MemoryUse as MemoryUse
    from lantern_accel.device.backend import OperatorRule as OperatorRule
    from lantern_accel.device.backend import Stopwatch as Stopwatch
    from lantern_accel.device.backend import Support as Support
    from lantern_accel.device.capture import KINDS as KINDS
    from lantern_accel.device.capture import HostCopy as HostCopy
    from lantern_accel.device.capture import Replay as Replay
    from lantern_accel.device.capture import buffers_of as buffers_of
    from lantern_accel.device.hookspecs import hookimpl as hookimpl
    from lantern_accel.device.kv_cache import KVCache as KVCache
    from lantern_accel.device.kv_cache import KVLayout as KVLayout
    from lantern_accel.device.operations import TensorOps as TensorOps
    from lantern_accel.device.packed import Packed as Packed
    from lantern_accel.device.plan import PLAN_VERSION as PLAN_VERSION
    from lantern_accel.device.plan import FusedStep as FusedStep
    from lantern_accel.device.plan import Refused as Refused
    from lantern_accel.device.plan import StepPlan as StepPlan
    from lantern_accel.device.plugins import devices_report as devices_report
    from lantern_accel.device.plugins import open_backend as open_backend
    from lantern_accel.device.preferences import Preferences as Preferences
    from lantern_accel.device.spec import API_VERSION as API_VERSION
    from lantern_accel.device.spec import BackendSpec as BackendSpec
    from lantern_accel.device.spec import Probe as Probe
    from lantern_accel.device.spec import check_options as check_options

#: The names of each module, which is loaded when one of them is first asked for.
_HOMES = {
    "backend": "CAPABILITIES Backend Conformance DeviceConditions DeviceFacts DTypePolicy "
    "MemoryUse OperatorRule Stopwatch Support",
    "capture": "KINDS HostCopy Replay buffers_of",
    "hookspecs": "hookimpl",
    "kv_cache": "KVCache KVLayout",
    "operations": "TensorOps",
    "packed": "Packed",
    "plan": "PLAN_VERSION FusedStep Refused StepPlan",
    "plugins": "devices_report open_backend",
    "preferences": "Preferences",
    "spec": "API_VERSION BackendSpec Probe check_options",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'lantern_accel.device' has no attribute {name!r}")
    module = importlib.import_module(f"lantern_accel.device.{_MODULES[name]}")
    globals()[name] = found = vars(module)[name]
    return found
