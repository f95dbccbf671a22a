"""Gaudi before it is opened."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel.errors import BackendError
from lantern_accel_hpu import cards, environment

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


class Spec(BackendSpec):
    """Intel Gaudi, which torch drives as ``hpu`` through Habana's bridge."""

    name = "hpu"
    summary = "Intel Gaudi accelerators"
    api_version = 1
    scheduled_as = "HPU"
    also_known_as = ("gaudi", "gaudi2", "gaudi3", "habana")

    def __init__(self, settings: environment.Settings | None = None) -> None:
        self.settings = settings or environment.Settings()

    @property
    def priority(self) -> int:  # type: ignore[override]  # here it depends on the environment
        """Ahead of other devices; never automatic where it would be the software HPU."""
        try:
            return -1 if self.settings.is_software(os.environ) else 30
        except BackendError:  # the variable cannot be read: opening the device refuses it
            return -1

    @property
    def variants(self) -> tuple[Mapping[str, Any], ...]:  # type: ignore[override]  # as above
        """The default, the other of graph and compile where it can be had, and plain operators."""
        graph = environment.usual() == "graph"
        able = graph or environment.own_build(environment.installed_torch())
        other = {"mode": "compile" if graph else "graph"}
        return ({}, *([other] if able else []), {"fused": "false"})

    def configure(self, options: Mapping[str, Any]) -> Spec:
        """Return the specification with ``mode``, ``fused`` and ``software`` set from the options."""
        return Spec(environment.Settings.read(options)) if options else self

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Choose the bridge's mode: what this software's own code decodes in, or what is asked for.

        The bridge reads the variable when it is loaded, which may be while torch is imported.
        """
        environment.prepare(self.settings, environ)

    def processes(self, index: int) -> Sequence[Mapping[str, str]]:
        """One a module: a Gaudi serves one process at a time."""
        from lantern_accel_hpu import faults

        if self.settings.is_software(os.environ):
            from lantern_accel_hpu.software import modules

            known: Sequence[int | None] = range(modules())
        else:
            nodes = [found.rpartition(" ")[2] for found in environment.devices()]
            known = [environment.module(node) for node in nodes]
        return cards.places(
            index, os.environ, known, held=lambda module: faults.holders(module=module)
        )

    def probe(self) -> Probe:
        """Look for the SDK, a card, the torch that the SDK needs, and the mode; import none of them."""
        if self.settings.is_software(os.environ):
            if importlib.util.find_spec("lantern_accel_hpu.software") is None:
                return Probe.missing(
                    "the software HPU is not part of the installed package",
                    "run it from a checkout of the project, after `pip install -e .` there",
                )
            from lantern_accel_hpu import software

            lacks = software.missing()
            if lacks:
                return Probe.missing(lacks, "install g++ (or leave out the software HPU)")
            return Probe.of_devices("software HPU (no Gaudi: for correctness, not for speed)")
        sdk = environment.sdk_folder()
        if sdk is None:
            return Probe.missing(
                "habana_frameworks is not installed",
                "install it by working in Intel's Gaudi PyTorch Docker image, which has "
                "torch and habana-torch-plugin",
            )
        devices = environment.devices()
        if not devices:
            return Probe.missing(
                "habana_frameworks is installed but the driver shows no Gaudi",
                "check that hl-smi lists one and that the container was started with "
                "--runtime=habana and HABANA_VISIBLE_DEVICES=all",
            )
        needs, has = environment.required_torch(sdk), environment.installed_torch()
        if needs and has and environment.numbers(needs) != environment.numbers(has):
            return Probe.missing(
                f"habana_frameworks was built for torch {needs}, and torch {has} is installed",
                "install both from one Gaudi image; never upgrade torch there",
            )
        return environment.conflict(self.settings, os.environ) or Probe.of_devices(*devices)

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Choose and acquire Gaudi ``index``; options as :meth:`configured` takes them.

        Whichever it is, torch knows it as ``hpu:0``. Raises BackendError where it is busy or gone.
        """
        from lantern_accel_hpu.backend import DeviceBackend
        from lantern_accel_hpu.bridge import Bridge

        settings = environment.Settings.read(options) if options else self.settings
        software = settings.is_software(os.environ)
        # Before the bridge is loaded.
        shown = None if software else len(environment.devices())
        module = cards.choose(index, os.environ, shown)
        try:
            from_sdk = not software
            bridge = Bridge.from_sdk(fused=settings.fused) if from_sdk else Bridge.from_software()
            backend = DeviceBackend(bridge, environment.runner(settings, os.environ), module)
            backend.capture_asked = settings.get_mode(os.environ) in ("compile", "graph")
            return backend
        except BackendError:
            if not cards.has_card():
                cards.give_back(os.environ)
            raise
