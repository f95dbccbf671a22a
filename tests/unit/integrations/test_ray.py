"""What the integration with Ray decides itself, with a double in Ray's place: rows, resources, routes."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from unittest import mock

import numpy as np
import pytest
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import DeviceLostError, LanternWarning, ModelError, RequestError
from lantern_accel.families import releases
from lantern_accel.generation.result import png_bytes

NAME = "lantern_accel.integrations.ray"
for needed in ("fastapi", "prometheus_client", "uvicorn"):
    pytest.importorskip(needed)


@pytest.fixture
def ray(monkeypatch):
    """The integration, as it is with a Ray that counts its nodes' devices and starts nothing."""
    double = types.ModuleType("ray")
    double.data, double.serve, double.util = mock.Mock(), mock.Mock(), mock.Mock()
    double.remote, double.wait, double.cancel = mock.Mock(), mock.Mock(), mock.Mock()
    double.is_initialized = lambda: True
    double.nodes = lambda: [
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}},
        {"Alive": False, "Resources": {"CPU": 4.0, "HPU": 8.0}},
    ]
    for name in ("data", "serve"):
        monkeypatch.setitem(sys.modules, f"ray.{name}", getattr(double, name))
    monkeypatch.setitem(sys.modules, "ray", double)
    monkeypatch.setattr(releases, "find_release", lambda library: "2.60.1")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(("found", "says"), [(None, "not installed"), ("2.59.0", "2.59.0")])
def test_another_ray_or_none_is_named(monkeypatch, found, says):
    monkeypatch.setattr(releases, "find_release", lambda library: found)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ModelError, match=says):
        importlib.import_module(NAME)


def test_an_actor_asks_for_its_device_by_the_name_that_ray_gives_it(ray):
    assert ray.resources("cpu", 3) == {"num_cpus": 3}
    assert ray.resources("cuda") == {"num_cpus": 1, "num_gpus": 1}
    assert ray.resources("hpu", 2) == {"num_cpus": 2, "resources": {"HPU": 1}}
    assert ray.resources("xla")["resources"] == {"TPU": 1}
    with pytest.warns(LanternWarning, match="one thread"):
        assert ray.resources("cpu") == {"num_cpus": 1}
    with pytest.raises(RequestError, match="index"):
        ray.resources("cuda:1")


def test_a_device_counts_where_a_living_node_has_it(ray):
    for device in ("cpu", "cuda"):
        ray.check_cluster(ray.resources(device, 4), device)
    assert not ray.ray.wait.called  # no node had to be waited for
    for device, threads in (("hpu", 1), ("cpu", 5), ("cuda", 5)):
        with pytest.raises(RequestError, match=device):
            ray.check_cluster(ray.resources(device, threads), device, seconds=0.0)


def test_a_row_is_the_image_of_its_seed_or_id_wherever_it_stands(ray, model):
    images = ray.Images(model, "cpu", seed=5, loading={"dtype": "float32"})
    rows = {
        "id": [3, 0, "a", "a", None, np.nan],
        "seed": [None, None, None, 9, None, 9.0],
        "prompt": ["red heart"] * 6,
        "also": [*range(6)],
    }
    batch = {name: np.array(column, dtype=object) for name, column in rows.items()}
    made = images(dict(batch))
    turned = images({name: column[::-1] for name, column in batch.items()})
    assert [*made["image"]] == [*turned["image"]][::-1] and [*made["also"]] == [*range(6)]
    assert [*made["tokens"]] == [16] * 6 and set(made["error"]) == {None}
    assert made["image"][3] == made["image"][5] and len(set(made["image"])) == 5
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        four = pipeline.generate("red heart", seed=5, num_images=4)
        nine = pipeline.generate("red heart", seed=9)
    found = [*made["image"]]
    assert found[:2] == [png_bytes(four.images[3]), png_bytes(four.images[0])]
    assert found[3] == png_bytes(nine.images[0])


def test_a_row_that_is_invalid_fails_alone(ray, model):
    images = ray.Images(model, "cpu")
    prompts = ["red heart", "", None, True, 3, "red heart", "red heart", "red heart"]
    seeds = [1, 1, 1, 1, 1, -1, "x", 1.5]
    made = images(
        {"prompt": np.array(prompts, dtype=object), "seed": np.array(seeds, dtype=object)}
    )
    assert [png is None for png in made["image"]] == [False] + [True] * 7
    assert [bool(why) for why in made["error"]] == [False] + [True] * 7
    with pytest.raises(RequestError, match="prompt"):
        images({"text": np.array(["red heart"])})


def test_a_process_ends_where_its_device_is_lost(ray, model, monkeypatch):
    class Ended(Exception):
        """In place of the end of the process."""

    images = ray.Images(model, "cpu")
    monkeypatch.setattr(images._images, "generate", mock.Mock(side_effect=DeviceLostError("gone")))
    monkeypatch.setattr(ray.os, "_exit", mock.Mock(side_effect=Ended))
    with pytest.raises(Ended):
        images({"prompt": np.array(["red heart"])})


def test_a_folder_that_a_node_does_not_see_is_named_with_the_node(ray, tmp_path):
    ray.ray.util.get_node_ip_address.return_value = "10.0.0.7"
    with pytest.raises(RequestError, match=r"10\.0\.0\.7 cannot load"):
        ray.Images(str(tmp_path / "nothing"), "cpu")


def test_a_dataset_names_its_columns_before_actors_start(ray):
    dataset = mock.Mock()
    dataset.materialize.return_value = dataset
    for columns in (["text"], ["prompt", "image"]):
        dataset.columns.return_value = columns
        with pytest.raises(RequestError, match="'prompt'"):
            ray.generate(dataset, {"cuda": 1})
    dataset.columns.return_value = ["prompt", "id"]
    dataset.select_columns.return_value.iter_rows.return_value = [{"id": 7}, {"id": 7}]
    with pytest.raises(RequestError, match="7"):
        ray.generate(dataset, {"cuda": 1})
    dataset.select_columns.return_value.iter_rows.return_value = [{"id": None}, {"id": None}]
    ray.generate(dataset, {"cuda": 2}, threads=2)
    assert dataset.map_batches.call_args.kwargs["num_gpus"] == 1
    assert dataset.map_batches.call_args.kwargs["num_cpus"] == 2


def test_the_service_reads_its_arguments_as_words_or_values(ray, tmp_path, monkeypatch):
    def deployed() -> dict:
        return ray.serve.deployment.call_args.kwargs

    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    words = {"device": "cuda", "replicas": "2", "slots": "4", "queue": "8", "api_keys": str(keys)}
    ray.app(words)
    assert deployed()["num_replicas"] == 2 and deployed()["max_ongoing_requests"] == 8
    assert deployed()["ray_actor_options"]["num_gpus"] == 1
    assert ("secret",) in ray.serve.deployment.return_value.bind.call_args.args
    ray.app({"device": "cuda", "deployment": '{"autoscaling_config": {"max_replicas": 3}}'})
    assert deployed()["autoscaling_config"] == {"max_replicas": 3}
    assert "num_replicas" not in deployed()
    with pytest.raises(RequestError, match="HPU"):
        ray.app({"device": "hpu", "seconds": "0"})
    for wrong in ({"replica": "2"}, {"slots": "many"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            ray.app(wrong)


def test_a_replica_answers_for_health_and_for_the_front(ray, model):
    given = ray.Arguments(model=model, slots=2, dtype="float32")
    replicas = [ray.Replica("cpu", given, (), False) for _ in range(2)]
    asked = []

    class Handle:
        def __init__(self, replica):
            self.replica = replica
            self.answer = types.SimpleNamespace(remote=self.remote)

        def options(self, **given):
            return self

        def remote(self, scope, body):
            asked.append(self.replica)
            return self.replica.answer(scope, body)

    async def ask(front, path: str, body: bytes = b"") -> bytes:
        parts, sent = [body[:3], body[3:]], []

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(event):
            sent.append(event)

        scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "app": front}
        scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}
        scope |= {"http_version": "1.1", "root_path": "", "client": ("test", 1)}
        await front.__serve_build_asgi_app__()(scope, receive, send)
        assert sent[0]["status"] == 200, sent
        return b"".join(one.get("body", b"") for one in sent)

    async def several() -> None:
        front = ray.Front(*map(Handle, replicas))
        body = b'{"prompt": "red heart", "seed": 3, "stream": true, "partial_images": 3, '
        body += b'"strategy": "vanilla"}'
        first, second = await asyncio.gather(
            *(ask(front, "/v1/images/generations", body) for _ in range(2))
        )
        assert b"partial_image" in first and b"completed" in first and b"completed" in second
        assert asked == replicas, "the second request did not go to the free device"
        assert b'"ok"' in await ask(front, "/health")
        await replicas[0].check_health()
        replicas[0]._scheduler.queue.broken = "gone"
        with pytest.raises(RuntimeError, match="gone"):
            await replicas[0].check_health()

    try:
        asyncio.run(several())
    finally:
        for replica in replicas:
            replica._scheduler.stop(60)
