"""The HPU backend's real code on the software HPU: right tokens, one graph a bucket, no speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import write_tiny_model
from support.processes import Run, passes
from support.profiles import PROMPTS

from lantern_accel_hpu.kernels import index_dtype


@pytest.mark.long
def test_generate_gives_the_tokens_of_the_cpu(on_software_hpu: Run, tmp_path: Path) -> None:
    figures, pictures = {}, {}
    path = write_tiny_model(tmp_path / "tiny")
    for device in ("hpu", "cpu"):
        words = ["generate", PROMPTS[0], "--device", device, "--dtype", "float32", "--seed", "7"]
        words += ["--model", str(path)]
        files = [tmp_path / f"{device}.json", tmp_path / f"{device}.png"]
        # A tree of its own: a tuned one belongs to one device.
        words += [
            "--strategy",
            "lantern++:drafts=small_8",
            "--stats",
            str(files[0]),
            "-o",
            str(files[1]),
        ]
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


@pytest.mark.long
def test_conform_passes_all_that_needs_no_card(on_software_hpu: Run, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ["conform", "hpu", "--software", "--in-process", "-o", str(out)]
    shown = passes(on_software_hpu(*words, LANTERN_HPU_SOFTWARE=""))
    report = json.loads(out.read_text())
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


PLANT = """
import sys, torch
from lantern_accel.device.plugins import choose_device
backend = choose_device("hpu", {"software": True}).open()
from lantern_accel.decoding.sources.tree import TreeDrafts
from lantern_accel.testing import checks_of, run_check, tiny

real = TreeDrafts.commit
# Every step commits: one case shows what all of them would.
cases = tiny.cases
tiny.cases = lambda *asked: cases(*asked)[:1]
plants = {
    "complex": lambda s: torch.complex(s.quality_loss, s.quality_loss),
    "unlisted": lambda s: torch.special.bessel_j0(s.quality_loss),
    "fall-back": lambda s: s.quality_loss[s.length],
    "bool sum": lambda s: (s.length > 3).sum(dim=-1),
    "int64": lambda s: s.length.long() + 1,
    "cpu": lambda s: s.length.cpu(),
    "number of the host": lambda s: s.quality_loss + torch.ones(()),
}
for name, check in [tuple(one.split("=")) for one in sys.argv[1:]]:
    def wrong(self, state, *rest, plant=plants[name]):
        real(self, state, *rest)
        plant(state)
    TreeDrafts.commit = wrong
    vars(backend).pop("_static_traces", None)
    outcome = run_check(backend, check, checks_of(backend)[check])
    assert outcome.state == "failed", (name, outcome)
    recorder = [*vars(backend)["_static_traces"].values()][-1]
    found = [v for v in recorder.violations if "<string>" in v.source]
    assert check.partition(".")[2] in {v.rule for v in found}, (name, found)
    print(name, "|", *found)
"""

FAULTS = {
    "complex": "static.dtypes",
    "unlisted": "static.operators",
    "fall-back": "static.operators",
    "bool sum": "static.dtypes",
    "int64": "static.indices",
    "cpu": "static.other_device",
    "number of the host": "static.other_device",
}


@pytest.mark.long
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


@pytest.mark.long
def test_without_a_compiler_the_way_out_is_told(on_software_hpu: Run, tmp_path: Path) -> None:
    done = on_software_hpu("conform", "hpu", "--software", CXX="no-such-compiler")
    assert done.returncode == 4
    assert "no-such-compiler" in done.stderr
    assert "Traceback" not in done.stderr
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'device.cpp:1: error: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    cache = str(tmp_path / "cache")
    done = on_software_hpu(
        "conform", "hpu", "--software", CXX=str(broken), LANTERN_ACCEL_CACHE=cache
    )
    assert done.returncode == 4
    assert "error: no; try another compiler with CXX" in " ".join(done.stderr.split())
    assert not list((Path(cache) / "software_hpu").iterdir())
