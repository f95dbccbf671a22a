"""The HPU backend's real code on the software HPU: right tokens, one graph a bucket, no speed."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_accel.errors import BackendError
from lantern_accel_hpu.kernels import index_dtype

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def passes(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_generate_gives_the_tokens_of_the_cpu(on_software_hpu: Run, tmp_path: Path) -> None:
    figures, pictures = {}, {}
    for device in ("hpu", "cpu"):
        words = ["generate", "red heart", "--device", device, "--dtype", "float32", "--seed", "7"]
        files = [tmp_path / f"{device}.json", tmp_path / f"{device}.png"]
        # A tree of its own: a tuned one belongs to one device.
        words += ["--tree", "small_8", "--json", str(files[0]), "-o", str(files[1])]
        shown = passes(on_software_hpu(*words))
        assert ("software HPU" in shown) == (device == "hpu")
        assert ("tokens/s" in shown) == (device == "cpu")
        figures[device] = json.loads(files[0].read_text())
        pictures[device] = torch.from_numpy(np.array(Image.open(files[1]), dtype=np.int16))
    for same in ("tokens_sha256", "steps", "accepted_histogram"):
        assert figures["hpu"][same] == figures["cpu"][same], same
    # Convolutions may round apart by one step of 255.
    assert (pictures["hpu"] - pictures["cpu"]).abs().max() <= 1
    assert figures["hpu"]["device_name"] == "software HPU"
    assert figures["hpu"]["simulated"] is True
    assert figures["hpu"]["tokens_per_second"] is None


def test_conform_passes_all_that_needs_no_card(on_software_hpu: Run, tmp_path: Path) -> None:
    files = tmp_path / "report.json", tmp_path / "junit.xml"
    words = ["conform", "hpu", "--software", "--json", str(files[0]), "--junit", str(files[1])]
    shown = passes(on_software_hpu(*words, LANTERN_HPU_SOFTWARE=""))
    report = json.loads(files[0].read_text())
    assert report["device_name"] == "software HPU"
    assert report["simulated"] is True
    assert [o for o in report["outcomes"] if o["state"] == "failed"] == []
    left = [o for o in report["outcomes"] if o["state"] == "not applicable"]
    left = [o for o in left if o["name"] != "static.indices" or index_dtype() == torch.int32]
    assert all(o["needs_card"] and o["detail"].startswith("needs a card") for o in left)
    assert {"device.stopwatch", "device.energy"} <= {o["name"] for o in left}
    names = {o["name"] for o in report["outcomes"] if o["state"] == "passed"}
    assert {"static.operators", "static.dtypes", "static.kernels"} <= names
    if index_dtype() == torch.int32:
        assert "static.indices" in names
    assert f" not applicable ({len(left)} need a card)" in shown
    suite = ET.parse(files[1]).getroot()
    found = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert (found["device_name"], found["needs_card"]) == ("software HPU", str(len(left)))


BUCKETS = """
import sys, torch
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True, "mode": sys.argv[1]}).open()
from lantern_accel.testing import tiny
from lantern_accel_hpu.software import dynamo, hpu
from lantern_accel_hpu import operators

def compiled():
    return dict(hpu.metrics.metric_global("graph_compilation").stats())["TotalNumber"]

with torch.inference_mode():
    buckets = (("vanilla", 1), ("lantern++", 2))
    engines = [tiny.tiny_engine(backend, name, batch=batch) for name, batch in buckets]
    steps = []
    for engine in engines:
        tiny.start(engine, 0)
        steps.append(backend.capture(engine.step, "step"))
    made, counted = compiled(), backend.counters()
    reference = tiny.tiny_engine(backend, "lantern++", batch=2)
    for index in range(200):
        engine, step = engines[index % 2], steps[index % 2]
        if index % 20 < 2:
            tiny.start(engine, 1 + index)
        step()
    assert compiled() == made == 2, (made, compiled())
    assert backend.counters() == counted
    tiny.start(engines[1], 77)
    tiny.start(reference, 77)
    for _ in range(6):
        steps[1]()
        reference.step()
    assert torch.equal(engines[1].state.tokens.cpu(), reference.state.tokens.cpu())
for graph in dynamo.graphs:
    assert len(graph) > 30
    bases = {operators.names_of(one)[0] for one in graph}
    unlisted = bases - operators.names() - set(operators.EXCEPTIONS)
    assert not unlisted, unlisted
    assert not bases & set(operators.FALLBACKS), bases & set(operators.FALLBACKS)
assert len(dynamo.graphs) == (2 if sys.argv[1] == "compile" else 0)
print("fine")
"""


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_two_hundred_steps_make_one_graph_a_bucket(on_software_hpu: Run, mode: str) -> None:
    assert "fine" in passes(on_software_hpu(mode, script=BUCKETS))


PLANT = """
import sys, torch
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True}).open()
import lantern_accel.decoding.engine as engine
from lantern_accel.testing import checks_of, run_check

real = engine.commit
plants = {
    "item": lambda s: s.length.sum(dtype=torch.int32).item(),
    "branch": lambda s: bool((s.length > 3).all()),
    "boolean index": lambda s: s.tokens[s.tokens > 3],
    "nonzero": lambda s: s.tokens.nonzero(),
    "float64": lambda s: s.price.double(),
    "complex": lambda s: torch.complex(s.price, s.price),
    "unlisted": lambda s: torch.special.bessel_j0(s.price),
    "fall-back": lambda s: s.price[s.length],
    "bool sum": lambda s: (s.length > 3).sum(dim=-1),
    "int64": lambda s: s.length.long() + 1,
    "cpu": lambda s: s.length.cpu(),
    "number of the host": lambda s: s.price + torch.ones(()),
}
for name, check in [tuple(one.split("=")) for one in sys.argv[1:]]:
    def wrong(verifying, state, *rest, plant=plants[name]):
        real(verifying, state, *rest)
        plant(state)
    engine.commit = wrong
    vars(backend).pop("_static_traces", None)
    outcome = run_check(backend, check, checks_of(backend)[check])
    assert outcome.state == "failed", (name, outcome)
    recorder = next(iter(vars(backend)["_static_traces"].values()))
    found = [v for v in recorder.violations if "<string>" in v.source]
    assert check.partition(".")[2] in {v.rule for v in found}, (name, found)
    print(name, "|", *found)
"""

FAULTS = {
    "item": "static.host_read",
    "branch": "static.host_read",
    "boolean index": "static.dynamic_shape",
    "nonzero": "static.dynamic_shape",
    "float64": "static.float64",
    "complex": "static.dtypes",
    "unlisted": "static.operators",
    "fall-back": "static.operators",
    "bool sum": "static.dtypes",
    "int64": "static.indices",
    "cpu": "static.other_device",
    "number of the host": "static.other_device",
}


def test_the_gate_names_every_planted_fault(on_software_hpu: Run) -> None:
    words = [f"{name}={check}" for name, check in FAULTS.items()]
    shown = passes(on_software_hpu(*words, script=PLANT))
    assert len(shown.splitlines()) == len(FAULTS)
    for name, text in (
        ("unlisted", "no kernel"),
        ("fall-back", "index_select"),
        ("int64", "int32"),
    ):
        assert text in next(line for line in shown.splitlines() if line.startswith(name))


def test_without_a_compiler_the_way_out_is_told(on_software_hpu: Run, tmp_path: Path) -> None:
    done = on_software_hpu("conform", "hpu", "--software", CXX="no-such-compiler")
    assert done.returncode == 2
    assert "no-such-compiler" in done.stderr
    assert "Traceback" not in done.stderr
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'device.cpp:1: error: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    cache = str(tmp_path / "cache")
    done = on_software_hpu(
        "conform", "hpu", "--software", CXX=str(broken), LANTERN_ACCEL_CACHE=cache
    )
    assert done.returncode == 2
    assert "error: no; try another compiler with CXX" in " ".join(done.stderr.split())
    assert not list(Path(cache).rglob("*.part"))


DEVICE = """
import pytest, torch
from lantern_accel_hpu import software
from lantern_accel_hpu.software import hpu, metrics
assert software.enable() is hpu is software.enable() is torch.hpu
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
free, total = hpu.mem_get_info()
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
        assert hpu.is_current_stream_capturing()
        state.add_(1)
        double = state * 2
        part = double[1:]
        top = (part + 1).topk(1).values
    assert not hpu.is_current_stream_capturing()
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
        assert not hpu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="no capture was begun"):
        hpu.HPUGraph().capture_end()

# Events and streams have the bridge's form.
one, two = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
with pytest.raises(RuntimeError, match="recorded"):
    one.elapsed_time(two)
one.record(); two.record()
assert one.elapsed_time(two) >= 0 and hpu.current_stream().query()
print("fine")
"""


def test_the_device_behaves_as_one(on_software_hpu: Run) -> None:
    assert "fine" in passes(on_software_hpu(script=DEVICE))


def test_it_does_not_take_the_name_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_hpu.software.register import register

    monkeypatch.setattr(torch, "hpu", ModuleType("torch.hpu"), raising=False)
    with pytest.raises(BackendError, match=r"already has a device 'hpu'.*unset LANTERN_HPU"):
        register.__wrapped__()


LOWERED = """
import sys, pytest, torch
from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import BackendError
from lantern_accel_hpu import bridge
from lantern_accel_hpu.software import hpu

backend = choose_device("hpu", {"software": True, "mode": "compile"}).open()
from lantern_accel.testing import checks_of, run_check
device = backend.device

def writes():
    return run_check(backend, "kernels.writes", checks_of(backend)["kernels.writes"]).state

assert writes() == "passed"
# The pass that makes index_copy write in place loses the second of two writes.
real = bridge.Bridge.compile_options
bridge.Bridge.compile_options = lambda self: {"use_eager_fallback": False}
assert writes() == "failed"
bridge.Bridge.compile_options = real

# An operator that hpu_backend leaves the graph for is named by default.
state, seen, other, last = (torch.zeros(4, device=device) for _ in range(4))
places = torch.tensor([3, 2, 1, 0], device=device)

def step():
    seen.copy_(other[places] * 0 + state)
    state.add_(1)
    last.copy_(state[places])

with pytest.raises(BackendError, match="index has no kernel that hpu_backend takes"):
    backend.capture(step, "step")

def run(options):
    state.zero_()
    compiled = torch.compile(step, backend="hpu_backend", fullgraph=True, dynamic=False, options=options)
    compiled()
    torch._dynamo.reset()
    return seen.tolist()

step()
assert seen.tolist() == [0.0] * 4
# Allowed to fall back, parts of the graph write state before others have read it, whichever pass is off.
safe = dict.fromkeys(bridge.UNSAFE[:3], False)
assert run({**safe, "use_eager_fallback": True}) == [1.0] * 4
assert run({"use_eager_fallback": True}) == [1.0] * 4

# A broadcast view is no input of a recipe.
wide = torch.zeros(1, device=device).expand(4)
def broad():
    seen.copy_(wide + 1)
with pytest.raises(BackendError, match="stride of 0; make it contiguous"):
    backend.capture(broad, "step")

# Integers are 32 bits wide, and recipes are counted by shape.
big = torch.tensor([2**31 + 5], device=device)
assert big.tolist() == [-(2**31) + 5]
assert (torch.tensor([2**31 - 1], device=device) + 1).tolist() == [-(2**31)]
def missed():
    return dict(hpu.metrics.metric_global("recipe_cache").stats())["TotalMiss"]
torch.ones(3, device=device).exp()
before = missed()
torch.ones(3, device=device).exp()
assert missed() == before
torch.ones(5, device=device).exp()
assert missed() > before
print("fine")
"""


def test_the_bridges_passes_show_in_the_numbers(on_software_hpu: Run) -> None:
    assert "fine" in passes(on_software_hpu(script=LOWERED))


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
import subprocess, sys
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True}).open()
assert str(backend.device) == "hpu:0"
print("held", flush=True)
done = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
print(done.stdout, done.stderr)
assert done.returncode == 0
"""


def test_a_card_serves_one_process(on_software_hpu: Run, tmp_path: Path) -> None:
    locks = str(tmp_path / "locks")
    changed = {"LANTERN_HPU_SOFTWARE_LOCKS": locks, "LANTERN_HPU_SOFTWARE_MODULES": "1"}
    shown = passes(on_software_hpu(BUSY, script=HOLD, **changed))
    assert "name another card with --device hpu:N" in shown


FIRST_CONTACT = """
import contextlib, os, sys, pytest, torch
from support import gaudi
from lantern_accel.cli import main
from lantern_accel_hpu import bridge, cards, checks, faults, kernels

check, planted = sys.argv[1:]
if check == "kernels.traced":  # the vendor's wrapper as its double, for the software HPU has no kernels
    real = bridge.Bridge.from_software
    def with_kernels():
        made = real()
        object.__setattr__(made, "kernels", bridge.Kernels(sdpa=gaudi.FusedSDPA))
        return made
    bridge.Bridge.from_software = with_kernels
    if planted == "yes":
        kernels.RECOMPUTE = None
elif check == "cards.index":
    os.environ["HABANA_VISIBLE_MODULES"] = "2,3"
    real = cards.choose
    def choose(index, environ):
        chosen = real(index, environ)
        if planted == "yes":  # the driver is told another module
            environ.update({cards.VISIBLE: "5", cards.MODULE: "5"})
        return chosen
    cards.choose = choose
elif planted == "yes" and check == "cards.errors":
    faults.BUSY = faults.ABSENT = faults.BUSY + faults.ABSENT
elif planted == "yes" and check == "graphs.fallback":
    os.environ["PT_HPU_USE_EAGER_FALLBACK"] = "1"
sys.argv = ["lantern-accel", "conform", "hpu", "--software", "--only", check]
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    "check", ["kernels.traced", "cards.index", "cards.errors", "graphs.fallback"]
)
def test_a_fault_of_first_contact_is_caught_by_name(on_software_hpu: Run, check: str) -> None:
    assert f"passed: {check}" in passes(on_software_hpu(check, "no", script=FIRST_CONTACT))
    done = on_software_hpu(check, "yes", script=FIRST_CONTACT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"failed: {check}" in done.stdout
