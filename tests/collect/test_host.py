"""The host's figures by psutil, and a container's own limit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sentinel.collect.host import Host, read_memory_limit


def test_the_cpu_share_comes_with_the_second_reading() -> None:
    host = Host()
    assert "host_cpu_ratio" not in host.read().values
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    with ThreadPoolExecutor(1) as another:
        values = another.submit(host.read).result().values
    assert 0.0 < values["host_cpu_ratio"] <= 1.0
    assert values["host_memory_total_bytes"] == psutil.virtual_memory().total
    assert 0 < values["host_memory_available_bytes"] <= values["host_memory_total_bytes"]


@pytest.mark.parametrize(
    ("cgroup", "files", "seen"),
    [
        ("0::/", {"memory.current": "1048576\n", "memory.max": "4194304\n"}, (1048576.0, 4194304.0)),
        (
            "0::/",
            {
                "memory.current": "1048576\n",
                "memory.max": "4194304\n",
                "memory.stat": "anon 7\ninactive_file 48576\nactive_file 9\n",
            },
            (1000000.0, 4194304.0),
        ),
        ("0::/", {"memory.current": "1048576\n", "memory.max": "max\n"}, ()),
        ("4:memory:/", {"memory/memory.usage_in_bytes": "7", "memory/memory.limit_in_bytes": "9"}, (7.0, 9.0)),
        (
            "4:memory:/",
            {"memory/memory.usage_in_bytes": "7", "memory/memory.limit_in_bytes": "9223372036854771712"},
            (),
        ),
        (
            "0::/slurm/job_7/step_0/task_0",
            {
                "slurm/job_7/memory.current": "95",
                "slurm/job_7/memory.max": "100",
                "slurm/job_7/step_0/memory.current": "40",
                "slurm/job_7/step_0/memory.max": "80",
            },
            (95.0, 100.0),
        ),
        ("", {}, ()),
    ],
)
def test_the_nearest_limit_of_a_container_or_a_job_is_seen(
    tmp_path: Path, cgroup: str, files: dict[str, str], seen: tuple[float, ...]
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {
        "proc/7/cgroup": cgroup,
        "proc/8/cgroup": "0::/",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    values = read_memory_limit([7, 8, 9], tmp_path)
    names = ("container_memory_used_bytes", "container_memory_limit_bytes")
    assert tuple(values[name] for name in names if name in values) == seen
