"""The command ``lantern-accel serve`` in a process of its own: options, signals, and what is left."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")


@contextmanager
def process(*words: str, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command until the end of the block; gives it and its address."""
    call = [
        sys.executable,
        "-m",
        "lantern_accel",
        "serve",
        "--port",
        "0",
        "--device",
        "cpu",
        *words,
    ]
    environment = {**os.environ, "LANTERN_ACCEL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=environment)
    said: list[str] = []
    assert running.stderr is not None
    rest = threading.Thread(target=running.stderr.read)
    try:
        for line in running.stderr:
            said.append(line)
            if found := re.search(r"running on (http://[\d.:]+)", line):
                break
        else:
            raise AssertionError("".join(said))
        rest.start()  # so that its pipe is never full
        yield running, found[1]
    finally:
        running.kill()
        running.wait(30)
        if rest.ident is not None:
            rest.join(30)
        running.stderr.close()


@pytest.mark.long
@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_a_signal_finishes_what_runs_and_leaves_nothing_behind(tiny_model, tmp_path, how):
    words = ["--model", str(tiny_model), "--slots", "2", "--dtype", "float32", "--grace", "60"]
    with process(*words, cache=tmp_path / "cache") as (running, url):
        body = {"prompt": "red heart", "seed": 7, "strategy": "vanilla", "n": 10}
        first = httpx.post(f"{url}/v1/images/generations", json=body, timeout=60).json()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:

            def ask() -> httpx.Response:
                return httpx.post(f"{url}/v1/images/generations", json=body, timeout=60)

            until = time.monotonic() + 60
            asked = [pool.submit(ask) for _ in range(4)]
            while "lantern_slots_busy 2.0" not in httpx.get(f"{url}/metrics").text:
                assert time.monotonic() < until, "two slots are never busy"
                if all(one.done() for one in asked):  # too quick to be seen at work
                    asked = [pool.submit(ask) for _ in range(4)]
            running.send_signal(getattr(signal, f"SIG{how}"))
            answers, late = [], 0
            for one in asked:
                try:
                    answers.append(one.result())
                except httpx.ConnectError:  # on a busy machine it has not come in before the end
                    late += 1
                except httpx.TransportError:
                    assert how == "KILL"
        code = running.wait(60)
    if how == "TERM":
        assert code == 0
        done = [one for one in answers if one.status_code == 200]
        assert done and len(answers) + late == 4, "what was under way is finished"
        assert all(one.json()["data"] == first["data"] for one in done)
        refused = [one.json()["error"]["code"] for one in answers if one.status_code != 200]
        assert set(refused) <= {"shutting_down"}
    left = [str(p) for p in (tmp_path / "cache").rglob("*") if ".part" in p.name]
    assert not left


def test_what_cannot_be_served_is_told_before_anything_is_loaded(command, tmp_path, monkeypatch):
    """Other options: tests/unit/test_refusals.py."""
    keys = tmp_path / "keys"
    keys.write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, says in (
            (["--api-keys", keys], "holds no API key"),
            (["--port", port], f"port {port} of 127.0.0.1 is in use; stop what listens there"),
            (["--model", "lantern-emjoi"], "lantern-emoji"),
        ):
            done = command("serve", "--port", "0", *words)
            assert done.returncode == 2 and says in done.stderr
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = command("serve", "--port", "0")
    assert done.returncode == 2 and "lantern-accel[serve]" in done.stderr
