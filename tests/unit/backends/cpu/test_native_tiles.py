"""Products and attention by tiles: bits of vectors, of emulated tiles, of what Intel's manual says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from types import FrameType, SimpleNamespace

import pytest
import torch
from support import native
from torch import Tensor

from lantern_accel_cpu.native import build, library
from lantern_accel_cpu.native.kernels import Kernels, Panels
from lantern_accel_cpu.native.rounded import RoundedPanels

#: Units with tiles that this processor runs: the emulated ones on all with AVX2, in the long tier.
TILES = [unit for unit in native.units() if unit.startswith("amx")]
UNITS = [n if n == "amx" else pytest.param(n, marks=pytest.mark.long) for n in TILES]
pytestmark = [
    native.needs_native,
    pytest.mark.skipif(not TILES, reason="this processor has neither tiles nor AVX2"),
]

ROWS = [1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 48, 64, 97, 128]
#: In and out: no tile's and no panel's multiple, less than a tile, several pieces.
SIZES = [(64, 32), (33, 40), (67, 33), (7, 5), (130, 70), (320, 64), (1027, 35)]
VECTORS = 1000  # more rows than any product here has
#: Of inputs and weights whose products and sums leave the normal numbers.
SCALES = [1e-38, 1e-19, 1e-17, 1e19]


def product(kernels: Kernels, x: Tensor, weight: Panels | RoundedPanels, border: int) -> Tensor:
    """Return the sums of a product, by tiles from so many rows on."""
    kernels.library.tiles_from(border)
    try:
        return kernels.linear(x, weight, None, sums=True)
    finally:
        kernels.library.tiles_from(0)


def manual(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as TDPBF16PS does: of every 32 inputs a chain of the even and one of the odd ones."""
    rows, inputs = x.shape
    found = torch.zeros(rows, len(weight))
    for first in range(0, inputs, 32):
        sums = torch.zeros(2, rows, len(weight))
        for i in range(first, min(first + 32, inputs)):
            # Exact in float64; one rounding to float32 is the multiply-add's.
            exact = x[:, i : i + 1].double() * weight[:, i].double() + sums[i % 2].double()
            sums[i % 2] = exact.float()
        found += sums[0] + sums[1]
    return found


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_tiles_compute_what_the_manual_says(unit: str, inputs: int, outputs: int) -> None:
    kernels = native.kernels(unit)
    weight = native.draw(1, outputs, inputs, dtype=torch.bfloat16)
    x = native.draw(2, 37, inputs, dtype=torch.bfloat16)
    want, kept = manual(x, weight), native.kept(kernels, weight, "full")
    for border in (1, VECTORS):
        assert torch.equal(product(kernels, x, kept, border), want)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", native.KINDS)
def test_tiles_have_the_bits_of_vectors_for_any_number_of_rows(unit: str, kind: str) -> None:
    kernels = native.kernels(unit)
    for inputs, outputs in SIZES:
        weight = native.draw(1, outputs, inputs, dtype=torch.bfloat16)
        kept = native.kept(kernels, weight, kind)
        x = native.draw(2, max(ROWS), inputs, dtype=torch.bfloat16)
        whole = product(kernels, x, kept, VECTORS)
        for rows in ROWS:
            assert torch.equal(product(kernels, x[:rows], kept, 1), whole[:rows]), (inputs, rows)
        assert torch.equal(product(kernels, x[:7], kept, 0), whole[:7]), "the measured border"


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("scale", SCALES)
def test_tiles_have_the_bits_of_vectors_outside_of_normal_numbers(unit: str, scale: float) -> None:
    kernels = native.kernels(unit)
    kept = native.kept(kernels, (native.draw(1, 70, 330) * scale).bfloat16(), "full")
    x = (native.draw(2, 50, 330) * scale).bfloat16()
    found = [product(kernels, x, kept, border) for border in (1, VECTORS)]
    assert torch.equal(*(one.nan_to_num(nan=2.0) for one in found))


@pytest.mark.long
@pytest.mark.skipif(len(TILES) < 2, reason="this processor has no tiles, or they are refused")
@pytest.mark.parametrize("kind", native.KINDS)
def test_the_processor_does_what_is_emulated(kind: str) -> None:
    both = [native.kernels(unit) for unit in TILES]
    # Full weights take numbers below the normal ones for 0, too.
    for scale in (1.0, *SCALES[0 if kind == "full" else 1 :]):
        weight = (native.draw(1, 70, 330) * scale).bfloat16()
        x = (native.draw(2, 50, 330) * scale).bfloat16()
        found = [product(kernels, x, native.kept(kernels, weight, kind), 1) for kernels in both]
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32)), scale


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("width", [32, 64, 96])
def test_attention_depends_on_no_other_query(unit: str, width: int) -> None:
    kernels, rows, count, capacity = native.kernels(unit), 2, 20, 90
    kv = native.filled_cache(1, rows, capacity, 2, width, torch.bfloat16)
    seen = torch.ones(rows, 1, count, capacity, dtype=torch.bool).tril(capacity - count - 10)
    seen[0, :, :, [3, 40]] = False  # slots that no query sees
    seen[1, :, 6, 7] = False  # and one that a query does not see among those that it sees
    seen[1, :, 9] = False  # and a query that sees none
    q = native.draw(5, rows, count, 2, width, dtype=torch.bfloat16)
    whole = kernels.attend(q, kv, 0, seen)
    assert not whole[1, 9].any() and whole[1, 8].all()
    for some in (1, 2, 3, 4, 7, 16, 17):
        alone = kernels.attend(q[:, :some].contiguous(), kv, 0, seen[:, :, :some].contiguous())
        assert torch.equal(alone, whole[:, :some]), some


@pytest.mark.parametrize("unit", UNITS)
def test_signals_and_threads_change_no_bit(unit: str) -> None:
    kernels = native.kernels(unit)
    kept = native.kept(kernels, native.draw(1, 512, 768, dtype=torch.bfloat16), "full")
    x = native.draw(2, 33, 768, dtype=torch.bfloat16)
    want, seen = product(kernels, x, kept, VECTORS), 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        torch.ones(64, 64) @ torch.ones(64, 64)  # vectors, and perhaps tiles, of its own

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        with native.threads(2):
            while seen < 20:
                assert torch.equal(product(kernels, x, kept, 1), want)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("unit", UNITS)
def test_small_numbers_are_what_they_were_outside_of_products(unit: str) -> None:
    """Vectors take them for 0 inside, as tiles do; the caller's arithmetic is left as it was."""
    kernels = native.kernels(unit)
    kept = native.kept(kernels, torch.ones(32, 64, dtype=torch.bfloat16), "full")
    for border in (1, VECTORS):
        product(kernels, torch.ones(3, 64, dtype=torch.bfloat16), kept, border)
        assert float(torch.tensor(1e-39) * 1) != 0


def test_a_kernel_that_refuses_is_named_and_the_next_unit_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = build.UNITS["x86_64"]
    if build.family() != "x86_64":
        pytest.skip("another processor family")
    monkeypatch.delenv(build.UNIT_VARIABLE, raising=False)
    monkeypatch.setattr(build, "_features", lambda: known["amx"].needs)
    monkeypatch.setattr(build, "PREBUILT", build.HERE / "none.so")
    monkeypatch.setattr(build, "target", lambda units: build.HERE / "build.py")  # it is there
    for error, unit in ((0, "amx"), (errno.EPERM, "avx512bf16")):
        monkeypatch.setattr(build, "ask_for_tiles", lambda error=error: error)
        assert build.chosen_units() == [unit]
        told = library.describe()
        assert f"({unit}: " in told
        assert (os.strerror(errno.EPERM) in told) == bool(error)
    monkeypatch.setattr(build, "_features", lambda: known["avx2"].needs)
    assert build.chosen_units() == ["avx2"] and not build.refused_tiles(), "none to refuse"


def test_linux_is_asked_and_its_error_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    libc = SimpleNamespace(syscall=lambda *call: asked.append(call) or -len(asked))
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: libc)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.ENOSPC)
    assert build.ask_for_tiles.__wrapped__() == errno.ENOSPC
    assert asked == [(158, 0x1023, 18)]
    libc.syscall = lambda *call: 0
    assert build.ask_for_tiles.__wrapped__() == 0


@pytest.mark.long
@pytest.mark.skipif("amx" not in TILES, reason="this processor has no tiles, or they are refused")
def test_a_forked_child_has_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, torch
from lantern_accel_cpu.native import library
from lantern_accel_cpu.native.kernels import Kernels
kernels = Kernels(library.load())
weight = kernels.pack(torch.randn(64, 64).bfloat16())
x = torch.randn(32, 64).bfloat16()
assert kernels.library.tiles_from(1) == 1
want = kernels.linear(x, weight, None)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(kernels.linear(x, weight, None), want) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    monkeypatch.setenv(build.UNIT_VARIABLE, "amx")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
