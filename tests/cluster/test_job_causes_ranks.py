"""Real ranks of torchrun on two nodes: a fault that shows only between nodes is one page naming its rank and node."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.job import SECRET, free_address
from tests.hang.jobs import PROGRAM
from tests.hang.processes import SOON
from tests.notify.consumer import Consumer

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

PAGE_SECONDS = 200.0
"""Seconds for the first page: torch starts twice, on a machine that others use."""
QUIET_SECONDS = 10.0
"""Seconds in which a second page would come: receivers get pages at once."""
SETTINGS = (
    "[daemon]\nhttp = 'off'\n[grouping]\nwait = '0s'\n[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
)


SHARDED = PROGRAM.with_name("sharded_norm.py")
NORMS = """
group: mine
signals: {whole_norm: the gradient norm over all ranks}
rules:
  - alert: NormIsWhole
    let:
      sampled: age(grad_norm) == 0 and age(whole_norm) == 0
      norm: across(grad_norm_sharded, "norm")
    expr: count(sampled and abs(norm - whole_norm) < 1e-4 * whole_norm, 500) >= 20
    severity: critical
  - alert: NormIsPart
    let: {sampled: age(grad_norm) == 0 and age(whole_norm) == 0}
    expr: sampled and across(grad_norm_sharded, "norm") < 0.9 * whole_norm
    severity: critical
"""


def waiting_ranks(kind: str, root: Path, ops: Consumer) -> contextlib.AbstractContextManager[None]:
    """Run `tests/programs/waiting_ranks.py` with two ranks on each node."""
    return torchrun_on_two_nodes([PROGRAM, kind, root / "go-on"], root, ops, SOON)


@contextlib.contextmanager
def torchrun_on_two_nodes(program: Sequence[str | Path], root: Path, ops: Consumer, rules: str) -> Iterator[None]:
    """Run two ranks on each node, and for each node a daemon and a history of its own; all are killed at the end."""
    file, settings, (master, meeting) = root / "rules.yaml", root / "sentinel.toml", (free_address(), free_address())
    file.write_text(rules)
    settings.write_text(SETTINGS)
    nodes = []
    for node in range(2):
        torchrun = (
            f"-m torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node 2 --rdzv-id job"
            f" --master-addr 127.0.0.1 --master-port {master.rpartition(':')[2]}"
        )
        environment = {
            **os.environ, "SENTINEL_RULES": str(file), "SENTINEL_CONFIG": str(settings), "OPS": ops.url,
            "SENTINEL_RUNTIME": str(root / f"run{node}"), "SENTINEL_STATE": str(root / f"state{node}"),
            "SENTINEL_CLUSTER": meeting, "SENTINEL_CLUSTER_SECRET": SECRET,
        }  # fmt: skip
        command = [sys.executable, *torchrun.split(), *map(str, program)]
        nodes.append(subprocess.Popen(command, env=environment, cwd="/"))
    try:
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(node.pid).children(recursive=True):
                    each.kill()  # ranks are sessions of their own
            node.kill()
            node.wait()


def collect_pages(ops: Consumer) -> list[dict[str, Any]]:
    """Return the first page, and those that come soon after it."""
    found = [ops.received.get(timeout=PAGE_SECONDS)]
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(ops.received.get(timeout=QUIET_SECONDS))
    return found


def test_a_rank_of_the_other_node_that_never_comes_is_one_page_with_its_name(
    ops: Consumer, private_places: Path
) -> None:
    with waiting_ranks("user-code", private_places, ops):
        (page,) = collect_pages(ops)
    (alert,) = page["alerts"]
    assert alert["labels"]["alertname"] == "Hang"
    assert "rank 3 never came to all_reduce of" in str(alert)
    assert "in wait_for_the_file; rank 3 is on node 1" in str(alert)


def test_a_rank_that_dies_on_the_other_node_is_the_cause_of_the_one_page(ops: Consumer, private_places: Path) -> None:
    with waiting_ranks("killed", private_places, ops):
        pages = collect_pages(ops)
    assert len({page["groupKey"] for page in pages}) == 1
    first = pages[0]["alerts"][0]
    assert first["labels"]["alertname"] == "RankLost"
    assert "rank 3 was ended by SIGKILL" in str(first)
    assert "(node 1)" in str(first)


def test_replicas_that_differ_between_nodes_alone_are_found(ops: Consumer, private_places: Path) -> None:
    with waiting_ranks("node-drift", private_places, ops):
        (page,) = collect_pages(ops)
    (alert,) = page["alerts"]
    assert alert["labels"]["alertname"] == "ReplicaDivergence"
    assert "ranks 0, 1 hold other parameters than ranks 2, 3, after step" in str(alert)


def test_a_rule_over_the_norm_of_shards_gets_that_of_all_nodes(ops: Consumer, private_places: Path) -> None:
    stop = private_places / "stop"
    with torchrun_on_two_nodes([SHARDED, stop], private_places, ops, NORMS):
        pages = collect_pages(ops)
        stop.touch()
    assert [page["alerts"][0]["labels"]["alertname"] for page in pages] == ["NormIsWhole"]
    assert pages[0]["alerts"][0]["annotations"]["summary"].endswith("(all nodes)")
