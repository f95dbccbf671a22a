"""What the bridge's passes do to a step, and the buckets that requests share, on the software HPU."""

from __future__ import annotations

import pytest
import torch
from support.processes import Run, passes

from lantern_accel_hpu.kernels import index_dtype

LOWERED = """
import sys, pytest, torch
from lantern_accel.device.plugins import choose_device
from lantern_accel.decoding import session
from lantern_accel.errors import BackendError
from lantern_accel_hpu import bridge, checks
from lantern_accel_hpu.software import hpu

backend = choose_device("hpu", {"software": True, "mode": "compile"}).open()
from lantern_accel.testing import checks_of, run_check
from support.few import small_tree
small_tree(pytest.MonkeyPatch())
device = backend.device

def state_of(check):
    outcome = run_check(backend, check, checks_of(backend)[check])
    print(outcome.name, outcome.state, outcome.detail)
    return outcome.state

# The pass that makes index_copy write in place loses the second of two writes.
assert state_of("kernels.writes") == "passed"
real, checks.replace = checks.replace, lambda layout, **changes: layout
assert state_of("kernels.writes") == "failed"
checks.replace = real
# So a cache that is written several times must say so.
assert state_of("kernels.written_once") == "passed"
real, session.replace = session.replace, lambda layout, **changes: layout
assert state_of("kernels.written_once") == "failed"
session.replace = real
# Without that pass a step copies every layer of the cache.
assert state_of("graphs.in_place") == "passed"
real = bridge.Bridge.compile_options
bridge.Bridge.compile_options = lambda self: {**real(self), "use_inplace_index_copy": False}
assert state_of("graphs.in_place") == "failed"
bridge.Bridge.compile_options = real

# An operator that hpu_backend leaves the graph for is named by default.
state, seen, other, last = (torch.zeros(4, device=device) for _ in range(4))
places = torch.tensor([3, 2, 1, 0], device=device)

def step():
    seen.copy_(other[places] * 0 + state)
    state.add_(1)
    last.copy_(state[places])

with pytest.raises(BackendError, match="Node: index requires fallback"):
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
safe = dict.fromkeys(("use_inplace_index_copy", *bridge.UNSAFE[:2]), False)
assert run({**safe, "use_eager_fallback": True}) == [1.0] * 4
assert run({"use_eager_fallback": True}) == [1.0] * 4

# A broadcast view is no input of a recipe.
wide = torch.zeros(1, device=device).expand(4)
def broad():
    seen.copy_(wide + 1)
with pytest.raises(BackendError, match="stride of 0; make it contiguous"):
    backend.capture(broad, "step")

# An addmm with a residual becomes a linear with a matrix for a bias: its rows are lost.
weight = torch.randn(8, 4, device=device)
def added(rows, steps, add):
    x, residual = torch.randn(rows, steps, 4, device=device), torch.randn(rows, steps, 8, device=device)
    out = torch.zeros_like(residual)
    def run():
        flat = torch.addmm(residual.view(-1, 8), x.view(-1, 4), weight.t())
        out.copy_(flat.view(out.shape) if add else backend.linear_add(x, weight, residual))
    backend.capture(run, "step").release()
    assert torch.equal(out.cpu(), (residual + x @ weight.t()).cpu())
with torch.inference_mode():
    for rows, steps in ((1, 1), (1, 3), (2, 1), (2, 3)):
        added(rows, steps, add=False)
    added(1, 3, add=True)
    for steps in (1, 3):
        with pytest.raises(BackendError, match="fuse_linear: the output .* does not match"):
            added(2, steps, add=True)

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
"""


@pytest.mark.long
def test_the_bridges_passes_show_in_the_numbers(on_software_hpu: Run) -> None:
    passes(on_software_hpu(script=LOWERED))


EVERY = """
import sys, torch, warnings
from lantern_accel.device.plugins import choose_device, open_backend
warnings.simplefilter("error")
mode, kinds, sizes, index = sys.argv[1:]
hpu = choose_device("hpu", {"software": True, "mode": mode}).open()
hpu.index = getattr(torch, index)
cpu = open_backend("cpu")
from support import every_function as every
from lantern_accel_hpu.software import config
assert hpu.reinplaces == (config.RELEASE == "1.24")  # several writes of a cache are all kept
with torch.inference_mode():
    for kind in kinds.split(","):
        for size in sizes.split(","):
            batch, guide = int(size.split()[0]), size.endswith(" guided")
            one, other = (every.engine_of(b, kind, batch, guide) for b in (hpu, cpu))
            made = every.captured(hpu, one)
            eager = {"prefill"} if mode == "graph" else set()
            eager |= {name for name in made if name.startswith("widen")}
            assert all(m.captured for name, m in made.items() if name not in eager)
            got = every.tokens_of(one, made, 1)
            assert got == every.tokens_of(other, None, 1), (kind, size)
            # As a request runs it, with copies that land as late as they may.
            assert one.session.progress.lag == 1
            assert every.run_of(one, made, 2) == every.run_of(other, None, 2), (kind, size)
            print(kind, size, len(made))
"""
#: All of them; each half once by each mode, with one image and with several that are guided.
EXACT, TREES = "windows,chains,vanilla", "lantern++,eagle2"


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "kinds", "sizes", "index", "release"),
    [
        pytest.param("graph", EXACT, "3 guided", "int32", "1.19", id="graph-exact"),
        pytest.param("graph", TREES, "1 plain", "int32", "1.19", id="graph-trees"),
        pytest.param("compile", EXACT, "1 plain", "int32", "1.19", id="compile-exact"),
        pytest.param("compile", TREES, "3 guided", "int32", "1.24", id="compile-trees"),
        # What torch before 2.8 takes, which lazy mode computes in 32 bits.
        pytest.param("graph", "windows,chains", "2 guided", "int64", "1.19", id="int64"),
    ],
)
def test_every_function_of_auto_is_captured_and_gives_the_tokens_of_the_cpu(
    on_software_hpu: Run, mode: str, kinds: str, sizes: str, index: str, release: str
) -> None:
    """With memory that is pinned for late copies; ``int64`` without, as some bridges have none."""
    if index == "int32" and index_dtype() != torch.int32:
        pytest.skip("this torch takes no int32 index")
    pinned = str(int(index == "int32"))
    words = (mode, kinds, sizes, index)
    of = {"LANTERN_HPU_SOFTWARE_PINNED": pinned, "LANTERN_HPU_SOFTWARE_RELEASE": release}
    passes(on_software_hpu(*words, script=EVERY, **of))


FIRST_CONTACT = """
import os
from support import gaudi
from lantern_accel.device.plugins import choose_device
from lantern_accel.testing import checks_of, run_check
from lantern_accel_hpu import bridge, faults, kernels

os.environ["HABANA_VISIBLE_MODULES"] = "2,3"
backend = choose_device("hpu", {"software": True}).open()
# The vendor's wrapper as its double, for the software HPU has no kernels.
backend.kernels = bridge.Kernels(sdpa=gaudi.FusedSDPA)

def ends(check):
    outcome = run_check(backend, check, checks_of(backend)[check])
    print(outcome)
    return outcome.state

for check in ("kernels.traced", "cards.index", "cards.errors", "graphs.fallback"):
    assert ends(check) == "passed", check
kernels.recomputes = lambda queries: None
assert ends("kernels.traced") == "failed"
faults.BUSY = faults.ABSENT = faults.BUSY + faults.ABSENT
assert ends("cards.errors") == "failed"
os.environ["PT_HPU_USE_EAGER_FALLBACK"] = "1"
assert ends("graphs.fallback") == "failed"
"""


@pytest.mark.long
def test_the_faults_of_first_contact_are_caught_by_name(on_software_hpu: Run) -> None:
    passes(on_software_hpu(script=FIRST_CONTACT))
