"""Which workers a cluster is asked for; no Ray in sight."""

from __future__ import annotations

import pytest

from lantern_accel.distributed.fleet import Kind, placement, read_workers
from lantern_accel.errors import RequestError

CPUS = {"CPU": 8.0, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1.0}
CARDS = {**CPUS, "GPU": 4.0, "HPU": 8.0, "accelerator_type:A100": 1.0}


def test_auto_takes_every_accelerator_and_else_the_cores():
    assert read_workers("auto", CARDS, None) == [Kind("GPU", 4, "gpu"), Kind("HPU", 8, "hpu")]
    assert read_workers("auto", CPUS, None) == [Kind("CPU", 1, "cpu")]
    assert read_workers("auto", {**CPUS, "licence": 3.0}, None) == [Kind("CPU", 1, "cpu")]
    assert read_workers("auto", CPUS, 2) == [Kind("CPU", 4, "cpu")]


def test_kinds_are_counted_and_a_device_may_be_named():
    found = read_workers("cpu=2, HPU=1", CARDS, None)
    assert found == [Kind("CPU", 2, "cpu"), Kind("HPU", 1, "hpu")]
    assert read_workers("TPU=4@xla", {"TPU": 4.0}, None) == [Kind("TPU", 4, "xla")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("CPU", "write auto, or KIND=COUNT"),
        ("CPU=0", "not 0"),
        ("CPU=9", "this cluster has 8 CPU, not 9"),
        ("GPUS=1", "did you mean gpu"),
        ("NPU=1", "no NPU"),
        ("memory=1", "no memory"),
    ],
)
def test_what_a_cluster_lacks_is_told(text, says):
    with pytest.raises(RequestError, match=says):
        read_workers(text, CARDS, None)


def test_a_resource_that_no_backend_is_named_like_wants_its_device():
    with pytest.raises(RequestError, match="NPU=COUNT@DEVICE"):
        read_workers("NPU=1", {"NPU": 1.0}, None)


def test_threads_are_asked_for_because_ray_gives_one_without():
    assert placement(Kind("CPU", 1, "cpu"), None)["num_cpus"] == 1
    assert placement(Kind("CPU", 1, "cpu"), 4)["num_cpus"] == 4
    assert placement(Kind("GPU", 1, "gpu"), None)["num_gpus"] == 1
    card = placement(Kind("HPU", 1, "hpu"), 2)
    assert card["resources"] == {"HPU": 1} and card["num_cpus"] == 0
    assert card["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
