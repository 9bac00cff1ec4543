"""A node of three is lost for good: the job goes on with the other two, under torchrun, and completes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sentinel.errors import EXIT_LEFT_OUT
from sentinel.store import History
from tests.cluster.job import SECRET, free_address
from tests.programs.saving_nodes import list_written
from tests.programs.shrinking_nodes import EVERY
from tests.supervise.test_supervised import RUN
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]

NODES, LOST = 3, 1
LIMIT_SECONDS = 300.0
START_SECONDS = 120.0


def start_node(root: Path, node: int, master: str, meeting: str) -> subprocess.Popen[str]:
    """Start `sentinel run -- torchrun` of one node, which has a runtime directory and a history of its own."""
    torchrun = (
        "-m torch.distributed.run --nnodes {nodes} --node-rank {node_rank} --nproc-per-node 1 --rdzv-id job"
        f" --master-addr 127.0.0.1 --master-port {master.rpartition(':')[2]} -m tests.programs.shrinking_nodes"
    )
    command = [*RUN, "--restarts", "3", "--allow-shrink", "2", "--", sys.executable, *torchrun.split(), str(root)]
    environment = {
        **os.environ, "SENTINEL_NODES": str(NODES), "SENTINEL_NODE_RANK": str(node), "OMP_NUM_THREADS": "1",
        "SENTINEL_RUNTIME": str(root / f"run{node}"), "SENTINEL_STATE": str(root / f"state{node}"),
        "SENTINEL_CLUSTER": meeting, "SENTINEL_CLUSTER_SECRET": SECRET, "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def lose_node(root: Path, node: int, supervisor: subprocess.Popen[str]) -> None:
    """Kill everything of a node: `sentinel run`, ranks and daemon."""
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


def test_two_of_three_nodes_complete_the_job_when_one_is_lost_though_it_is_started_again(private_places: Path) -> None:
    """The lost node is started again too late, and alone."""
    master, meeting = free_address(), free_address()
    snapshots = private_places / "snapshots"
    nodes = [start_node(private_places, node, master, meeting) for node in range(NODES)]
    try:
        written = f"a snapshot of all nodes after step {EVERY}"
        until(lambda: max(list_written({snapshots}, NODES), default=0) > EVERY, written, seconds=START_SECONDS)
        lose_node(private_places, LOST, nodes[LOST])
        until((private_places / "left.0").exists, "the others to go on", seconds=LIMIT_SECONDS)
        nodes[LOST] = start_node(private_places, LOST, master, meeting)
        late = nodes[LOST].communicate(timeout=LIMIT_SECONDS)[1]
        (private_places / "end").touch()
        said = [node.communicate(timeout=LIMIT_SECONDS)[1] for number, node in enumerate(nodes) if number != LOST]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, EXIT_LEFT_OUT, 0], said
    assert "torchrun met a job of 2 nodes at its address" in late
    ranks = [json.loads((private_places / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["node"] for rank in ranks] == [["2", "0", "0"], ["2", "1", "2"]], "no gap in ranks"
    weights = (private_places / "weights.0").read_text().split()
    before = dict(zip(weights[::2], weights[1::2], strict=True))
    for rank in ranks:
        assert rank["start"] > EVERY
        assert rank["began"] == before[str(rank["start"] - 1)], "what all three had after that step"
        assert rank["ended"] == ranks[0]["ended"]
    assert [(rank["world"], rank["start"]) for rank in ranks] == [(2, ranks[0]["start"])] * 2
    for words in said:
        assert "Node 1 cannot be waited for: the job goes on with 2 of 3 nodes" in words
        assert re.search(r"the run is complete, after 1 restart", words)
    (history,) = (private_places / "state0").rglob("*.sqlite")
    with History(history) as kept:
        assert [event.detail["nodes"] for event in kept.events("nodes left out")] == [[LOST]]
        assert [number for number, *_ in kept.attempts()] == [0, 1]
