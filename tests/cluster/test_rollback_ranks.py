"""Real ranks of torchrun on two nodes, each with its own daemon, go back together: to the same step, or none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.client import ask_daemon
from tests.cluster.job import SECRET, free_address
from tests.hang.processes import until
from tests.programs import rolling

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

NODES = 2
LIMIT_SECONDS = 240.0


class Job:
    """torchrun on two nodes, each with a runtime directory and a history of its own."""

    def __init__(self, root: Path, *, way: str = "ddp", meeting: str) -> None:
        self.root = root
        rules = root / "rules.yaml"
        rules.write_text(rolling.RULES)
        master = free_address()
        self.nodes = []
        for node in range(NODES):
            torchrun = (
                f"-m torch.distributed.run --nnodes {NODES} --node-rank {node} --nproc-per-node 1 --rdzv-id job"
                f" --master-addr 127.0.0.1 --master-port {master.rpartition(':')[2]} -m tests.programs.rolling_nodes"
            )
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RULES": str(rules),
                "SENTINEL_RUNTIME": str(root / f"run{node}"), "SENTINEL_STATE": str(root / f"state{node}"),
                "SENTINEL_CLUSTER": meeting, "SENTINEL_CLUSTER_SECRET": SECRET,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            }  # fmt: skip
            with (root / f"said{node}").open("w") as said:
                command = [sys.executable, *torchrun.split(), way, str(root)]
                self.nodes.append(subprocess.Popen(command, env=environment, stderr=said))

    def status(self, node: int) -> dict[str, Any]:
        """What `sentinel status` shows of the run on a node; empty as long as nothing is watched."""
        for socket in (self.root / f"run{node}").glob("*/*.sock"):
            for run in ask_daemon(socket, "status")["runs"]:
                found: dict[str, Any] = run
                return found
        return {}

    def said(self, node: int) -> str:
        """On the terminal of a node."""
        return (self.root / f"said{node}").read_text()

    def judges(self) -> bool:
        """Whether each node judges steps."""
        return all("loss" in self.status(node).get("values", {}) for node in range(NODES))

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end; what each rank came to."""
        statuses = [node.wait(LIMIT_SECONDS) for node in self.nodes]
        assert statuses == [0] * NODES, [self.said(node) for node in range(NODES)]
        return [json.loads((self.root / f"{rank}.json").read_text()) for rank in range(NODES)]

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            node.wait()


def test_a_fault_that_one_node_sees_rolls_back_the_ranks_of_all(private_places: Path) -> None:
    job = Job(private_places, meeting=free_address())
    try:
        until(lambda: "rollback is armed on all ranks" in job.said(0), "the nodes to meet")
        until(job.judges, "steps to be judged")
        (private_places / "break").touch()
        ranks = job.finish()
    finally:
        job.close()
    assert "rollback is armed once all nodes have met" in job.said(0)
    ((to, at),) = ranks[0]["rolled"]
    assert ranks[1]["rolled"] == [[to, at]]
    assert to < ranks[0]["broken"] < at
    assert all(rank["same"] for rank in ranks)
    assert f"rolled back to step {to} at the exit of step {at}" in job.said(1)
