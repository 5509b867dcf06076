"""How much memory counts as available, by files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranktape.storage.places.backend import available_nbytes

GIB = 2**30


def machine(root: Path, *, cgroup: str, groups: dict[str, dict[str, str]], available: int = 64 * GIB) -> Path:
    """A root with the files of `/proc` and `/sys` that are read."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", "proc/self/cgroup": cgroup}
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": value for name, value in values.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(limit: int | str, usage: int, *, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5\nfile {cache}\ninactive_file {cache}\nactive_file 7\n",
    }


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**30}.__getitem__)


def test_page_cache_is_available(tmp_path: Path) -> None:
    groups = {"": version_2(8 * GIB, 8 * GIB - 1000, cache=7 * GIB)}
    assert available_nbytes(root=machine(tmp_path, cgroup="0::/\n", groups=groups)) == 7 * GIB + 1000


def test_the_cgroup_of_the_process_and_those_around_it_limit(tmp_path: Path) -> None:
    # As Slurm makes them on a host: the limit is at the job, not at the root and not at the step.
    groups = {
        "system.slice/job_7": version_2(16 * GIB, 4 * GIB),
        "system.slice/job_7/step_0": version_2("max", 3 * GIB),
        "system.slice/job_8": version_2(GIB, GIB),
    }
    root = machine(tmp_path, cgroup="0::/system.slice/job_7/step_0\n", groups=groups)
    assert available_nbytes(root=root) == 12 * GIB


def test_a_path_from_outside_of_the_container_means_its_own_top(tmp_path: Path) -> None:
    groups = {"": version_2(2 * GIB, GIB)}
    root = machine(tmp_path, cgroup="0::/kubepods/pod1/box\n", groups=groups)
    assert available_nbytes(root=root) == GIB
    outside = machine(tmp_path / "other", cgroup="0::/../box\n", groups=groups)
    assert available_nbytes(root=outside) == GIB


def test_version_1_of_the_interface(tmp_path: Path) -> None:
    values = {
        "memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    root = machine(tmp_path, cgroup="9:cpu,cpuacct:/x\n4:memory:/box\n", groups={"memory/box": values})
    assert available_nbytes(root=root) == 2 * GIB


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert available_nbytes(root=machine(tmp_path, cgroup="", groups={}, available=3 * GIB)) == 3 * GIB
    assert available_nbytes(root=tmp_path / "elsewhere") == 4096 * 2**30


def test_more_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", groups={"": version_2(GIB, 2 * GIB, cache=3)})
    assert available_nbytes(root=root) == 0
