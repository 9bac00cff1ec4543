"""The host's figures by psutil, and a container's own limit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sentinel.collect.host import Host


def test_the_cpu_share_comes_with_the_second_reading(tmp_path: Path) -> None:
    host = Host(tmp_path)
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
    ("files", "seen"),
    [
        (
            {"memory.current": "1048576\n", "memory.max": "4194304\n"},
            {"container_memory_used_bytes": 1048576.0, "container_memory_limit_bytes": 4194304.0},
        ),
        (
            {
                "memory.current": "1048576\n",
                "memory.max": "4194304\n",
                "memory.stat": "anon 7\ninactive_file 48576\nactive_file 9\n",
            },
            {"container_memory_used_bytes": 1000000.0, "container_memory_limit_bytes": 4194304.0},
        ),
        ({"memory.current": "1048576\n", "memory.max": "max\n"}, {}),
        (
            {"memory/memory.usage_in_bytes": "7", "memory/memory.limit_in_bytes": "9"},
            {"container_memory_used_bytes": 7.0, "container_memory_limit_bytes": 9.0},
        ),
        ({"memory/memory.usage_in_bytes": "7", "memory/memory.limit_in_bytes": "9223372036854771712"}, {}),
        ({}, {}),
    ],
)
def test_the_limit_of_a_container_is_seen(tmp_path: Path, files: dict[str, str], seen: dict[str, float]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    values = Host(tmp_path).read().values
    assert {name: value for name, value in values.items() if name.startswith("container")} == seen
