"""The software HPU as a device: its numbers, its memory, its captures, and one card a process."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.processes import Run, passes

from lantern_accel.errors import BackendError

DEVICE = """
import warnings
import pytest, torch
warnings.simplefilter("ignore", DeprecationWarning)  # torch does not want the device to be named
from lantern_accel_hpu.software.register import register
assert register() is register() is torch.hpu
from lantern_accel_hpu.software import hpu, metrics
assert hpu is torch.hpu
device = torch.device("hpu")

# Values are the CPU's, strides too; tensors of the host do not mix in.
a = torch.randn(5, 7)
x = a.to(device)
assert x.device == torch.device("hpu:0")
assert torch.equal((x.t() @ x).cpu(), a.t() @ a)
assert (x.t() * 2).stride() == (a.t() * 2).stride()
assert torch.equal(x.topk(3).indices.cpu(), a.topk(3).indices)
assert torch.equal(torch.arange(3, device=device).cpu(), torch.arange(3))
assert torch.equal(x[x > 0].cpu(), a[a > 0])
y = x.clone()
y.index_copy_(0, torch.tensor([1, 0], device=device), x[:2])
assert torch.equal(y.cpu()[:2], a[[1, 0]])
with pytest.raises(RuntimeError, match="cpu"):
    x + a
with pytest.raises(RuntimeError, match="beside tensors on hpu:0"):
    x.index_select(0, torch.tensor([1]))
with pytest.raises(TypeError, match="hpu"):
    x.numpy()

# Memory is counted and limited; a raised limit lets the same request through.
before = hpu.memory_stats()
held = torch.empty(2**20, dtype=torch.uint8, device=device)
after = hpu.memory_stats()
assert after["InUse"] - before["InUse"] == 2**20
del held
assert hpu.memory_stats()["InUse"] == before["InUse"]
assert hpu.memory_stats()["MaxInUse"] == after["MaxInUse"] >= after["InUse"]
hpu.reset_peak_memory_stats()
assert hpu.memory_stats()["MaxInUse"] == before["InUse"]
total = before["Limit"]
hpu.set_memory_limit(before["InUse"] + 1000)
with pytest.raises(torch.OutOfMemoryError, match="asked for 2000 bytes, 1000 of"):
    torch.empty(2000, dtype=torch.uint8, device=device)
hpu.set_memory_limit(total)
torch.empty(2000, dtype=torch.uint8, device=device)

# What torch composes is counted as what it is made of.
hpu.reset_kernels()
torch.stack([x, x])
assert "aten::cat.out" in hpu.kernels() and "aten::stack" not in hpu.kernels()

# A capture executes; a replay runs on the same tensors; what the host reads cannot be captured.
with torch.inference_mode():
    state, seen = torch.zeros(3, device=device), metrics.graph_compilation.stats()[0][1]
    graph = hpu.HPUGraph()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()
    with hpu.graph(graph):
        assert hpu.HPUGraph._capturing is graph
        state.add_(1)
        double = state * 2
        part = double[1:]
        top = (part + 1).topk(1).values
    assert hpu.HPUGraph._capturing is None
    assert state.tolist() == [1, 1, 1] and top.tolist() == [3]
    address = double.data_ptr()
    graph.replay()
    assert (state.tolist(), double.tolist()) == ([2] * 3, [4] * 3)
    assert (part.tolist(), top.tolist()) == ([4] * 2, [5])
    assert double.data_ptr() == address
    assert metrics.graph_compilation.stats()[0][1] == seen + 1
    faults = [
        (lambda: state.sum().item(), "cpu fallback is not supported during hpu graph capturing"),
        (lambda: state.cpu(), "cpu fallback is not supported during hpu graph capturing"),
        (lambda: state[1:].add_(1), "in-place update of a view"),
        (lambda: hpu.HPUGraph().capture_begin(), "end that capture first"),
    ]
    for fault, message in faults:
        with pytest.raises(RuntimeError, match=message), hpu.graph(hpu.HPUGraph()):
            fault()
        assert hpu.HPUGraph._capturing is None
    with pytest.raises(RuntimeError, match="no capture was begun"):
        hpu.HPUGraph().capture_end()

# A copy that does not block happens when it is waited for, in the order of its stream.
side, event, other = hpu.Stream(), hpu.Event(), hpu.Event()
source, pinned = torch.ones(3, device=device), torch.zeros(3).pin_memory("hpu")
pageable, early = torch.zeros(3), torch.zeros(3).pin_memory("hpu")
assert pinned.is_pinned("hpu") and not pageable.is_pinned("hpu")
early.copy_(source, non_blocking=True)  # on the stream of what follows
with hpu.stream(side):
    assert hpu.current_stream().stream_id == side.stream_id != hpu.default_stream().stream_id
    pinned.copy_(source, non_blocking=True)
    event.record()
    pageable.copy_(source, non_blocking=True)
    other.record()
assert pinned.tolist() == pageable.tolist() == [0] * 3
source.fill_(2)  # nobody waits for the other stream: it may well read this
assert early.tolist() == [1] * 3  # of its own stream a stream is sure
event.synchronize()
assert pinned.tolist() == [2] * 3
# To memory that is not pinned it lands one wait late.
other.synchronize()
assert pageable.tolist() == [0] * 3
hpu.synchronize()
assert pageable.tolist() == [2] * 3
# One stream can wait for another.
with hpu.stream(side):
    pinned.copy_(source.fill_(5), non_blocking=True)
    event.record()
event.wait()
source.add_(1)
assert pinned.tolist() == [5] * 3
pageable.copy_(source, non_blocking=True)
assert pageable.tolist() == [2] * 3
hpu.synchronize()
assert pageable.tolist() == [6] * 3
pageable.copy_(source.add_(1))
assert pageable.tolist() == [7] * 3

# Events and streams have the bridge's form.
one, two = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
with pytest.raises(RuntimeError, match="recorded"):
    one.elapsed_time(two)
one.record(); two.record()
assert one.elapsed_time(two) >= 0
"""


@pytest.mark.long
def test_the_device_behaves_as_one(on_software_hpu: Run) -> None:
    passes(on_software_hpu(script=DEVICE))


LATE = """
import pytest, torch
from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import BackendError, NotFiniteError
from lantern_accel.testing import tiny
from lantern_accel_hpu.bridge import Bridge
planted = {
    # What an event is believed to order, and memory that the device must not have to itself.
    "pageable": lambda self, shape, dtype: torch.zeros(shape, dtype=dtype),
    "none": lambda self, shape, dtype: None,
    "": Bridge.allocate_pinned,
}
for name, pinned in planted.items():
    Bridge.allocate_pinned = pinned
    backend = choose_device("hpu", {"software": True}).open()
    for strategy in ("scd", "lantern++"):
        with torch.inference_mode():
            engine = tiny.tiny_engine(backend, strategy)
            tiny.start(engine, 1)
            if name == "pageable":
                with pytest.raises((BackendError, NotFiniteError)):
                    engine.run(on_progress=lambda known: None)
            else:
                engine.run(on_progress=lambda known: None)
"""


@pytest.mark.long
def test_a_late_copy_to_pageable_memory_is_found_out(on_software_hpu: Run) -> None:
    """The review's fault: an event waited for, and the values of the wait before."""
    passes(on_software_hpu(script=LATE))


def test_it_does_not_take_the_name_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_hpu.software.register import register

    monkeypatch.setattr(torch, "hpu", ModuleType("torch.hpu"), raising=False)
    with pytest.raises(BackendError, match=r"already has a device 'hpu'.*unset LANTERN_HPU"):
        register.__wrapped__()


BUSY = """
import pytest
from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import BackendError
import subprocess, sys
with pytest.raises(BackendError, match="another process holds it.*synStatus=26") as told:
    choose_device("hpu", {"software": True}).open()
print(told.value)
"""

HOLD = """
import os, subprocess, sys
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True}).open()
assert str(backend.device) == "hpu:0"
print("held", os.getpid(), flush=True)
backend.close()  # the driver takes the card back when the process ends, and not before
done = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
print(done.stdout, done.stderr)
assert done.returncode == 0
"""


@pytest.mark.long
def test_a_card_serves_one_process(on_software_hpu: Run, tmp_path: Path) -> None:
    locks = str(tmp_path / "locks")
    changed = {"LANTERN_HPU_SOFTWARE_LOCKS": locks, "LANTERN_HPU_SOFTWARE_MODULES": "1"}
    shown = passes(on_software_hpu(BUSY, script=HOLD, **changed))
    assert "name another card with --device hpu:N" in shown
    assert f"(pid {shown.split()[1]})" in shown.partition("held now by")[2]
