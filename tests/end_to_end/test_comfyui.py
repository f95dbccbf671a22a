"""ComfyUI itself, in a server of its own: workflows, interrupts, memory, and its page in a browser.

``LANTERN_ACCEL_COMFYUI`` names the Python of an environment with ComfyUI (``dev/testing.md``).
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.janus import write_janus
from support.models import write_tiny_model

import lantern_accel

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PYTHON = os.environ.get("LANTERN_ACCEL_COMFYUI", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="LANTERN_ACCEL_COMFYUI names no Python with ComfyUI"),
]
#: Bytes that a process may grow by in ten queues, what its allocator keeps included.
GROWTH = 4 << 20
#: A file for ``custom_nodes`` that writes down interrupts and decoding steps, and interrupts in the step
#: whose number is in ``at.txt``: a request comes when the server's thread is free, which is not any time.
COUNTING = """
from pathlib import Path
import comfy.interruption as interruption
from lantern_accel.decoding.engine import Engine
NODE_CLASS_MAPPINGS = {}
told, at, steps = open("steps.txt", "a", buffering=1), Path("at.txt"), 0
interrupt, step = interruption.interrupt_current_processing, Engine.step

def interrupted(value=True):
    interrupt(value)
    if value:
        print("interrupt", file=told)

def stepped(*given):
    global steps
    steps += 1
    print("step", file=told)
    if at.exists() and steps >= int(at.read_text()):
        at.unlink()
        interrupted()
    return step(*given)

if step.__name__ == "step":  # the file may be read twice
    interruption.interrupt_current_processing, Engine.step = interrupted, stepped
"""


class Comfy:
    """A running server, asked as its page asks."""

    def __init__(self, process, port, log):
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def queue(self, prompt):
        return json.loads(self.ask("/prompt", {"prompt": prompt}))["prompt_id"]

    def done(self, job, seconds=180):
        """Return what the history says of a job, once it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = json.loads(self.ask(f"/history/{job}"))
            if found:
                return found[job]
            time.sleep(0.02)
        raise AssertionError(f"the job did not end\n{self.log.read_text()[-3000:]}")

    def images(self, prompt):
        """Return the images of a workflow as arrays, and their PNGs' text."""
        found = self.done(self.queue(prompt))
        assert found["status"]["status_str"] == "success", found["status"]
        files = [
            io.BytesIO(
                self.ask(
                    "/view?"
                    + urllib.parse.urlencode({k: v for k, v in one.items() if k != "abs_path"})
                )
            )
            for one in found["outputs"]["3"]["images"]
        ]
        opened = [Image.open(file) for file in files]
        return [np.asarray(one.convert("RGB")) for one in opened], [one.text for one in opened]

    def failure(self, prompt):
        """Return what the box of a node says."""
        found = self.done(self.queue(prompt))
        (said,) = (one for one in found["status"]["messages"] if one.startswith("execution_error"))
        return said.removeprefix("execution_error: ").strip()

    def until(self, there):
        """Wait until something is there."""
        end = time.monotonic() + 60
        while not there():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.01)

    def told(self):
        """Return what :data:`COUNTING` has written."""
        return (self.log.parent / "steps.txt").read_text().split()

    @property
    def resident(self):
        """The process's own bytes of memory, without pages of files."""
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
        raise AssertionError("there is no line Anonymous")


@pytest.fixture(scope="module")
def comfy(tmp_path_factory):
    """A ComfyUI on the processor, with the nodes put in by the documented command."""
    base = tmp_path_factory.mktemp("comfyui")
    (base / "custom_nodes").mkdir()
    page = (DOCS / "serving.md").read_text(encoding="utf-8")
    (command,) = (line for line in page.splitlines() if "custom_nodes/" in line)
    (base / "custom_nodes/counting.py").write_text(COUNTING)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "LANTERN_ACCEL_CACHE": str(base / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / one) for one in ("", "backends", "profiles"))
    env["PATH"] = os.pathsep.join((str(Path(PYTHON).parent), env["PATH"]))
    subprocess.run(command, shell=True, cwd=base, env=env, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--cpu", "--port", port, "--base-directory", base]
    log = base / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [PYTHON, "-m", "comfy.cmd.main", *map(str, words)],
            cwd=base, env=env, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Comfy(process, port, log)
    try:
        end = time.monotonic() + 180
        while True:
            try:
                server.ask("/queue")
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Janus, and a model whose images have as many tokens as Janus's."""
    base = tmp_path_factory.mktemp("models")
    return write_janus(base / "janus"), write_tiny_model(base / "large", grid=24)


def workflow(name):
    """Return a workflow of the pages, as ComfyUI's server takes it."""
    with Image.open(DOCS / name) as image:
        return json.loads(image.text["prompt"])


def with_inputs(prompt, load=(), draw=()):
    """Return a workflow on the processor in float32, with other inputs of its two nodes."""
    made = json.loads(json.dumps(prompt))
    made["1"]["inputs"] |= {"device": "cpu", "dtype": "float32", **dict(load)}
    made["2"]["inputs"] |= dict(draw)
    return made


def test_the_nodes_load_without_a_warning(comfy):
    told = [line for line in comfy.log.read_text().splitlines() if "lantern" in line.lower()]
    assert not [line for line in told if "[WARNING]" in line or "[ERROR]" in line]
    assert json.loads(comfy.ask("/object_info/LanternGenerateImage"))


def test_the_workflows_of_the_pages_draw_what_generate_draws(comfy, folders):
    janus = {"folder": str(folders[0])}
    for name, load, draw in (
        ("comfyui-emoji.png", {}, {"number": 2}),
        ("comfyui-janus.png", janus, {"prompt": "a red fox"}),
    ):
        prompt = with_inputs(workflow(name), load, draw)
        drawn, texts = comfy.images(prompt)
        asked = prompt["2"]["inputs"]
        expected = lantern_accel.generate(
            asked["prompt"], model=load.get("folder", "lantern-emoji"), device="cpu", dtype="float32",
            seed=asked["seed"], num_images=asked["number"],
        ).images  # fmt: skip
        assert len(drawn) == len(expected)
        for one, other in zip(drawn, expected, strict=True):
            assert np.array_equal(one, np.asarray(other))
        assert all(json.loads(text["prompt"]) == prompt for text in texts)


def test_an_interrupt_ends_within_two_steps_and_the_next_queue_works(comfy, folders):
    """Images of 576 tokens, by plain decoding: a step for each."""
    prompt = workflow("comfyui-emoji.png")
    load = {"folder": str(folders[1])}
    draw = {"strategy": "vanilla", "number": 8, "prompt": "red heart"}
    first, _ = comfy.images(with_inputs(prompt, load, draw))
    for seed, place in enumerate((200, 203, 206, None)):  # the host looks every eighth step
        before = comfy.told()
        if place is not None:
            at = comfy.log.parent / "at.new"
            at.write_text(str(before.count("step") + place))
            at.replace(at.with_name("at.txt"))
        job = comfy.queue(with_inputs(prompt, load, {**draw, "seed": seed}))
        if place is None:
            comfy.until(lambda before=before: len(comfy.told()) >= len(before) + 200)
            comfy.ask("/interrupt", {})
        found = comfy.done(job)
        comfy.until(
            lambda before=before: comfy.told().count("interrupt") > before.count("interrupt")
        )
        told = comfy.told()[len(before) :]
        at = told.index("interrupt")
        assert 200 <= at < 575, "not in the middle of an image"
        assert len(told) - 1 - at <= (2 if place is None else 0), "steps after the interrupt"
        assert "execution_interrupted" in found["status"]["messages"][-1]
        assert not found["outputs"]
    again, _ = comfy.images(with_inputs(prompt, load, {**draw, "seed": 9}))
    assert len(again) == len(first)
    assert not np.array_equal(again[0], first[0])


def test_ten_queues_do_not_grow_it_and_unloading_returns_the_weights(comfy):
    prompt = workflow("comfyui-emoji.png")

    def draw(seed):
        comfy.images(with_inputs(prompt, draw={"seed": seed, "strategy": "vanilla"}))

    for seed in range(100, 104):
        draw(seed)
    before = comfy.resident
    for seed in range(200, 210):
        draw(seed)
    grown = comfy.resident - before
    # ComfyUI keeps the node's output: the model must leave by itself.
    comfy.ask("/free", {"unload_models": True})
    end = time.monotonic() + 20
    weights = sum(
        path.stat().st_size for path in (ROOT / "lantern_accel/assets").rglob("target.safetensors")
    )
    while before - comfy.resident < weights and time.monotonic() < end:
        time.sleep(0.2)
    freed = before - comfy.resident
    print(f"grown {grown / 2**20:.1f} MiB, freed {freed / 2**20:.1f} MiB of {weights / 2**20:.1f}")
    assert grown < GROWTH
    assert freed >= weights
    draw(300)  # it is loaded again


def test_what_is_wrong_is_one_sentence_in_the_nodes_box(comfy):
    prompt = workflow("comfyui-emoji.png")
    for load, draw, says in (
        ({"folder": "/nowhere/at/all"}, {}, "there is no /nowhere/at/all"),
        ({"folder": str(DOCS)}, {}, "model"),
        ({"device": "hpu"}, {}, "not available"),
        ({}, {"prompt": "x" * 9000}, "a prompt has at most"),
        ({}, {"size": "4096x4096"}, "lantern-emoji"),
    ):
        said = comfy.failure(with_inputs(prompt, load, draw))
        assert says in said
        assert "\n" not in said
    absent = with_inputs(prompt, {"device": "toaster"})
    with pytest.raises(urllib.error.HTTPError):  # ComfyUI knows the choices itself
        comfy.queue(absent)


DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], name, {type}));
  const at = document.querySelector("canvas");
  for (const kind of ["dragenter", "dragover", "drop"])
    at.dispatchEvent(new DragEvent(kind, {dataTransfer: given, bubbles: true, cancelable: true}));
}"""


def save_workflow(page, path):
    """Write a picture of the workflow that the page shows, which opens it."""
    page.keyboard.press(".")
    page.wait_for_timeout(1500)
    shot = page.screenshot(clip={"x": 180, "y": 90, "width": 880, "height": 525})
    made = page.evaluate(
        "app.graphToPrompt().then((made) => [made.output, made.workflow].map((x) => JSON.stringify(x)))"
    )
    text = PngInfo()
    for name, value in zip(("prompt", "workflow"), made, strict=True):
        text.add_text(name, value)
    Image.open(io.BytesIO(shot)).convert("P", palette=1).save(path, pnginfo=text, optimize=True)


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore")
def test_the_page_opens_a_workflow_and_shows_preview_and_image(browser, comfy):
    """``LANTERN_ACCEL_SCREENSHOT`` names a folder for the pictures of ``docs/serving.md``."""
    shots = os.environ.get("LANTERN_ACCEL_SCREENSHOT")
    comfy.ask("/free", {"unload_models": True, "free_memory": True})
    # A new user is shown templates first.
    comfy.ask("/settings", {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False})
    page = browser.new_page(viewport={"width": 1240, "height": 700})
    # An extension of ComfyUI's that fetches an editor from elsewhere; without network the page waits.
    page.route(
        "**/eval_python.js", lambda one: one.fulfill(body="", content_type="text/javascript")
    )
    page.goto(comfy.url)
    page.wait_for_function(
        "!!(window.app?.graph && LiteGraph.registered_node_types.LanternGenerateImage)",
        timeout=60000,
    )
    for name in ("comfyui-janus.png", "comfyui-emoji.png"):
        data = base64.b64encode((DOCS / name).read_bytes()).decode()
        page.evaluate(DROP, [name, "image/png", data])
        asked = workflow(name)["2"]["inputs"]["prompt"]
        page.wait_for_function(
            "prompt => app.graph._nodes.some((node) =>"
            " node.type == 'LanternGenerateImage' && node.widgets.some((one) => one.value == prompt))",
            arg=asked,
        )
        if shots and "janus" in name:
            save_workflow(page, Path(shots) / name)
    page.evaluate("window.seen = 0; app.api.addEventListener('b_preview', () => window.seen++)")
    page.keyboard.press(".")  # the whole workflow in view
    page.keyboard.press("Control+Enter")  # "Run"
    page.wait_for_function(
        "app.graph._nodes.some((node) => node.type == 'SaveImage' && node.imgs?.[0]?.naturalWidth == 64)",
        timeout=120000,
    )
    assert page.evaluate("window.seen") >= 2
    page.wait_for_timeout(500)
    if shots:
        page.screenshot(path=Path(shots) / "comfyui.png")
    page.close()
