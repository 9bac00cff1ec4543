"""Real ranks of torchrun are rolled back together, restarted, and resumed by other numbers of ranks, to the bit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.programs import rolling
from tests.rollback.training import find_latest
from tests.zygote import RANKS, TORCHRUN, run_fork

WAYS = {2: ("ddp", "fsdp"), 4: ("ddp", "fsdp", "hsdp")}
JOB_SECONDS = 280
"""Time limit of a job, in seconds: four processes load torch on two busy cores."""

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(3 * JOB_SECONDS)]


def job(world: int, folder: Path, *tasks: str) -> None:
    """Run these tasks one after the other on ranks of torchrun."""
    rules = folder / "rules.yaml"
    rules.write_text(rolling.RULES)
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", str(world)]
    done = run_fork(
        [*launch, "-m", rolling.__name__, *tasks],
        RANKS,
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RULES": str(rules),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        timeout=JOB_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "internal fault" not in done.stderr
    assert "disarmed" not in done.stderr


def said(deed: str, folder: Path, way: str, world: int) -> list[dict[str, Any]]:
    """Return what the ranks wrote, after a check that all of them found their state as expected."""
    ranks = [json.loads((folder / f"{deed}.{way}.{rank}.json").read_text()) for rank in range(world)]
    assert all(rank["same"] for rank in ranks), (deed, way, ranks)
    return ranks


def tasks(deed: str, ways: Sequence[str], folder: Path) -> list[str]:
    return [f"{deed}:{way}:{folder}" for way in ways]


def rolled_back(world: int, folder: Path) -> None:
    """Check that they trained, met the fault and were rolled back as if it had not happened."""
    for way in WAYS[world]:
        ranks = said("train", folder, way, world)
        assert len({json.dumps(rank["rolled"]) for rank in ranks}) == 1
        ((to, at),) = ranks[0]["rolled"]
        assert to < rolling.FAULT < at
        written(folder / f"{way}-snapshots", way, world)


def resumed(world: int, folder: Path) -> None:
    """Check that they resumed from disk and trained to where they had been."""
    for way in WAYS[world]:
        first = said("resume", folder, way, world)[0]
        assert 0 < first["resumed"] <= first["end"]


def moved(former: int, world: int, folder: Path) -> None:
    """Check that another number of ranks goes on from the snapshots."""
    job(world, folder, *tasks("move", WAYS[former], folder))
    for way in WAYS[former]:
        ranks = said("move", folder, way, world)
        assert {rank["resumed"] % rolling.EVERY for rank in ranks} == {1}
        assert len({rank["drawn"] for rank in ranks}) == world, "nobody draws what another rank draws"
        assert len({rank["weights"] for rank in ranks}) == 1, "the ranks go on together"


def test_together_and_to_the_bit_and_again_and_with_more_ranks(tmp_path: Path) -> None:
    job(2, tmp_path, *tasks("train", WAYS[2], tmp_path))
    rolled_back(2, tmp_path)
    job(2, tmp_path, *tasks("resume", WAYS[2], tmp_path))
    resumed(2, tmp_path)
    moved(2, 4, tmp_path)


def test_together_and_to_the_bit_and_with_fewer_ranks(tmp_path: Path) -> None:
    """Four processes are slow to start, so these resume in the job in which they trained."""
    job(4, tmp_path, *tasks("train", WAYS[4], tmp_path), *tasks("resume", WAYS[4], tmp_path))
    rolled_back(4, tmp_path)
    resumed(4, tmp_path)
    moved(4, 2, tmp_path)


def written(place: Path, way: str, world: int) -> None:
    """Check that what replicas share is on disk once, and that each rank's own state is there."""
    snapshot = find_latest(place)
    assert snapshot is not None
    assert snapshot.manifest.world_size == world
    assert len([name for name in snapshot.manifest.files if name.endswith(".distcp")]) == world
    keys = FileSystemReader(snapshot.path).read_metadata().state_dict_metadata
    others = {key.partition("/")[2] for key in keys if key.startswith("rank1/")}
    assert "skeleton" in others
    assert "random/torch" in others
    assert "buffers/1.running_mean" in others  # of its own batches
    assert not [key for key in others if key.startswith(("weights/", "optimizers"))]
    weight = "rank0/weights/0.weight" if way == "ddp" else "weights/0.weight"
    assert len(keys[weight].chunks) == {"ddp": 1, "fsdp": world, "hsdp": 2}[way]
