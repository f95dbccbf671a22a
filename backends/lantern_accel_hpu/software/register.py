"""Registering the software HPU with torch: the device, ``torch.hpu`` and the compiler."""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch

from lantern_accel.errors import BackendError
from lantern_accel_hpu import environment


@functools.cache
def register() -> ModuleType:
    """Load the compiled device into torch, once a process, and return its ``torch.hpu``.

    A process has one ``hpu``: raises BackendError where Habana's bridge is registered already.
    """
    if "hpu" in vars(torch):
        raise BackendError(
            "this process already has a device 'hpu' (Habana's bridge), so the software HPU cannot "
            "take its name; unset LANTERN_HPU_SOFTWARE, or run where the bridge is not installed"
        )
    from lantern_accel_hpu.software import build, config

    if config.RELEASE == "1.24" and (wrong := environment.unfit_recipes(os.environ)):
        raise BackendError(
            f"[Config Error] {environment.RECIPES}: {wrong}"
        )  # there it ends the process
    torch.ops.load_library(build.library())  # type: ignore[no-untyped-call]
    from lantern_accel_hpu.software import dynamo, floats, hpu

    torch._register_device_module("hpu", hpu)  # type: ignore[no-untyped-call]
    hpu.set_memory_limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    dynamo.register()
    floats.define()
    return hpu
