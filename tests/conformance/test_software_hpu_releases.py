"""What releases of the bridge make of two writes to one buffer: 1.19 loses one, 1.24 keeps both."""

from __future__ import annotations

import runpy

import pytest
from support.processes import Run, passes

from lantern_accel.errors import BackendError

WRITES = """
import sys, torch
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True, "mode": "compile"}).open()
from lantern_accel_hpu import bridge
from lantern_accel_hpu.graphs import Compiled
from lantern_accel_hpu.software import dynamo

device = backend.device
kept, seen, read = (torch.zeros(8, 4, device=device) for _ in range(3))
first, second = (torch.tensor(at, device=device) for at in ([1, 2], [2, 5]))
new = torch.arange(8.0).view(2, 4).to(device)
assert hasattr(backend.bridge.config, "use_generic_reinplacer") == (sys.argv[1] == "1.24")

def step():
    kept.index_copy_(0, first, new)
    seen.copy_(kept)
    kept.index_copy_(0, second, new + 1)
    old = read + 1
    read.index_copy_(0, first, new)
    seen.add_(old)

def run(function):
    for buffer in (kept, seen, read):
        buffer.zero_()
    function()
    return [buffer.tolist() for buffer in (kept, seen, read)]

with torch.inference_mode():
    wanted = run(step)
    replay = Compiled(backend.watch, step, "writes")
    got = run(replay)
made = [name for name, _ in dynamo.writes[-1]]
if sys.argv[1] == "1.24":
    assert got == wanted, (got, wanted)
    assert made.count("index_copy_.default") == 3, made
else:
    assert got[0] != wanted[0] and got[2] == wanted[2]
"""


@pytest.mark.long
@pytest.mark.parametrize("release", ["1.19", "1.24"])
def test_two_writes_to_one_buffer(on_software_hpu: Run, release: str) -> None:
    run = on_software_hpu(release, script=WRITES, LANTERN_HPU_SOFTWARE_RELEASE=release)
    passes(run)


def test_a_release_that_is_not_modelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_SOFTWARE_RELEASE", "1.25")
    with pytest.raises(BackendError, match=r"choose 1\.19 or 1\.24"):
        runpy.run_module("lantern_accel_hpu.software.config")
