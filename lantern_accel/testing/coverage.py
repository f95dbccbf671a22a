"""Lists the methods of the backend interface that a backend implements, and the reference's."""

from __future__ import annotations

from typing import Literal

from lantern_accel.device.backend import Backend
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.spec import BackendSpec
from lantern_accel.records import Record

RECOMMENDED = {
    "priority": "0, like the CPU's: `auto` then takes the first by name",
    "compute_dtypes": "float32 only: twice the bytes of bfloat16",
    "support": "capture is answered with no",
    "operators": "None: every operator is believed to have a kernel",
    "checks": "no checks of your own kernels",
    "capture": "eager: Python dispatches thousands of operators per step",
    "explain": "the vendor's own error reaches the user",
    "memory": "unknown: a request that does not fit is found out by failing",
    "reset_peak_memory": "no new peak: peaks are those of the whole process",
    "counters": "none: nothing shows that replay recompiles",
    "close": "nothing is given back",
    "host_copy": "a blocking copy per read: the device waits for the host",
    "attend": "`scaled_dot_product_attention` over the whole cache, empty slots included",
}
"""Members that have a reference, and what it hides or costs; docs/porting.md lists every member."""

#: What has no reference, and what a backend does not write.
REQUIRED = (
    "name",
    "summary",
    "version",
    "api_version",
    "device",
    "probe",
    "open",
    "facts",
    "synchronize",
)
NOT_OVERRIDDEN = ("listen", "listener")


class Member(Record):
    """A member of the backend interface, and whose it is."""

    name: str
    level: Literal["recommended", "optional"]
    written: bool
    reference: str = ""


def members(backend: Backend, spec: BackendSpec | None = None) -> list[Member]:
    """Return every member that has a reference, the recommended ones first."""
    owners: list[tuple[object, type]] = [(backend, Backend), (backend, TensorOps)]
    if spec is not None:
        owners.insert(0, (spec, BackendSpec))
    found = []
    for one, kind in owners:
        known = {*vars(kind), *vars(kind).get("__annotations__", {})}
        for name in sorted(known):
            if name.startswith("_") or name in REQUIRED or name in NOT_OVERRIDDEN:
                continue
            made = name in vars(one) or getattr(type(one), name) is not getattr(kind, name)
            found.append(
                Member(
                    name=name,
                    level="recommended" if name in RECOMMENDED else "optional",
                    written=made,
                    reference=RECOMMENDED.get(name, ""),
                )
            )
    return sorted(found, key=lambda member: member.level, reverse=True)
