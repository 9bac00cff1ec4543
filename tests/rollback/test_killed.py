"""A rank is killed in the middle of a rollback, in real jobs: no rank waits without end or trains on alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.store import History
from tests.programs import killed

PROGRAM = Path(killed.__file__)
WORLD = 3
POINTS = ("prepare:2", "waiting:2", "ready:2", "said:2", "decided:2", "waiting:0", "said:0", "decided:0")
JOB_SECONDS = 200

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(JOB_SECONDS + 60)]


def job(folder: Path, point: str) -> None:
    """Run a job whose first start is killed at a point, and whose second start is healthy.

    It ends long before the time-out of its process group.
    """
    (folder / "rules.yaml").write_text(killed.RULES)
    launch = ["--standalone", "--nproc-per-node", str(WORLD), "--max-restarts", "1"]
    assert killed.GROUP_SECONDS > JOB_SECONDS
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(PROGRAM), str(folder), point],
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "SENTINEL_RUN_ID": "d", "SENTINEL_RULES": str(folder / "rules.yaml"),
            "SENTINEL_RUNTIME": str(folder / "r"), "SENTINEL_STATE": str(folder / "s"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "internal fault" not in done.stderr


def survivors(folder: Path, start: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{start}.*.json"))]


def incidents(folder: Path, start: int) -> dict[str, dict[str, Any]]:
    """Return the cases of a start by the name of their alert."""
    (path,) = (folder / "s").rglob("runs/*.sqlite")
    with History(path) as history:
        return {case["alert"]: case for case in history.incidents() if case["attempt"] == start}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", POINTS)
def test_nobody_waits_and_nobody_parts_and_the_next_start_is_as_if_nothing_had_been(point: str, tmp_path: Path) -> None:
    job(tmp_path, point)
    check_survivors(tmp_path, *point.split(":"))
    check_healthy_start(tmp_path)


def test_ranks_do_not_part_where_the_host_of_their_store_ends_right_after_go(tmp_path: Path) -> None:
    """One of the other ranks knows that all restore, the other one has not learnt it yet."""
    job(tmp_path, f"{killed.AFTER_GO}:0")
    assert (tmp_path / "knows").read_text() == "", "all restore"
    check_survivors(tmp_path, killed.AFTER_GO, "0")
    check_healthy_start(tmp_path)


def check_survivors(folder: Path, point: str, victim: str) -> None:
    left = survivors(folder, 0)
    assert len(left) == WORLD - 1
    for rank in left:
        assert "Timed out" not in rank["end"]
        assert "Connection" in rank["end"], "the loop's own next collective says that a rank is gone"
    steps = min(len(rank["weights"]) for rank in left)
    one, other = (rank["weights"][:steps] for rank in left)
    assert one == other
    assert [rank["told"] for rank in left] == [left[0]["told"]] * 2
    restored = [answer["ok"] for answer in left[0]["told"]]
    assert restored == {"prepare": [], "said": [True], "decided": [True], killed.AFTER_GO: [True]}.get(point, [False])
    cases = incidents(folder, 0)
    assert cases["RankLost"]["diagnosis"]["cause"] == f"rank {victim} was ended by SIGKILL"
    # If the next attempt begins before the rollback is over, the reason is added after it.
    assert cases["Command"]["done"][0] == f"not rolled back: rank {victim} left in the middle of it"


def check_healthy_start(folder: Path) -> None:
    left = survivors(folder, 1)
    assert len(left) == WORLD
    for rank in left:
        (answer,) = rank["told"]
        assert answer["ok"]
        assert rank["weights"] == left[0]["weights"]
        assert rank["weights"][answer["at"]] == rank["weights"][answer["to"]]
    assert "rolled back to step" in incidents(folder, 1)["Command"]["done"][0]
