"""Stands in for the settings of ``hpu_backend`` (``dynamo.compile_backend.config``) in software.

Names and defaults are the bridge's; only those that change what a graph computes are here. Two releases
are modelled, 1.19 and, with ``LANTERN_HPU_SOFTWARE_RELEASE=1.24``, 1.24.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lantern_accel.errors import BackendError

RELEASE = os.environ.get("LANTERN_HPU_SOFTWARE_RELEASE", "1.19")
if RELEASE not in ("1.19", "1.24"):
    raise BackendError(
        f"LANTERN_HPU_SOFTWARE_RELEASE is {RELEASE!r}; unset it or choose 1.19 or 1.24, whose compilers "
        "are modelled"
    )
if RELEASE == "1.24":
    #: Every operator that can write in place does, where nobody reads what it overwrites.
    use_generic_reinplacer = True
#: An index_copy that is copied back to its own input becomes index_copy_, and the copy goes.
use_inplace_index_copy = True
#: A write of state goes to the part of a split graph that its value comes from.
reassign_copy_ = True
#: As above, for a copy into a new tensor; it changes no value, and is here for its name.
reassign_full_copy = True


def use_eager_fallback() -> bool:
    """Return whether a graph is left for an operator without a kernel, as the environment says."""
    return os.environ.get("PT_HPU_USE_EAGER_FALLBACK", "1") not in ("0", "off", "no", "false")


SETTINGS = (
    "use_inplace_index_copy",
    "use_generic_reinplacer",
    "reassign_copy_",
    "reassign_full_copy",
)


def settings_of(options: Mapping[str, bool] | None) -> dict[str, bool]:
    """Return the settings with those of one call of torch.compile; raises for one that there is not."""
    found = {name: bool(value) for name, value in globals().items() if name in SETTINGS}
    found["use_eager_fallback"] = use_eager_fallback()
    for name, value in (options or {}).items():
        if name not in found:
            raise AttributeError(f"hpu_backend has no setting {name!r}")
        found[name] = value
    return found
