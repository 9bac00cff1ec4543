"""A node of three is lost for good: the job goes on with the other two, under torchrun, and completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sentinel.store import History
from tests.cluster.job import SECRET, free_address
from tests.supervise.test_supervised import PROGRAM, RUN
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]

NODES, LOST = 3, 1
LIMIT_SECONDS = 300.0
START_SECONDS = 120.0


def start_node(root: Path, node: int, master: str, meeting: str) -> subprocess.Popen[str]:
    """`sentinel run -- torchrun` of one node, each with a runtime directory and a history of its own."""
    torchrun = (
        "-m torch.distributed.run --nnodes {nodes} --node-rank {node_rank} --nproc-per-node 1 --rdzv-id job"
        f" --master-addr 127.0.0.1 --master-port {master.rpartition(':')[2]}"
    )
    command = [*RUN, "--restarts", "3", "--allow-shrink", "2", "--", sys.executable, *torchrun.split()]
    environment = {
        **os.environ, "SENTINEL_NODES": str(NODES), "SENTINEL_NODE_RANK": str(node), "OMP_NUM_THREADS": "1",
        "SENTINEL_RUNTIME": str(root / f"run{node}"), "SENTINEL_STATE": str(root / f"state{node}"),
        "SENTINEL_CLUSTER": meeting, "SENTINEL_CLUSTER_SECRET": SECRET,
    }  # fmt: skip
    return subprocess.Popen(
        [*command, str(PROGRAM), str(root / "saved"), "none"], env=environment, stderr=subprocess.PIPE, text=True
    )


def lose_node(root: Path, node: int, supervisor: subprocess.Popen[str]) -> None:
    """All of it is gone: `sentinel run`, ranks and daemon."""
    supervisor.kill()
    runtime = str(root / f"run{node}")

    def end_processes() -> bool:
        left = [one for one in psutil.process_iter() if _find_runtime(one) == runtime]
        for process in left:
            process.kill()
        return not left

    until(end_processes, f"the processes of node {node} to be gone")
    supervisor.communicate()


def _find_runtime(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get("SENTINEL_RUNTIME", "")
    except psutil.Error:
        return ""


def test_two_of_three_nodes_complete_the_job_when_one_is_lost_for_good(private_places: Path) -> None:
    folder = private_places / "saved"
    folder.mkdir()
    master, meeting = free_address(), free_address()
    nodes = [start_node(private_places, node, master, meeting) for node in range(NODES)]
    try:
        until((folder / "50.pt").exists, "the job to train", seconds=START_SECONDS)
        lose_node(private_places, LOST, nodes[LOST])
        said = [node.communicate(timeout=LIMIT_SECONDS)[1] for number, node in enumerate(nodes) if number != LOST]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, -9, 0], said
    starts = [(folder / f"starts.{rank}").read_text().split() for rank in range(NODES)]
    assert [start[::2] for start in starts] == [["0", "1"], ["0", "1"], ["0"]], "ranks have no gaps"
    assert starts[0] == starts[1]
    assert int(starts[0][-1]) >= 50, "it goes on from what it saved"
    (history,) = (private_places / "state0").rglob("*.sqlite")
    with History(history) as kept:
        assert [event.detail["nodes"] for event in kept.events("nodes left out")] == [[LOST]]
        assert [number for number, *_ in kept.attempts()] == [0, 1]
    for words in said:
        assert "Node 1 cannot be waited for: the job goes on with 2 of 3 nodes" in words
        assert re.search(r"the run is complete, after 1 restart", words)
