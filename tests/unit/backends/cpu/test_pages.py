"""Huge pages: who gets them, that memory goes when tensors die, and that nothing needs them."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import native
from support.growth import growth, measurable
from support.processes import passes
from torch import Tensor

from lantern_accel.device.plugins import open_backend
from lantern_accel.memory.footprint import LiveBytes
from lantern_accel.nn.rounding import ROUNDINGS, round_weight
from lantern_accel_cpu import pages

MB = 2**20


def huge_bytes(tensor: Tensor) -> int:
    """Return the bytes in huge pages of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def kernel_gives() -> bool:
    """Return whether this kernel gives huge pages to memory that asks for them."""
    if not pages._has_huge_pages() or not Path("/proc/self/smaps").exists():
        return False
    memory = mmap.mmap(-1, 8 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return huge_bytes(torch.frombuffer(memory, dtype=torch.uint8).fill_(1)) > 0


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pages.VARIABLE, raising=False)
    monkeypatch.setattr(pages, "_current", None)


linux = pytest.mark.skipif(not pages._has_huge_pages(), reason="no huge pages of 2 MB here")


@linux
def test_tensors_lie_in_huge_pages_where_the_kernel_gives_them() -> None:
    if not kernel_gives():
        pytest.skip("this kernel gives no huge pages")
    made = [pages.zeros((3 * MB,), torch.uint8).fill_(1) for _ in range(4)]
    assert huge_bytes(made[0]) >= 12 * MB, "4 x 3 MB fill six pages"


@linux
@native.needs_native
def test_packed_weights_and_caches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = native.draw(0, 512, 512)
    found: list[int] = []
    take = pages._memory

    def counted(nbytes: int) -> memoryview | None:
        found.append(nbytes)
        return take(nbytes)

    monkeypatch.setattr(pages, "_memory", counted)
    with open_backend("cpu") as backend:
        for dtype in (torch.float32, torch.bfloat16):
            backend.pack(weight.to(dtype))
            assert found.pop() >= 512 * 512 * dtype.itemsize
        for name in ("int8", "int6", "int4"):
            whole = ROUNDINGS[name]
            assert backend.pack(round_weight(weight, whole)).nbytes == found.pop()
            fewer = backend.pack(weight, whole)
            assert fewer is not None and fewer.nbytes == found.pop()
        layout = backend.kv_layout(3, 2, 256, 8, 64, torch.bfloat16)
        found.clear()
        cache = backend.allocate(layout)
    assert sum(found) == layout.nbytes == sum(side.nbytes for side in cache.buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_neighbours_keep_apart_and_what_is_new_is_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAPPING", 2 * MB)
    sizes = [pages.LEAST, 70_001, 3 * MB + 5, 4096 * 33, 1, 999_999]
    kept: list[Tensor] = []
    for turn in range(3):
        made = [pages.zeros((n // dtype.itemsize + 1, 1), dtype) for n in sizes]
        assert not any(one.any() for one in made)
        for number, one in enumerate(made):
            assert one.data_ptr() % 64 == 0
            one.fill_(7 * turn + number)
        kept += made[turn::2]
        del made, one
    wanted = [7 * turn + number for turn in range(3) for number in range(turn, len(sizes), 2)]
    assert [{*one.flatten().tolist()} for one in kept] == [{number} for number in wanted]


@pytest.mark.long
@linux
@measurable
def test_memory_goes_when_tensors_die() -> None:
    setup = (
        "import torch; from lantern_accel_cpu import pages\n"
        "kept = [pages.zeros((80_000,), torch.uint8).fill_(1)]\n"
    )
    taken = (
        "made = [pages.zeros((5_000_000,), torch.uint8).fill_(1) for _ in range(8)]\n"
        "kept.append(pages.zeros((80_000,), torch.uint8).fill_(1))\n"
    )
    dropped = "del made; now = resident('VmRSS') - before\nassert now < 3 * 2**20, now\n"
    most = growth(setup, 3 * (taken + dropped))
    assert 36e6 < most < 40e6 + 6 * MB, "small ones stay, and the last page is only partly used"


@linux
def test_addresses_go_with_the_last_tensor() -> None:
    big = pages.zeros((pages.MAPPING + MB,), torch.uint8)
    view, at = big[-10:], big.data_ptr()
    del big
    gc.collect()
    assert view.sum() == 0
    pages._current = None
    del view
    held = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.M)
    assert not any(int(first, 16) <= at < int(end, 16) for first, end in held)


def test_a_tensor_is_copied_and_pickled_as_any_other() -> None:
    made = pages.zeros((300, 200), torch.bfloat16)
    made.copy_(native.draw(1, 300, 200))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.data_ptr() != made.data_ptr()
        assert torch.equal(other, made)


@pytest.mark.parametrize("why", ["off", "no huge pages", "no addresses", "advice refused"])
def test_without_huge_pages_there_is_memory_all_the_same(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("refused")

    if why == "off":
        monkeypatch.setenv(pages.VARIABLE, "0")
        monkeypatch.setattr(pages, "_memory", refuse)
    elif why == "no huge pages":
        monkeypatch.setattr(pages, "_has_huge_pages", lambda: False)
        monkeypatch.setattr(pages, "_memory", refuse)
    elif why == "no addresses":
        monkeypatch.setattr(pages, "_Mapping", refuse)
    else:

        class Memory(mmap.mmap):
            madvise = refuse

        monkeypatch.setattr(mmap, "mmap", Memory)
    made = pages.zeros((3, MB), torch.float32)
    assert made.shape == (3, MB) and made.is_contiguous()
    assert made.add_(1).sum() == 3 * MB


@pytest.mark.parametrize("told", ["16777216", "none", None])
def test_a_kernel_with_other_pages_or_none_is_not_asked(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hpage_pmd_size"
    if told is not None:
        file.write_text(told)
    monkeypatch.setattr(pages, "SIZE_FILE", file)
    assert not pages._has_huge_pages.__wrapped__()


def test_a_mode_that_counts_tensors_counts_these() -> None:
    with LiveBytes() as live:
        made = pages.zeros((MB,), torch.float32)
    assert live.peak == made.nbytes


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_fork_takes_and_frees_memory_of_its_own() -> None:
    script = """
import os, threading, torch
from lantern_accel_cpu import pages
shared = pages.zeros((3_000_000,), torch.uint8).fill_(1)
pages._lock.acquire()  # as a thread of the parent would have it
child = os.fork()
if child == 0:
    assert shared.sum() == 3_000_000
    shared.fill_(2)
    del shared
    mine = pages.zeros((3_000_000,), torch.uint8)
    os._exit(int(mine.fill_(3).sum() != 9_000_000))
pages._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert shared.sum() == 3_000_000
"""
    call = [sys.executable, "-W", "ignore", "-c", script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    passes(subprocess.run(call, env=environ, capture_output=True, text=True, timeout=120))
