"""The hooks that a plug-in implements, one or both: for devices, and for families of models.

A plug-in is a package with an entry point in the group ``lantern_accel``::

    # pyproject.toml
    [project.entry-points.lantern_accel]
    abacus = "lantern_accel_abacus"

that names a module like this one:

>>> import torch
>>> from lantern_accel.device import Backend, BackendSpec, DeviceFacts, Probe
>>> from lantern_accel.device.hookspecs import hookimpl
>>> class Abacus(Backend):
...     name, version = "abacus", "1.0"
...     def facts(self):
...         return DeviceFacts(
...             backend=self.name, device=str(self.device), name="Abacus", torch=torch.__version__
...         )
...     def synchronize(self):
...         pass
>>> class Spec(BackendSpec):
...     name, summary, api_version = "abacus", "wooden beads", 1
...     def probe(self):
...         return Probe.of_devices("Abacus, 10 rods")
...     def open(self, index, options):
...         return Abacus(torch.device("cpu"))
>>> @hookimpl
... def lantern_accel_backends():
...     return [Spec()]
>>> [spec.probe().devices for spec in lantern_accel_backends()]
[('Abacus, 10 rods',)]

In a package of its own, put ``Backend`` in a second module that ``open`` imports, so that listing
devices imports no SDK. A family of models is written in the same way; docs/models.md does it from an
empty folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from lantern_accel.device.spec import BackendSpec

PROJECT = "lantern_accel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plug-in module as an implementation of a hook of the same name."""


@hookspec
def lantern_accel_backends() -> list[BackendSpec]:
    """Return the backends of this plug-in; cheap, imports no vendor SDK."""
    raise NotImplementedError  # pluggy reads the signature and never calls a specification


@hookspec
def lantern_accel_families() -> Sequence[object]:
    """Return a FamilySpec (:mod:`lantern_accel.families.spec`) for each family of this plug-in.

    Cheap: it imports neither torch nor the family.
    """
    raise NotImplementedError
