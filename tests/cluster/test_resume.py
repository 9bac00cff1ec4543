"""`sentinel.resume` on several nodes takes the newest snapshot that all ranks hold, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.job import free_address
from tests.rollback.test_disk import write_two

PROGRAM = Path(__file__).parents[1] / "programs" / "resuming_nodes.py"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """A folder with snapshots of steps 5 and 10."""
    folder = tmp_path / "snapshots"
    write_two(folder)
    return folder


def resume(*folders: Path) -> list[str]:
    """Run one node for each folder, all at once; return what each rank says."""
    port = free_address().rpartition(":")[2]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    nodes = []
    for node in range(len(folders)):
        torchrun = (
            f"-m torch.distributed.run --nnodes {len(folders)} --node-rank {node} --nproc-per-node 1"
            f" --master-addr 127.0.0.1 --master-port {port}"
        )
        command = [sys.executable, *torchrun.split(), str(PROGRAM), *map(str, folders)]
        nodes.append(subprocess.Popen(command, env=environment))
    assert [node.wait(200) for node in nodes] == [0] * len(folders)
    return [(folder.parent / f"said.{rank}").read_text() for rank, folder in enumerate(folders)]


@pytest.mark.slow
def test_two_nodes_take_the_newest_that_both_hold(snapshots: Path, tmp_path: Path) -> None:
    one, other = resume(snapshots, snapshots)
    assert one == other
    assert one.split()[0] == "11"
    copy = Path(shutil.copytree(snapshots, tmp_path / "disk of node 1"))
    assert resume(snapshots, copy) == [one, other], "on disks of their own"


@pytest.mark.slow
def test_a_node_that_lacks_the_newest_is_named_and_no_older_one_is_taken(snapshots: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(snapshots, tmp_path / "disk of node 1"))
    shutil.rmtree(copy / "step-00000010")
    one, other = resume(snapshots, copy)
    assert "rank 1 does not see" in one
    assert "step-00000010, which other ranks do" in one
    assert one == other
    assert (snapshots / "step-00000010").exists()
