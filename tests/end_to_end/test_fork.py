"""Children of ``fork``: a pool's workers, and servers that load before they fork."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.native import needs_native

import lantern_accel
from lantern_accel.device.backend import Backend
from lantern_accel.errors import BackendError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

#: Draws in a pool of two, after what the words say, and prints whether the children's tokens are right.
POOL = """
import multiprocessing, sys, threading, time, warnings
import lantern_accel, torch

def tokens(seed):
    return pipeline.generate("red heart", seed=seed, strategy="sjd").tokens.tolist()

def drawn_by_own(seed):
    with lantern_accel.load(folder, device="cpu", options={"native": native}) as own:
        return own.generate("red heart", seed=seed, strategy="sjd").tokens.tolist()

folder, native, *words = sys.argv[1:]
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
torch.randn(512, 512) @ torch.randn(512, 512)  # OpenMP's threads are there
pipeline = lantern_accel.load(folder, device="cpu", options={"native": native})
if "drawn" in words:
    tokens(1)
inside, go_on = threading.Event(), threading.Event()
def wait(done, total):
    inside.set()
    go_on.wait()
if "drawing" in words:
    held = {"target": pipeline.generate, "args": ["red heart"], "kwargs": {"on_progress": wait}}
    thread = threading.Thread(**held, daemon=True)
    thread.start()
    inside.wait()
if "suspended" in words:
    stream = pipeline.stream("red heart", seed=1, strategy="sjd")
    next(stream)
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    call = drawn_by_own if "own" in words else tokens
    found = pool.map_async(call, [1, 2, 3, 4]).get(timeout=60)
go_on.set()
if "drawing" in words:
    thread.join()
assert found == [tokens(seed) for seed in (1, 2, 3, 4)], "other tokens"
assert torch.get_num_threads() == 2, "the parent's threads"
print("right")
"""


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a script on two threads, which sleep while they wait."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    given = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(given, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize(
    ("native", "before"),
    [
        *[pytest.param("on", before, marks=needs_native) for before in ("drawing", "suspended")],
        ("off", "drawing"),
    ],
)
def test_a_pool_of_two_draws_after_its_parent_has(tiny_model, native, before):
    found = run(POOL, tiny_model, native, before)
    assert (found.stdout, found.returncode) == ("right\n", 0), found.stderr


def test_a_device_that_does_not_live_through_a_fork_says_so(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        Backend.after_fork(pipeline.backend)  # what a backend without an own one does in a child
        with pytest.raises(BackendError, match="spawn"):
            pipeline.generate("red heart")
        with pytest.raises(BackendError, match="spawn"):
            next(pipeline.stream("red heart"))
