"""Real jobs over two nodes whose snapshots go to disk: killed and started again, they go on bit-identical."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.hooks.snapshot import directory, node_parts
from tests.cluster.job import SECRET, free_address
from tests.supervise.test_supervised import RUN

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

NODES = 2
LIMIT_SECONDS = 280.0


class Job:
    """`sentinel run -- torchrun` on two nodes, until both are done."""

    def __init__(self, root: Path, way: str, ranks: int, *places: Path) -> None:
        """Run the job with `ranks` ranks on each node, whose directories for snapshots are `places`."""
        port, meeting = free_address().rpartition(":")[2], free_address()
        nodes = []
        for node in range(NODES):
            torchrun = (
                f"-m torch.distributed.run --nnodes {NODES} --node-rank {node} --nproc-per-node {ranks} --rdzv-id job"
                f" --master-addr 127.0.0.1 --master-port {port} -m tests.programs.saving_nodes"
            )
            command = [*RUN, "--restarts", "2", "--", sys.executable, *torchrun.split(), way, str(root)]
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RUNTIME": str(root / f"run{node}"),
                "SENTINEL_STATE": str(root / f"state{node}"), "SENTINEL_CLUSTER": meeting,
                "SENTINEL_CLUSTER_SECRET": SECRET, "PYTHONPATH": str(Path(__file__).parents[2]),
            }  # fmt: skip
            process = subprocess.Popen(
                [*command, *map(str, places)], env=environment, stderr=subprocess.PIPE, text=True
            )
            nodes.append(process)
        self.said = [node.communicate(timeout=LIMIT_SECONDS)[1] for node in nodes]
        self.statuses = [node.returncode for node in nodes]
        self.ranks: list[dict[str, Any]] = []
        if self.statuses == [0] * NODES:
            self.ranks = [json.loads((root / f"{rank}.json").read_text()) for rank in range(NODES * ranks)]


@pytest.mark.parametrize(("way", "ranks", "shared"), [("ddp", 2, True), ("fsdp", 1, False)])
def test_a_killed_job_goes_on_from_what_all_nodes_wrote(
    private_places: Path, way: str, ranks: int, shared: bool
) -> None:
    places = [private_places / ("snapshots" if shared else f"disk {node}") for node in range(NODES)]
    job = Job(private_places, way, ranks, *places)
    assert job.statuses == [0, 0], "\n".join(job.said)
    starts = job.ranks[0]["starts"]
    assert len(starts) == 2, starts
    assert starts[1] > 1
    for one in job.ranks:
        assert one["starts"] == starts
        assert one["same"]
    written = [node_parts.list_places(place) for place in dict.fromkeys(places)]
    assert [first for each in written for first, _ in each] == [0, ranks]
    parts = [part for each in written for _, own in each for part in directory.list_published(own)]
    assert {part.manifest.ranks for part in parts} == {tuple(range(ranks)), tuple(range(ranks, 2 * ranks))}
    assert ("a directory that all nodes share" if shared else "a disk of each node's own") in job.said[0]
