"""Control groups of both kernel interfaces, against folders that look like theirs."""

from __future__ import annotations

import pytest

from fusionllm.errors import UserError
from fusionllm.testbed.cgroups import Groups, Place, find_places


def mounts(root, version: int) -> str:
    if version == 2:
        return f"30 25 0:26 / {root} rw,nosuid - cgroup2 cgroup rw\n"
    names = ("cpu", "memory", "cpuacct")
    return "".join(f"3{i} 25 0:2{i} / {root}/{n} rw - cgroup cgroup rw,{n}\n" for i, n in enumerate(names))


def test_version_one_has_a_hierarchy_per_controller(tmp_path):
    for name in ("cpu", "memory/ours", "cpuacct"):
        (tmp_path / name).mkdir(parents=True)
    places = find_places(mounts(tmp_path, 1), "4:memory:/ours\n2:cpuacct:/\n1:cpu:/elsewhere\n")
    assert places == {
        "cpu": Place(1, f"{tmp_path}/cpu"),  # our own group is not mounted: the top
        "memory": Place(1, f"{tmp_path}/memory/ours"),
        "cpuacct": Place(1, f"{tmp_path}/cpuacct"),
    }
    groups = Groups("bed", ["a0"], places)
    groups.create()
    groups.set_cpu("a0", 0.25)
    groups.set_memory("a0", 1 << 30)
    cpu, memory = tmp_path / "cpu/fusionllm-bed/a0", tmp_path / "memory/ours/fusionllm-bed/a0"
    assert (cpu / "cpu.cfs_period_us").read_text() == "20000" and (cpu / "cpu.cfs_quota_us").read_text() == "5000"
    assert (memory / "memory.limit_in_bytes").read_text() == str(1 << 30)
    groups.set_cpu("a0", 0)
    assert (cpu / "cpu.cfs_quota_us").read_text() == "-1"
    groups.favour(True)
    assert (cpu.parent / "cpu.shares").read_text() == "65536"
    groups.favour(False)
    assert (cpu.parent / "cpu.shares").read_text() == "1024"
    assert (cpu.parent / "_emulator/cpu.shares").read_text() == "65536"  # before hosts without a limit, always
    (tmp_path / "cpuacct/fusionllm-bed/a0/cpuacct.usage").write_text("1500000000\n")
    assert groups.cpu_seconds("a0") == 1.5
    assert len(groups.entrances("a0")) == 3


def test_version_two_has_one_hierarchy_with_the_controllers_it_offers(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    places = find_places(mounts(tmp_path, 2), "0::/\n")
    assert places == dict.fromkeys(("cpu", "memory", "cpuacct"), Place(2, str(tmp_path)))
    groups = Groups("bed", ["a0"], places)
    groups.create()
    groups.set_cpu("a0", 0.25)
    groups.set_memory("a0", 0)
    own = tmp_path / "fusionllm-bed/a0"
    assert (own / "cpu.max").read_text() == "5000 20000" and (own / "memory.max").read_text() == "max"
    groups.set_cpu("a0", 0)
    assert (own / "cpu.max").read_text() == "max 20000"
    groups.favour(True)
    assert (own.parent / "cpu.weight").read_text() == "6400"
    (own / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert groups.cpu_seconds("a0") == 2.5 and groups.entrances("a0") == [str(own / "cgroup.procs")]


def test_a_kernel_without_the_controller_is_said_to_be_one(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    places = find_places(mounts(tmp_path, 2), "0::/\n")
    assert places == {}
    with pytest.raises(UserError, match=r"no cpu controller .*offers none.*remove cpu"):
        Groups("bed", ["a0"], places).set_cpu("a0", 0.5)
