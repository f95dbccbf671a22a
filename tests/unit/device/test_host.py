"""What a process may use of its machine, read from trees of control groups as systems have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lantern_accel.device import host

MIB = 2**20
NONE = "9223372036854771712"  # what the first version says where there is no limit


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write the files that a system has."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def second(root: Path, path: str = "/", **files: str) -> Path:
    """Write a machine with the second version; names have ``__`` for ``/`` and ``_`` for ``.``."""
    given = {f"sys/fs/cgroup/{k.replace('__', '/').replace('_', '.')}": v for k, v in files.items()}
    return machine(root, f"0::{path}", given)


def first(root: Path, path: str, **files: str) -> Path:
    """Write a machine with the first version, its controllers where Docker has them."""
    cgroup = f"4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/"
    return machine(root, cgroup, {f"sys/fs/cgroup/{k}": v for k, v in files.items()})


def test_a_machine_without_groups_has_no_limits(tmp_path):
    assert host.cpu_quota(tmp_path) is None and host.memory_left(tmp_path) is None
    assert host.memory_bytes(tmp_path) == host.memory_bytes(second(tmp_path / "v2"))
    assert host.cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_tightest_group_of_the_second_version_counts(tmp_path):
    root = second(
        tmp_path,
        "/pods/one/app",
        pods__cpu_max="max 100000",
        pods__memory_max=str(300 * MIB),
        pods__memory_current=str(250 * MIB),
        pods__memory_stat=f"anon 5\ninactive_file {60 * MIB}\nactive_file {10 * MIB}",
        pods__one__cpu_max="150000 100000",
        pods__one__memory_max="max",
        pods__one__app__cpu_max="400000 100000",
        pods__one__app__memory_max=str(500 * MIB),
        pods__one__app__memory_current=str(100 * MIB),
    )
    assert host.cpu_quota(root) == 1.5
    assert host.memory_bytes(root) == 300 * MIB
    # Of the outer group others use most, and page cache is given back: 300 - (250 - 70).
    assert host.memory_left(root) == 120 * MIB


def test_the_tightest_group_of_the_first_version_counts(tmp_path):
    root = first(
        tmp_path,
        "/docker/abc/inner",
        **{
            "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "25000",
            "cpu,cpuacct/docker/abc/inner/cpu.cfs_quota_us": "-1",
            "memory/docker/memory.limit_in_bytes": NONE,
            "memory/docker/abc/memory.limit_in_bytes": str(200 * MIB),
            "memory/docker/abc/memory.usage_in_bytes": str(150 * MIB),
            "memory/docker/abc/memory.stat": f"total_inactive_file {20 * MIB}\ninactive_file 1",
            "memory/docker/abc/memory.memsw.limit_in_bytes": str(100 * MIB),
            "memory/docker/abc/inner/memory.limit_in_bytes": NONE,
        },
    )
    assert host.cpu_quota(root) == 2.0
    assert host.memory_bytes(root) == 200 * MIB
    assert host.memory_left(root) == 70 * MIB
    groups = tmp_path / "sys/fs/cgroup"
    groups.joinpath("cpu,cpuacct").rename(groups / "cpuacct,cpu")
    assert host.cpu_quota(root) is None
    (groups / "cpu").symlink_to("cpuacct,cpu")
    assert host.cpu_quota(root) == 2.0


def test_limits_of_groups_that_a_container_does_not_see_are_its_own(tmp_path):
    inside = {
        "cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": NONE,
        "memory/memory.stat": f"hierarchical_memory_limit {64 * MIB}",
    }
    for number, path in enumerate(("/docker/abc", "/../other")):
        root = first(tmp_path / str(number), path, **inside)
        assert host.cpu_quota(root) == 1.0
        assert host.memory_bytes(root) == 64 * MIB
    root = second(tmp_path / "v2", "/", cpu_max="50000 100000", memory_max=str(64 * MIB))
    assert (host.cpu_quota(root), host.memory_bytes(root)) == (0.5, 64 * MIB)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("10000", 1), ("100000", 1), ("140000", 1), ("150000", 2), ("240000", 2), ("9900000", 8)],
)
def test_a_fractional_quota_is_rounded_to_the_nearest_thread(tmp_path, monkeypatch, quota, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert host.cores(second(tmp_path, cpu_max=f"{quota} 100000")) == threads


def test_what_cannot_be_read_limits_nothing(tmp_path):
    root = second(tmp_path, "/a", cpu_max="none of these", memory_max="-5", a__cpu_max="0 0")
    assert host.cpu_quota(root) is None and host.memory_left(root) is None


def test_torch_follows_a_quota_and_not_where_the_user_has_said_a_number(tmp_path, monkeypatch):
    root = second(tmp_path, cpu_max="100000 100000")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        host.limit_threads(root)
        assert torch.get_num_threads() == 2
        for name in host.OWN_NUMBER:
            monkeypatch.delenv(name, raising=False)
        host.limit_threads(root)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert host.described_threads(1, root) == "1 thread (a quota of 1 core)"
    assert host.described_threads(2, tmp_path / "none") == "2 threads"
