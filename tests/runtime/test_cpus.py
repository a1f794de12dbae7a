"""CPU limits of control groups, on trees of files such as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pinscher.runtime import cpus, kernels

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
OTHER += "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(cpus, "allowed", lambda: 64)


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    written = {"proc/self/cgroup": groups, "proc/self/mountinfo": OTHER + mounts}
    written |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200000 100000\n", 2),
        ("max 100000\n", 64),
        ("250000 100000\n", 2),  # half a CPU more would have all of them stopped for a while
        ("50000 100000\n", 1),
        ("10000000 100000\n", 64),  # more than there are
        ("400000\n", 64),
        ("0 100000\n", 64),
        ("100000 0\n", 64),
        ("nonsense\n", 64),
        ("", 64),
    ],
)
def test_a_container_of_version_2(tmp_path, many, text, expected):
    assert cpus.sustained(tree(tmp_path, "0::/\n", V2.format(root="/"), {"cpu.max": text})) == expected


def test_the_tightest_group_around_counts(tmp_path, many):
    files = {"cpu.max": "max 100000", "pod/cpu.max": "300000 100000", "pod/inner/cpu.max": "800000 100000"}
    assert cpus.sustained(tree(tmp_path, "0::/pod/inner\n", V2.format(root="/"), files)) == 3


def test_a_group_that_is_mounted_from_its_middle(tmp_path, many):
    files = {"cpu.max": "500000 100000", "inner/cpu.max": "400000 100000"}
    assert cpus.sustained(tree(tmp_path, "0::/pod/inner\n", V2.format(root="/pod"), files)) == 4


@pytest.mark.parametrize("group", ["/elsewhere", "/../outside"])
def test_a_group_that_is_not_seen_from_here(tmp_path, many, group):
    """A container may see its own limits at the top, but the host's name of its group."""
    root = tree(tmp_path, f"0::{group}\n", V2.format(root="/pod"), {"cpu.max": "300000 100000"})
    assert cpus.sustained(root) == 3


@pytest.mark.parametrize(("quota", "expected"), [("150000", 3), ("-1", 64), ("20000", 1)])
def test_version_1(tmp_path, many, quota, expected):
    groups = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/docker/x\n"
    files = {"cpu,cpuacct/docker/x/cpu.cfs_quota_us": quota, "cpu,cpuacct/docker/x/cpu.cfs_period_us": "50000"}
    assert cpus.sustained(tree(tmp_path, groups, V1.format(root="/"), files)) == expected


def test_both_versions_at_once(tmp_path, many):
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "700000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    root = tree(tmp_path, "4:cpu,cpuacct:/\n0::/\n", V1.format(root="/") + V2.format(root="/"), files)
    assert cpus.sustained(root) == 7


def test_a_system_without_control_groups(tmp_path):
    assert cpus.sustained(tmp_path) == cpus.allowed()
    tree(tmp_path, "what is this\n", "neither is this\n", {})
    assert cpus.sustained(tmp_path) == cpus.allowed()


def test_here_it_is_some_of_those_that_are_allowed():
    assert 1 <= cpus.sustained() <= cpus.allowed() == len(os.sched_getaffinity(0))


def test_the_limit_sets_the_default_number_of_threads(monkeypatch):
    """Who asks for more gets more: a limit is one of time, and short requests may stay below it."""
    monkeypatch.setattr(cpus, "allowed", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for limit in (1, 3, 64):
        monkeypatch.setattr(cpus, "sustained", lambda limit=limit: limit)
        assert kernels.threads_of(None) == limit
        assert kernels.threads_of(8) == 8
