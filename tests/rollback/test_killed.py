"""A rank that is killed in the middle of a rollback, in real jobs: no rank waits without end, or goes on alone."""

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
JOB_SECONDS = 280

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(JOB_SECONDS + 60)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of as many starts as there are points, and one more. It ends long before its process group's time-out."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "rules.yaml").write_text(killed.RULES)
    launch = ["--standalone", "--nproc-per-node", str(WORLD), "--max-restarts", str(len(POINTS))]
    assert killed.GROUP_SECONDS > JOB_SECONDS
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(PROGRAM), str(folder), *POINTS],
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
    return folder


def survivors(folder: Path, start: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{start}.*.json"))]


def incidents(folder: Path, start: int) -> dict[str, dict[str, Any]]:
    """Alert -> case."""
    (path,) = (folder / "s").rglob("runs/*.sqlite")
    with History(path) as history:
        return {case["alert"]: case for case in history.incidents() if case["attempt"] == start}


@pytest.mark.parametrize("start", range(len(POINTS)), ids=POINTS)
def test_nobody_waits_and_nobody_parts(job: Path, start: int) -> None:
    point, _, victim = POINTS[start].partition(":")
    left = survivors(job, start)
    assert len(left) == WORLD - 1
    for rank in left:
        assert "Timed out" not in rank["end"]
        assert "Connection" in rank["end"], "the loop's own next collective says that a rank is gone"
    steps = min(len(rank["weights"]) for rank in left)
    one, other = (rank["weights"][:steps] for rank in left)
    assert one == other
    assert [rank["told"] for rank in left] == [left[0]["told"]] * 2
    restored = [answer["ok"] for answer in left[0]["told"]]
    assert restored == {"prepare": [], "said": [True], "decided": [True]}.get(point, [False])
    cases = incidents(job, start)
    assert cases["RankLost"]["diagnosis"]["cause"] == f"rank {victim} was ended by SIGKILL"
    # Where the next attempt begins before the rollback is over, that is said after it.
    assert cases["Command"]["done"][0] == f"not rolled back: rank {victim} left in the middle of it"


def test_the_last_start_is_rolled_back_as_if_nothing_had_been(job: Path) -> None:
    left = survivors(job, len(POINTS))
    assert len(left) == WORLD
    for rank in left:
        ((answer, _),) = zip(rank["told"], [None], strict=True)
        assert answer["ok"]
        assert rank["weights"] == left[0]["weights"]
        assert rank["weights"][answer["at"]] == rank["weights"][answer["to"]]
    assert "rolled back to step" in incidents(job, len(POINTS))["Command"]["done"][0]
