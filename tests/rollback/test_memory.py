"""Preflight check: the memory that snapshots need against the memory that is left."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from sentinel import wire
from sentinel.errors import RollbackError
from sentinel.hooks.core.host_memory import memory_left, memory_limit
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.snapshot import host_buffer
from sentinel.hooks.snapshot.host_buffer import Budget, estimate_bytes
from tests.rollback.training import OPTIMIZERS, Training, batches

MB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def unified(path: str, limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    directory = f"sys/fs/cgroup{path}"
    return {
        f"{directory}/memory.max": limit,
        f"{directory}/memory.current": str(current),
        f"{directory}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


MEMINFO = {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {4096 * 1024} kB"}


def test_without_cgroups_the_memory_left_is_the_machines(tmp_path: Path) -> None:
    assert memory_left(write(tmp_path, MEMINFO)) == (4096 * MB, "MemAvailable")


def test_nothing_is_refused_where_the_system_does_not_tell_its_memory(tmp_path: Path) -> None:
    assert memory_left(tmp_path)[0] == float("inf")
    Budget(2, tmp_path)(1 << 60)


def test_the_tightest_cgroup_above_counts_and_page_cache_is_not_used_up(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/slurm/job7/step0",
        **unified("/slurm/job7/step0", "max", 100 * MB),
        **unified("/slurm/job7", str(1000 * MB), 900 * MB, inactive=300 * MB),
        **unified("/slurm", str(3000 * MB), 1000 * MB),
    }
    assert memory_left(write(tmp_path, files)) == (400 * MB, f"the limit of {tmp_path}/sys/fs/cgroup/slurm/job7")


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {**MEMINFO, "proc/self/cgroup": "0::/kubepods/pod1/abc", **unified("", str(512 * MB), 12 * MB)}
    assert memory_left(write(tmp_path, files))[0] == 500 * MB


def test_ranks_of_a_node_share_its_memory(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO)
    Budget(2, tmp_path).expect(1000 * MB)
    with pytest.raises(RollbackError, match=r"1.05 GB for each of 4 ranks need 8.39 GB"):
        Budget(2, tmp_path).expect(1000 * MB, 4)


def test_limits_of_cgroups_of_version_1(tmp_path: Path) -> None:
    directory = "sys/fs/cgroup/memory/docker/abc"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n0::/",
        f"{directory}/memory.limit_in_bytes": str(256 * MB),
        f"{directory}/memory.usage_in_bytes": str(200 * MB),
        f"{directory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MB}",
    }
    assert memory_left(write(tmp_path, files))[0] == 106 * MB


def test_refused_with_the_figures_and_the_remedy(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/job", **unified("/job", str(1000 * MB), 0)})
    Budget(3, tmp_path)(250 * MB)
    with pytest.raises(RollbackError, match=r"keep=3 .* of 0\.31 GB need 0\.94 GB .* 1\.05 GB is left") as refusal:
        Budget(3, tmp_path)(300 * MB)
    assert "cgroup/job" in str(refusal.value)
    assert "0.13 GB more, or lower keep" in str(refusal.value)


def test_growth_is_asked_for_once(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemAvailable: 1000 kB"})
    budget = Budget(2, tmp_path)
    budget(300_000)
    budget(300_000)
    budget(350_000)
    with pytest.raises(RollbackError):
        budget(900_000)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_the_estimate_is_what_the_optimizer_then_keeps(name: str) -> None:
    """The estimate leaves out the step counters, 4 bytes for each tensor."""
    layer = torch.nn.Linear(64, 64)
    optimizer = OPTIMIZERS[name](layer.parameters())
    before = estimate_bytes(list(layer.parameters()), [optimizer], {})
    layer(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    after = estimate_bytes(list(layer.parameters()), [optimizer], {})
    assert before <= after <= before + 2 * 4


def test_the_limit_is_the_least_of_cgroup_and_machine(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job"
    write(tmp_path, {"proc/self/cgroup": "0::/job", f"{group}/memory.max": "max"})
    assert memory_limit(tmp_path) == math.inf
    write(tmp_path, {"proc/meminfo": "MemTotal: 4000 kB"})
    assert memory_limit(tmp_path) == 4000 * 1024
    write(tmp_path, {f"{group}/memory.max": "2048000", f"{group}/memory.current": "9", f"{group}/memory.stat": "x 0"})
    assert memory_limit(tmp_path) == 2048000


def test_an_unknown_optimizer_is_taken_for_adam() -> None:
    class Novel(torch.optim.SGD):
        pass

    layer = torch.nn.Linear(10, 10, bias=False, dtype=torch.bfloat16)
    assert estimate_bytes(list(layer.parameters()), [Novel(layer.parameters())], {}) == 100 * 2 + 100 * 8


def test_attach_is_refused_where_the_snapshots_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "memory_left", lambda root: (1000, "MemAvailable"))
    with pytest.raises(RollbackError, match="keep=2"):
        Training().arm()


def test_state_that_outgrew_the_memory_disarms_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    restorer, sent = training.arm(Rollback(every=2, margin=2))
    monkeypatch.setattr(host_buffer, "memory_left", lambda root: (1000, "MemAvailable"))
    with caplog.at_level(logging.ERROR):
        for batch in batches(6):
            training.step(batch)
    (line,) = caplog.messages
    assert line.startswith("rollback is disarmed, training goes on: rollback: keep=2 snapshots")
    assert restorer.held == ()
    restorer.receive(wire.Prepare(id=1, at=20, to=0))
    (refusal,) = sent
    assert not refusal.ok
    assert "keep=2" in refusal.reason
