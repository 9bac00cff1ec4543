"""Real gloo jobs of four ranks in groups: the flight records that they leave, read back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from tests.zygote import RANKS, TORCHRUN, run_fork

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = Path(__file__).parent.parent / "programs" / "grouped_ranks.py"
CAUSES = {
    "chain": "rank 3 never came to barrier, number 2 in group 3, in which rank 2 waited; ranks 0, 1 waited behind",
    "circle": "ranks 1, 2 wait for each other, in opposite order: ",
    "mesh": "rank 3 never came to all_reduce of 4x2, number 4 in group mesh_dp, in which rank 1 waited",
    "transfer": "in which ranks 2, 3 waited",
    "gather": "differing roots: in gather of 3, number 2 ranks 0, 2 each take themselves for the root",
    "healthy": "",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CAUSES)
def test_the_cause_is_in_the_records(kind: str, tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = run_fork([*torchrun, PROGRAM, kind, tmp_path], RANKS, env=environment, timeout=120)
    assert len(list(tmp_path.glob("trace_rank_*.json"))) == 4, ran.stderr
    shown = CliRunner().invoke(cli, ["hang", str(tmp_path), "--json"])
    found = json.loads(shown.output)
    assert CAUSES[kind] in found["cause"], found
    assert shown.exit_code == (1 if found["cause"] else 0)
    assert found["confidence"] == {"healthy": "none", "gather": "high", "transfer": "low"}.get(kind, "medium"), found
