"""With Ray itself, on a cluster of this machine: datasets over actors, and the service in replicas."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from support.models import write_tiny_model

from lantern_accel.errors import RequestError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
    pytest.mark.filterwarnings("ignore"),  # Ray has its own
]
WORDS = ("red", "blue", "dog", "fish", "heart", "sea", "face", "the")
PROMPTS = [f"{one} {other}" for one in WORDS for other in WORDS]
SEED = 11


def hook():
    """Return what workers call as they start; Ray pickles functions of functions by their code."""

    def patch() -> None:
        """Write who loads a model and who begins a batch, and take half a second more for one."""
        import torch

        from lantern_accel import api
        from lantern_accel.generation.folder import FolderImages

        draw, load, log = FolderImages.generate, api.load, os.environ["TEST_RAY_LOG"]

        def slow(self, items):
            with open(log, "a", encoding="utf-8") as lines:
                lines.write(f"{os.getpid()} {' '.join(str(one.index) for one in items)}\n")
            time.sleep(0.5)
            return draw(self, items)

        def told(model, device, **more):
            """Load on a processor, which stands for the card that Ray was told of."""
            loaded = load(model, device=device.replace("cuda", "cpu"), **more)
            with open(f"{log}-loads", "a", encoding="utf-8") as lines:
                lines.write(f"{os.getpid()} {device} {torch.get_num_threads()}\n")
            return loaded

        FolderImages.generate, api.load = slow, told

    class Before(importlib.abc.MetaPathFinder):
        """Patches what the integration imports, where a worker imports it; others stay quick."""

        def find_spec(self, name, path, target=None):
            if name == "lantern_accel.integrations.ray":
                sys.meta_path.remove(self)
                patch()

    def start() -> None:
        sys.meta_path.insert(0, Before())

    return start


def calls(log: Path) -> list[list[int]]:
    """Return the process and the rows of each batch that has begun."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    return write_tiny_model(folder / "tiny")


@pytest.fixture(scope="module")
def log(folder) -> Path:
    return folder / "log"


@pytest.fixture(scope="module")
def cluster(log):
    """Two processors, and a card that is none."""
    import ray
    from ray import data, serve  # noqa: F401  # which makes them ray's attributes

    variables = {"TEST_RAY_LOG": str(log)}
    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=120 << 20,
        logging_level="ERROR",
        runtime_env={"env_vars": variables, "worker_process_setup_hook": hook()},
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(model, folder):
    """The images of ``generate --prompts``."""
    from lantern_accel.cli import main

    prompts, images = folder / "prompts.txt", folder / "images"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    words = ["generate", "--prompts", prompts, "-o", images, "--seed", SEED, "--model", model]
    assert not main([*map(str, words), "--device", "cpu", "--dtype", "float32"])
    return [pixels((images / f"{row:06d}.png").read_bytes()) for row in range(len(PROMPTS))]


def pixels(png: bytes) -> bytes:
    return Image.open(io.BytesIO(png)).convert("RGB").tobytes()


def rows(ray, prompts=PROMPTS):
    return ray.data.from_items([{"id": n, "prompt": one} for n, one in enumerate(prompts)])


def settings(model) -> dict:
    return {"model": str(model), "seed": SEED, "threads": 1, "rows": 8}


@pytest.mark.parametrize(
    ("actors", "kill"), [({"cpu": 2}, False), ({"cpu": 2}, True), ({"cpu": 1, "cuda": 1}, True)]
)
def test_actors_generate_the_images_of_a_file_even_when_one_is_killed(
    cluster, model, log, alone, actors, kill
):
    from lantern_accel.integrations.ray import generate

    log.unlink(missing_ok=True)

    def killer() -> None:
        while len(calls(log)) < 4 and not over.wait(0.02):
            pass
        os.kill(calls(log)[-1][0], signal.SIGKILL)

    over = threading.Event()
    death = threading.Thread(target=killer)
    if kill:
        death.start()
    loading = {"dtype": "float32"}
    try:
        made = generate(rows(cluster), actors, loading=loading, **settings(model)).take_all()
    finally:
        over.set()
    found = {row["id"]: pixels(row["image"]) for row in made}
    assert [found[n] for n in range(len(PROMPTS))] == alone
    assert len(made) == len(PROMPTS) and not any(row["error"] for row in made)
    drawn = Counter(row for _, *batch in calls(log) for row in batch)
    twice = sum(times > 1 for times in drawn.values())
    processes = {process for process, *_ in calls(log)}
    print(f"\n{actors}: {twice} rows were drawn twice, in {len(processes)} processes")
    if kill:
        death.join()
        assert 0 < twice <= 16
    else:
        assert not twice and len(processes) == 2


def test_a_row_fails_alone_and_a_dataset_before_anything_is_drawn(cluster, model, tmp_path):
    from lantern_accel.integrations.ray import generate

    rows = [{"id": 7, "prompt": "red heart"}, {"id": 8, "prompt": " "}]
    data = cluster.data.from_items(rows)
    made = {row["id"]: row for row in generate(data, {"cpu": 1}, **settings(model)).take_all()}
    assert made[7]["image"] and made[7]["tokens"] == 16 and made[7]["error"] is None
    assert made[8]["image"] is None and "not text" in made[8]["error"]
    with pytest.raises(RequestError, match="1 HPU"):
        generate(data, {"hpu": 1}, seconds=1.0, **settings(model))
    with pytest.raises(Exception, match=r"node [0-9.]+ cannot load"):
        generate(data, {"cpu": 1}, **settings(tmp_path / "not-there")).take_all()


@pytest.fixture(scope="module")
def larger(folder) -> Path:
    """A model whose images take long enough to be interrupted."""
    return write_tiny_model(folder / "larger", grid=12)


@pytest.fixture
def port(cluster):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster.serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    cluster.serve.shutdown()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def drawn(client, number: int, **more):
    # Drafts may complete the few tokens before the first look, so that there is no partial image.
    own = {"seed": number} | ({"strategy": "vanilla"} if "stream" in more else {})
    return client.images.generate(prompt=PROMPTS[number], extra_body=own, **more)


def loads(log: Path) -> list[list[str]]:
    """Return process, device and threads of every model that was loaded."""
    lines = log.with_name(f"{log.name}-loads")
    return [one.split() for one in lines.read_text().splitlines()] if lines.exists() else []


def until(condition, seconds: float = 120.0) -> float:
    """Wait until a condition holds; return the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "it took too long"
        time.sleep(0.05)
    return time.monotonic() - began


def test_the_service_loses_what_runs_in_a_killed_replica_and_no_more(
    cluster, port, larger, log, stack
):
    openai = pytest.importorskip("openai")
    before = len(loads(log))
    words = ["device=cpu", "replicas=2", "threads=1", "slots=2", "queue=8", "dtype=float32"]
    command = [Path(sys.executable).with_name("serve"), "run", "lantern_accel.integrations.ray:app"]
    environ = {**os.environ, "RAY_ADDRESS": cluster.get_runtime_context().gcs_address}
    serving = subprocess.Popen(
        [*command, f"model={larger}", *words], env=environ, stdin=subprocess.DEVNULL
    )

    def healthy() -> int:
        apps = cluster.serve.status().applications.values()
        states = [one.replica_states for app in apps for one in app.deployments.values()]
        return sum(state.get("RUNNING", 0) for state in states)

    try:
        until(lambda: healthy() == 2)
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        stack.callback(client.close)
        events = [one.type for one in drawn(client, 0, stream=True, partial_images=3)]
        assert events[-1] == "image_generation.completed" and len(events) > 1
        failed: list[Exception] = []
        answers: list[tuple[int, str]] = []

        def ask(number: int) -> None:
            while True:
                try:
                    answers.append((number % 4, drawn(client, number % 4).data[0].b64_json))
                    return
                except openai.APIError as error:
                    assert isinstance(error, openai.APIConnectionError | openai.InternalServerError)
                    failed.append(error)

        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(ask, number) for number in range(96)]
            until(lambda: len(answers) >= 16)
            os.kill(int(loads(log)[before][0]), signal.SIGKILL)
            again = until(lambda: len(loads(log)) == before + 3 and healthy() == 2)
            for one in asked:
                one.result()
        print(
            f"\n{len(failed)} of 96 requests were lost; the next replica came after {again:.1f} s"
        )
        assert 0 < len(failed) <= 8, failed
        assert len(answers) == 96 and len(set(answers)) == 4, "the replicas' images differ"
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(60)


def test_devices_behind_one_route_give_one_image(cluster, port, model, log, stack):
    openai = pytest.importorskip("openai")
    from lantern_accel.integrations.ray import app

    before = len(loads(log))
    words = {"model": str(model), "device": "cpu,cuda", "threads": "1", "dtype": "float32"}
    cluster.serve.run(app(words))
    assert {device for _, device, _ in loads(log)[before:]} == {"cpu", "cuda"}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
    stack.callback(client.close)
    with ThreadPoolExecutor(8) as pool:
        found = {one.data[0].b64_json for one in pool.map(lambda _: drawn(client, 3), range(16))}
    assert len(found) == 1
    events = [*drawn(client, 3, stream=True, partial_images=2)]
    assert events[-1].b64_json in found and len(events) > 1
    with pytest.raises(openai.BadRequestError, match="strategy"):
        client.images.generate(prompt="red", extra_body={"strategy": "none of ours"})
