"""A fleet on a real cluster of this machine: two processors' workers and the software HPU.

Takes minutes, so it is marked ``long`` as well: ``pytest -m "long and ray" -n 0``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.ray]

PROMPTS = ("red heart", "dog face", "a blue fish", "fish", "dog", "heart")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start a head with two cores and one HPU, which is the software's; gives the environment to use."""
    pytest.importorskip("ray")
    from lantern_accel_hpu import software

    if reason := software.missing():
        pytest.skip(reason)
    environment = {
        **os.environ,
        "LANTERN_HPU_SOFTWARE": "1",
        "LANTERN_ACCEL_CACHE": str(tmp_path_factory.mktemp("cache")),
        # Its card is this test's, whoever else on this machine has one.
        "LANTERN_HPU_SOFTWARE_LOCKS": str(tmp_path_factory.mktemp("locks")),
        "RAY_AUTH_MODE": "disabled",
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    port = 20000 + os.getpid() % 10000
    start = [
        *ray,
        "start",
        "--head",
        "--num-cpus=2",
        '--resources={"HPU": 1, "DSP": 1}',
        f"--port={port}",
    ]
    start += ["--include-dashboard=false", "--object-store-memory=80000000", "--block"]
    start += [f"--ray-client-server-port={port + 1}"]
    head = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(60)


@pytest.fixture(scope="module")
def fleet(cluster, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[n % len(PROMPTS)] for n in range(200)))

    def call(out: str, workers: str, *more: str) -> tuple[Path, subprocess.Popen[str]]:
        words = [sys.executable, "-m", "lantern_accel", "generate", "--prompts", str(prompts)]
        words += ["-m", str(tiny_model), "--workers", workers, "--threads", "1"]
        words += [
            "-o",
            str(folder / out),
            "--seed",
            "5",
            "--dtype",
            "float32",
            "-s",
            "eagle",
            *more,
        ]
        running = subprocess.Popen(
            words, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return folder / out, running

    return call


def finished(folder: Path, running: subprocess.Popen[str]) -> dict[str, object]:
    said, _ = running.communicate(timeout=600)
    assert running.returncode == 0, said
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    assert summary["images"] == 200, said
    return summary


def images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def wait_for_some(folder: Path, running: subprocess.Popen[str]) -> None:
    """Wait until some images are written and some are not."""
    end = time.monotonic() + 300
    while len(list(folder.glob("*.png"))) < 20:
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def one(fleet) -> dict[str, bytes]:
    folder, running = fleet("one", "CPU=1")
    finished(folder, running)
    return images(folder)


def test_two_kinds_of_three_workers_draw_what_one_draws(fleet, one):
    folder, running = fleet("three", "CPU=2,HPU=1")
    summary = finished(folder, running)
    assert images(folder) == one
    workers = summary["workers_of_this_call"]
    assert sorted(workers) == ["cpu-0", "cpu-1", "hpu-0"]  # type: ignore[call-overload]
    assert workers["hpu-0"]["images_per_second"] is None  # type: ignore[index]  # it is no device


def test_a_worker_that_is_killed_under_way_changes_no_image(fleet, one):
    folder, running = fleet("killed", "CPU=2")
    wait_for_some(folder, running)
    worker = json.loads((folder / "run.json").read_text())["workers"][0]
    os.kill(worker["pid"], signal.SIGKILL)
    finished(folder, running)
    assert images(folder) == one


def test_a_driver_that_was_killed_is_continued(fleet, one):
    folder, running = fleet("driver", "CPU=2")
    wait_for_some(folder, running)
    running.kill()
    running.communicate(timeout=60)
    done = len(images(folder))
    assert 20 <= done < 200
    folder, running = fleet("driver", "CPU=2", "--resume")
    summary = finished(folder, running)
    drawn = sum(w["images"] for w in summary["workers_of_this_call"].values())  # type: ignore
    assert 200 - done <= drawn <= 200 - done + 20
    assert images(folder) == one
    assert not [p for p in folder.iterdir() if re.match(r"\.lantern-.*part", p.name)]
