"""Chooses the Gaudi that this process gets, by the environment, before the first use of one.

A process has one Gaudi, and torch knows it as ``hpu:0`` whichever it is. The driver gives the card of
the module number in HLS_MODULE_ID, else any free one; HABANA_VISIBLE_MODULES lists the modules that may
be used, and while it is set, no other card is given for one that is busy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from lantern_accel.errors import BackendError

VISIBLE, MODULE = "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"

#: The index that this process opened; it keeps the card until it ends.
_taken: list[int] = []
#: What the variables were before they were set here.
_before: dict[str, str | None] = {}


def modules(environ: Mapping[str, str]) -> list[int]:
    """Return the module numbers that HABANA_VISIBLE_MODULES lists; [] where it does not restrict."""
    return [int(word) for word in re.findall(r"\d+", environ.get(VISIBLE, ""))]


def module(environ: Mapping[str, str]) -> int | None:
    """Return the module number of this process's card as the driver will read it; None: any."""
    found = re.findall(r"\d+", environ.get(MODULE, ""))
    if found:
        return int(found[0])
    listed = modules(environ)
    return listed[0] if len(listed) == 1 else None


def choose(index: int, environ: MutableMapping[str, str], shown: int | None = None) -> int | None:
    """Set the variables that make card ``index`` this process's ``hpu:0``; return its module number.

    ``index`` counts the modules that HABANA_VISIBLE_MODULES lists, else it is the module number; for 0
    without either variable the driver chooses a free card (None). ``shown``: the cards of this machine
    or container, where that is known. Raises BackendError for a card that is hidden, and where this
    process has another one already.
    """
    if _taken:
        if _taken[0] != index:
            raise BackendError(
                f"this process has opened hpu:{_taken[0]}, and a process has one Gaudi until it ends; "
                f"open hpu:{index} in a process of its own"
            )
        return module(environ)
    listed, given = modules(environ), re.findall(r"\d+", environ.get(MODULE, ""))
    if listed and index >= len(listed):
        raise BackendError(
            f"there is no hpu:{index}: {VISIBLE}={environ[VISIBLE]} leaves this process hpu:0 to "
            f"hpu:{len(listed) - 1}"
        )
    if shown == 1 and not listed and index:
        raise BackendError(
            f"there is no hpu:{index}: this machine or container shows one Gaudi, which is hpu:0 "
            "whatever its module number is elsewhere"
        )
    if not listed and not given and index == 0:
        _taken[:] = [index]
        return None
    chosen = listed[index] if listed else index
    if given and index and chosen != int(given[0]):
        raise BackendError(
            f"hpu:{index} was asked for, and {MODULE}={given[0]} gives this process another Gaudi; "
            "unset it, or open hpu:0"
        )
    chosen = int(given[0]) if given else chosen  # a launcher sets it for each of its processes
    if has_card() and module(environ) != chosen:
        raise BackendError(
            f"this process used a Gaudi before lantern_accel opened hpu:{index}, and cannot change "
            f"to module {chosen}; set {VISIBLE}={chosen} before Python starts, and open hpu:0"
        )
    _before.update({name: environ.get(name) for name in (VISIBLE, MODULE)})
    environ[VISIBLE] = environ[MODULE] = str(chosen)
    _taken[:] = [index]
    return chosen


def places(
    index: int,
    environ: Mapping[str, str],
    known: Sequence[int | None],
    held: Callable[[int], object],
) -> list[Mapping[str, str]]:
    """Return the environment of each process that may have a card of :func:`choose` at one time.

    ``known``: the module of each card. A process gets a module of its own where the numbers are known,
    which a container counts from 0; else the driver chooses. A module that is ``held`` is left out.
    """
    if index or environ.get(MODULE):
        return [{}]
    numbers = [one for one in known if one is not None]
    listed = modules(environ) or sorted(numbers)
    if not modules(environ) and listed != list(range(len(known))):
        return [{}] * max(len(known), 1)
    free = [one for one in listed if not held(one)] or listed
    return [{VISIBLE: str(one)} for one in free] if len(free) > 1 else [{}]


def give_back(environ: MutableMapping[str, str]) -> None:
    """Undo :func:`choose` for a card that could not be opened, so that another may be tried."""
    _taken.clear()
    while _before:
        name, value = _before.popitem()
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def has_card() -> bool:
    """Return whether the bridge in this process has a card already."""
    hpu = sys.modules.get("habana_frameworks.torch.hpu")
    return hpu is not None and bool(hpu.is_initialized())
