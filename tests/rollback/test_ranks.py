"""Real ranks under torchrun: rolled back together or started again, they are where they would have been, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sentinel import snapshots
from tests.programs import rolling

WAYS = ("ddp", "fsdp")
JOB_SECONDS = 280
"""Four processes that load torch on two busy cores."""

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(2 * JOB_SECONDS)]


def job(world: int, mode: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the ranks wrote, by way."""
    (folder / "rules.yaml").write_text(rolling.RULES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*launch, "-m", rolling.__name__, mode, str(folder), *WAYS],
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RULES": str(folder / "rules.yaml"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "internal fault" not in done.stderr
    assert "disarmed" not in done.stderr
    return {way: [json.loads((folder / f"{way}.{rank}.json").read_text()) for rank in range(world)] for way in WAYS}


@pytest.mark.parametrize("world", [2, 4])
def test_together_and_to_the_bit(world: int, tmp_path: Path) -> None:
    for ranks in job(world, "train", tmp_path).values():
        assert all(rank["same"] for rank in ranks), ranks
        assert len({json.dumps(rank["rolled"]) for rank in ranks}) == 1
        ((to, at),) = ranks[0]["rolled"]
        assert to < rolling.FAULT < at
    for way in WAYS:
        written(tmp_path / f"{way}-snapshots", way, world)
    for ranks in job(world, "resume", tmp_path).values():
        assert all(rank["same"] for rank in ranks), ranks
        assert 0 < ranks[0]["resumed"] <= ranks[0]["end"]


def written(place: Path, way: str, world: int) -> None:
    """What replicas share is on disk once, and each rank's own things are there."""
    snapshot = snapshots.latest(place)
    assert snapshot is not None
    assert snapshot.manifest.world_size == world
    assert len([name for name in snapshot.manifest.files if name.endswith(".distcp")]) == world
    keys = FileSystemReader(snapshot.path).read_metadata().state_dict_metadata
    others = {key.partition("/")[2] for key in keys if key.startswith("rank1/")}
    assert "skeleton" in others
    assert "random/torch" in others
    assert "buffers/1.running_mean" in others  # of its own batches
    assert not [key for key in others if key.startswith(("weights/", "optimizers"))]
    weight = "weights/0.weight" if way == "fsdp" else "rank0/weights/0.weight"
    assert len(keys[weight].chunks) == (world if way == "fsdp" else 1)
