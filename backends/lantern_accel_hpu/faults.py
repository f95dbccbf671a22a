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
from lantern_accel_hpu import cards, environment

#: What the driver's status numbers mean for whoever asked for a card.
BUSY = (20, 22, 23, 24, 26)
ABSENT = (8, 16)
#: After these the card, or this process's use of it, is gone.
LOST = (7, 17, 31, 37, 42)
#: There is no memory on the device, or none that the host could map for it.
NO_MEMORY = (3, 4, 14)
LOST_WORDS = ("critical error", "device reset", "device is lost", "device not operational")
#: Words of the bridge's own errors, where it names no status.
PIPELINE_WORDS = ("Habana exception", "KernelRegistry", "is not lowered", "FATAL ERROR :: MODULE")


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


def explain(
    error: BaseException, doing: str, memory: Mapping[str, int] | None = None
) -> BackendError | None:
    """Turn an error of the bridge into one that says what to do; None for any other error.

    ``doing`` continues "while", such as ``"decoding"``; ``memory``: the allocator's figures.
    """
    told = [one for one in chain(error) if isinstance(one, RuntimeError | AssertionError)]
    if isinstance(error, BackendError) or not told:
        return None
    text = " ".join(" ".join(str(one).split()) for one in told)
    code = status(error)
    if "device acquire failed" in text.lower():
        return not_acquired(error)
    if is_lost(error):
        return DeviceLostError(
            f"the Gaudi stopped working while {doing} ({first_line(error)}); the batch in progress is "
            "lost, what was returned or written before is kept; start a new process, and if it "
            "happens again look at hl-smi and at the kernel's log (dmesg, habanalabs)"
        )
    if is_out_of_memory(error):
        size = re.search(r"size::\s*(\d+)", str(told[-1]))
        asked = f" when it asked for {_gib(int(size[1]))}" if size else ""
        return DeviceMemoryError(
            f"the device ran out of memory while {doing}{asked}: {_free(memory or {})}; use a smaller "
            "batch (--batch) or use a smaller tree"
        )
    if is_refusal(error):
        known = f" (synStatus {code})" if code is not None else ""
        return BackendError(
            f"Gaudi's graph compiler refused a graph while {doing}{known}; open the device with the "
            "mode 'eager' (LANTERN_HPU_MODE=eager), with the option fused=false, or with a smaller "
            "batch, and report it with the log that PT_HPU_METRICS_FILE and LOG_LEVEL_ALL=3 write"
        )
    if code is not None or any(word in text for word in PIPELINE_WORDS):
        return BackendError(
            f"Gaudi's software failed while {doing} ({' '.join(first_line(error).split())[:200]}), and "
            "the batch in progress is lost; run it again, with the mode 'eager' (LANTERN_HPU_MODE=eager) "
            "if it happens again, and report it"
        )
    return None


def is_refusal(error: BaseException) -> bool:
    """Return whether Gaudi's graph compiler refused a graph."""
    texts = (str(one).lower() for one in chain(error) if isinstance(one, RuntimeError))
    return any("graph compile failed" in text for text in texts)


def of_the_card(error: BaseException) -> bool:
    """Return whether an error is the card's own (no memory, lost, held by another), not a graph's."""
    if is_lost(error) or is_out_of_memory(error):
        return True
    texts = (str(one).lower() for one in chain(error))
    held = any("device acquire failed" in text for text in texts)
    # 26 is what anything that fails may have; with words about acquiring it means a held card.
    return held or status(error) in set(BUSY + ABSENT) - {26}


def not_lowered(name: str, error: BaseException) -> NotCapturableError:
    """Return the error for a function that this SDK cannot make a graph of, in the SDK's words."""
    said = " ".join(first_line(error).split())[:200]
    return NotCapturableError(
        f"this SDK makes no graph of the {name} ({type(error).__name__}: {said}); report it with the "
        "graphs that PT_HPU_GRAPH_DUMP_MODE=all writes"
    )


def not_recorded(name: str, operators: str, error: BaseException) -> BackendError:
    """Return the error for a capture that failed after it had begun, which lazy mode cannot leave.

    ``operators``: those that fell back to the CPU, if any did. Where torch takes no int32 index, eager
    mode needs newer software.
    """
    said = (
        f"{operators} has no HPU kernel and would run on the CPU"
        if operators
        else first_line(error)
    )
    old = environment.numbers(environment.installed_torch()) < environment.INT32_FROM
    newer = " and Gaudi software 1.23 or newer" if old else ""
    return BackendError(
        f"the {name} cannot be captured as an HPUGraph ({said}), and lazy mode cannot leave a capture "
        f"that failed: start a new process with --option mode=eager (LANTERN_HPU_MODE=eager){newer}"
    )


def not_acquired(error: BaseException, root: Path = Path("/")) -> BackendError:
    """Say why the driver gave this process no card, and which process has it."""
    code = status(error)
    named = os.environ.get("HLS_MODULE_ID") or os.environ.get("HABANA_VISIBLE_MODULES")
    card = f"the Gaudi with module number {named}" if named else "a Gaudi"
    said = f"the driver says: {first_line(error)}"
    if code in ABSENT:
        return BackendError(
            f"there is no free Gaudi for this process ({said}); check with hl-smi that one is listed "
            "and with HABANA_VISIBLE_MODULES and HABANA_VISIBLE_DEVICES that it is not hidden"
        )
    held = holders(root, cards.module(os.environ))
    who = (
        f"; held now by {', '.join(held)}"
        if held
        else "; no process of this container holds it, so look on the host: fuser -v /dev/accel/*"
    )
    return BackendError(
        f"{card} cannot be opened: another process holds it, since a Gaudi serves one process at a "
        f"time ({said}){who}; end that process, or name another card with --device hpu:N"
    )


def held_by_nobody(error: BaseException, root: Path = Path("/")) -> bool:
    """Return whether the driver holds a card back that no process here has: it may be free soon."""
    busy = "device acquire failed" in str(error).lower() and status(error) in BUSY
    return busy and not holders(root, cards.module(os.environ))


def holders(root: Path = Path("/"), module: int | None = None) -> list[str]:
    """Name the processes that have a Gaudi's device node open, as ``python (pid 12)``.

    ``module``: of that module alone, where the driver says which node is which.
    """
    found = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda one: one.name.zfill(12)):
        if process.name == str(os.getpid()):
            continue
        try:
            open_files = [os.readlink(one) for one in (process / "fd").iterdir()]
            nodes = [one for one in open_files if re.search(r"/dev/(accel/accel|hl)\d+$", one)]
            if any(
                None in (module, n := environment.module(node, root)) or n == module
                for node in nodes
            ):
                name = (process / "comm").read_text().strip()
                found.append(f"{name} (pid {process.name})")
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def is_lost(error: BaseException) -> bool:
    """Return whether the card, or this process's use of it, is gone."""
    texts = [str(one).lower() for one in chain(error) if isinstance(one, RuntimeError)]
    if any("graph compile failed" in text or "acquire failed" in text for text in texts):
        return False
    return status(error) in LOST or any(word in text for text in texts for word in LOST_WORDS)


def fallback_nodes(error: BaseException) -> tuple[str, ...]:
    """Return the operators for which ``hpu_backend`` would have left the graph, as it names them.

    It names nodes when it places them (``Node: sort_1 requires fallback: True``), and operators when it
    sums a graph up.
    """
    for one in chain(error):
        if found := re.search(r"Node: (\w+) requires fallback: True", str(one)):
            return (re.sub(r"(_\d+)?$", "", found[1], count=1),)
        if found := re.search(r"Eager fallback in nodes: \[([^\]]*)\]", str(one)):
            nodes = re.findall(r"'[^':]*:(?:torch\.ops\.)?([^']+)'", found[1])
            return tuple(dict.fromkeys(nodes))
    return ()


def left_the_graph(name: str, operators: tuple[str, ...]) -> NotCapturableError:
    """Return the error for operators that ``hpu_backend`` cannot keep in the graph of a step."""
    return NotCapturableError(
        f"the {name} cannot be compiled as one graph: {', '.join(operators)} has no kernel that "
        "hpu_backend takes in this SDK; it would leave the graph for it, and what such a step writes "
        "to its buffers can then be read too early. Use the mode 'eager' (LANTERN_HPU_MODE=eager), "
        "which is correct and slower, and report the operator"
    )


def first_line(error: BaseException) -> str:
    """Return the line of an error's chain that the driver wrote, or else its first line."""
    lines = [line.strip() for one in chain(error) for line in str(one).splitlines()]
    syn = [line for line in lines if "synStatus" in line or "acquire" in line.lower()]
    return (syn or [line for line in lines if line] or [type(error).__name__])[0]


# --- memory -------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is the bridge's refusal to allocate, or was raised from one."""
    texts = (str(one) for one in chain(error) if isinstance(one, RuntimeError))
    words = r"(?i)allocation failed|out of (device |host )?memory|\boom\b"
    return any(re.search(words, text) for text in texts) or status(error) in NO_MEMORY


def cache_too_large(layout: KVLayout, memory: Mapping[str, int]) -> BackendError:
    """Return the error for a cache that does not fit, with the most rows that would."""
    row = layout.nbytes // max(layout.rows, 1)
    fits = min(max(memory["Limit"] - memory["InUse"], 0) // max(row, 1), layout.rows)
    return DeviceMemoryError(
        f"the device has no memory for a key-value cache of {_gib(layout.nbytes)}: {_free(memory)}; at "
        f"most {fits} of its {layout.rows} rows fit (a guided image takes two), so use a "
        "smaller batch (--batch)"
    )


def _free(memory: Mapping[str, int]) -> str:
    if "Limit" not in memory or "InUse" not in memory:
        return "the bridge does not say how much is free"
    return f"{_gib(memory['Limit'] - memory['InUse'])} of {_gib(memory['Limit'])} are free"


def _gib(size: int) -> str:
    return f"{max(size, 0) / 2**30:.2f} GiB"
