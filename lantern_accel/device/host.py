"""Reads what this process may use of its machine: cores and memory, with the limits of containers.

Linux's control groups nest, and the limits of every group around this process hold: the tightest counts.
Both versions are read, and machines that mix them, where systems mount them: below /sys/fs/cgroup.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

#: Where users say how many threads torch has.
OWN_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: Where the files are read; tests have a folder of their own.
ROOT = Path("/")
#: Page cache that the kernel takes back before a group is out of memory.
_RECLAIMED = ("total_inactive_file", "total_active_file"), ("inactive_file", "active_file")


def cores(root: Path = ROOT) -> int | None:
    """Return how many threads can run at once: cores of this process, or its quota to the nearest one."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS or Windows
    count: int | None = len(affinity(0)) if affinity is not None else os.cpu_count()
    quota = cpu_quota(root)
    if quota is None:
        return count
    most = max(1, math.floor(quota + 0.5))
    return most if count is None else min(count, most)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the cores whose time this process may use, such as 1.5; None without a quota."""
    found = []
    for version, folder in _groups("cpu", root):
        if version == 2:
            quota, period = [*(_text(folder / "cpu.max") or "max").split(), "100000"][:2]
        else:
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that this process can have at most; swap does not count."""
    limits = [limit for _, _, limit in _limits(root)]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return what the groups with a limit leave, what others in them use taken off; None without one."""
    left = []
    for version, folder, limit in _limits(root):
        used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is not None:
            stat = _stat(folder / "memory.stat")
            cache = sum(stat.get(name, 0) for name in _RECLAIMED[version - 1])
            left.append(max(0, limit - max(0, used - cache)))
    return min(left, default=None)


def limit_threads(root: Path = ROOT) -> None:
    """Let torch compute on as many threads as can run at once, unless the user has said how many."""
    import torch

    most = cores(root)
    own = any(name in os.environ for name in OWN_NUMBER)
    if most is not None and not own and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def described_threads(count: int, root: Path = ROOT) -> str:
    """Say how many threads are used, and of a quota that limits them."""
    quota = cpu_quota(root)
    why = "" if quota is None else f" (a quota of {quota:.4g} core{'' if quota == 1 else 's'})"
    return f"{count} thread{'' if count == 1 else 's'}{why}"


# --- control groups -----------------------------------------------------------------------------


def _limits(root: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield the groups with a limit on memory: version, folder, bytes."""
    for version, folder in _groups("memory", root):
        limit = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        whole = (
            _stat(folder / "memory.stat").get("hierarchical_memory_limit") if version == 1 else None
        )
        # The first version writes nearly 2^63 where there is none; the other one "max".
        known = [one for one in (limit, whole) if one is not None and one < 2**60]
        if known:
            yield version, folder, min(known)


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the folders of the groups around this process for a controller, the innermost first."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not (controller in names.split(",") or (number == "0" and not names)):
            continue
        # The folder has all names of its controllers, in any order, and a link for each.
        linked = names and (root / "sys/fs/cgroup" / controller).is_dir()
        top = root / "sys/fs/cgroup" / (controller if linked else names)
        folder = top if ".." in path.split("/") else top / path.strip("/")
        while not folder.is_dir() and folder != top:  # a path of another namespace
            folder = folder.parent
        for group in (folder, *folder.parents):
            yield (1 if names else 2), group
            if group == top:
                break


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path) or ""
    return int(text) if text.isdigit() else None


def _stat(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
