"""Explains errors of the bridge, and names the way out, in one sentence each.

Texts: habana_frameworks 1.19 (``device.cpp``, ``graph.cpp``, ``passes.py``) and reports of its users.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lantern_accel.device.kv_cache import KVLayout
from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    NotCapturableError,
)
from lantern_accel.records import format_bytes
from lantern_accel_hpu import cards, environment

#: What the driver's status numbers mean for whoever asked for a card.
BUSY = (20, 22, 23, 24, 26)
ABSENT = (8, 16)
#: After these the card, or this process's use of it, is gone.
LOST = (7, 17, 31, 37, 42)
#: There is no memory on the device, or none that the host could map for it.
NO_MEMORY = (3, 4, 14)
LOST_WORDS = ("critical error", "device reset", "device is lost", "device not operational")
MEMORY_WORDS = r"allocation failed|out of (device |host )?memory|\boom\b"
#: Words of the bridge's own errors, where it names no status.
PIPELINE_WORDS = ("habana exception", "kernelregistry", "is not lowered", "fatal error :: module")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from or while handling, the innermost last."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def status(error: BaseException) -> int | None:
    """Return the driver's status (``synStatus=26``, ``synStatus 26``) in an error's chain."""
    for one in chain(error):
        if found := re.search(r"synStatus\s*[= ]\s*(?:synStatus\s+)?(\d+)", str(one)):
            return int(found[1])
    return None


def kind_of(error: BaseException) -> str:
    """Return what failed: "held", "absent", "lost", "memory", "refused", "busy" or "software".

    "" is for any error that is not the bridge's.
    """
    told = [str(one) for one in chain(error) if isinstance(one, RuntimeError | AssertionError)]
    text, code = " ".join(told).lower(), status(error)
    refused = "graph compile failed" in text
    if not told:
        return ""
    if "device acquire failed" in text:
        return "absent" if code in ABSENT else "held"
    if not refused and (code in LOST or any(word in text for word in LOST_WORDS)):
        return "lost"
    if code in NO_MEMORY or re.search(MEMORY_WORDS, text):
        return "memory"
    # 26 is what anything that fails may have; with words about acquiring it means a held card.
    if code in {*BUSY, *ABSENT} - {26}:
        return "busy"
    if refused:
        return "refused"
    return "software" if code is not None or any(word in text for word in PIPELINE_WORDS) else ""


def of_the_card(error: BaseException) -> bool:
    """Return whether an error is the card's own (no memory, lost, held by another), not a graph's."""
    return kind_of(error) in ("held", "absent", "lost", "memory", "busy")


def explain(
    error: BaseException, doing: str, memory: Mapping[str, int] | None = None
) -> BackendError | None:
    """Turn an error of the bridge into one that says what to do; None for any other error.

    ``doing`` continues "while", such as ``"decoding"``; ``memory``: the allocator's figures.
    """
    kind = "" if isinstance(error, BackendError) else kind_of(error)
    if not kind:
        return None
    said = f"while {doing} ({first_line(error)})"
    if kind in ("held", "absent"):
        return not_acquired(error)
    if kind == "lost":
        return DeviceLostError(
            f"the Gaudi stopped working {said}; the batch in progress is lost, what was returned or "
            "written before is kept; start a new process, and if it happens again look at hl-smi and at "
            "the kernel's log (dmesg, habanalabs)"
        )
    if kind == "memory":
        return DeviceMemoryError(
            f"the device ran out of memory {said}{f': {_free(memory)}' if memory else ''}; use a smaller "
            "batch (--batch) or a smaller tree"
        )
    if kind == "refused":
        return BackendError(
            f"Gaudi's graph compiler refused a graph {said}; open the device with the mode 'eager' "
            "(LANTERN_HPU_MODE=eager), with the option fused=false, or with a smaller batch, and report "
            "it with the log that PT_HPU_METRICS_FILE and LOG_LEVEL_ALL=3 write"
        )
    return BackendError(
        f"Gaudi's software failed {said}, and the batch in progress is lost; run it again, with the mode "
        "'eager' (LANTERN_HPU_MODE=eager) if it happens again, and report it"
    )


def not_capturable(name: str, error: BaseException | str) -> NotCapturableError:
    """Return the error for a function that no graph can be made of: the reason, or the SDK's words."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return NotCapturableError(
        f"no graph can be made of the {name} ({' '.join(said.split())[:240]}); the mode 'eager' "
        "(LANTERN_HPU_MODE=eager) is correct and slower; report it with the graphs that "
        "PT_HPU_GRAPH_DUMP_MODE=all writes"
    )


def not_recorded(name: str, said: str) -> BackendError:
    """Return the error for a capture that failed after it had begun, which lazy mode cannot leave."""
    return BackendError(
        f"the {name} cannot be captured as an HPUGraph ({said}), and lazy mode cannot leave a capture "
        "that failed: start a new process with --option mode=eager (LANTERN_HPU_MODE=eager)"
    )


def not_acquired(error: BaseException, root: Path = Path("/")) -> BackendError:
    """Say why the driver gave this process no card, and which process has it."""
    named = os.environ.get("HLS_MODULE_ID") or os.environ.get("HABANA_VISIBLE_MODULES")
    card = f"the Gaudi with module number {named}" if named else "a Gaudi"
    said = f"the driver says: {first_line(error)}"
    if status(error) in ABSENT:
        return BackendError(
            f"there is no free Gaudi for this process ({said}); check with hl-smi that one is listed "
            "and with HABANA_VISIBLE_MODULES and HABANA_VISIBLE_DEVICES that it is not hidden"
        )
    held = holders(cards.module(os.environ), root)
    who = (
        f"; held now by {', '.join(held)}"
        if held
        else "; no process of this container holds it, so look on the host: fuser -v /dev/accel/*"
    )
    return BackendError(
        f"{card} cannot be opened: another process holds it, since a Gaudi serves one process at a "
        f"time ({said}){who}; end that process, or name another card with --device hpu:N"
    )


def holders(module: int | None = None, root: Path = Path("/")) -> list[str]:
    """Name the processes that have a Gaudi's device node open, as ``python (pid 12)``.

    ``module``: of that module alone, where the driver says which node is which.
    """
    found = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda one: one.name.zfill(12)):
        try:
            open_files = [os.readlink(one) for one in (process / "fd").iterdir()]
            nodes = [one for one in open_files if re.search(r"/dev/accel/accel\d+$", one)]
            numbers = {environment.module(node, root) for node in nodes}
            if process.name == str(os.getpid()) or not nodes:
                continue
            if module is None or numbers & {None, module}:
                found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name})")
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def first_line(error: BaseException) -> str:
    """Return the driver's line in an error's chain, else the first line of the innermost error."""
    lines = [line.strip() for one in [*chain(error)][::-1] for line in str(one).splitlines()]
    syn = [line for line in lines if "synStatus" in line or "acquire" in line.lower()]
    return (syn or [line for line in lines if line] or [type(error).__name__])[0][:200]


def cache_too_large(layout: KVLayout, memory: Mapping[str, int]) -> BackendError:
    """Return the error for a cache that does not fit, with the most rows that would."""
    row = layout.nbytes // max(layout.rows, 1)
    fits = min(max(memory["Limit"] - memory["InUse"], 0) // max(row, 1), layout.rows)
    return DeviceMemoryError(
        f"the device has no memory for a key-value cache of {format_bytes(layout.nbytes)}: "
        f"{_free(memory)}; at most {fits} of its {layout.rows} rows fit (a guided image takes two), so "
        "use a smaller batch (--batch)"
    )


def _free(memory: Mapping[str, int]) -> str:
    free, limit = max(memory["Limit"] - memory["InUse"], 0), memory["Limit"]
    return f"{format_bytes(free)} of {format_bytes(limit)} are free"
