"""Each rank keeps its own part of the state, without communication."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.zygote import RANKS, TORCHRUN, run_fork

WAYS = ("zero", "fsdp")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_state_of_ranks_is_local_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    done = run_fork(
        [*launch, "-m", "tests.programs.sharded_state", str(tmp_path), *WAYS],
        RANKS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for way in WAYS:
        for rank in range(2):
            result = json.loads((tmp_path / f"{way}.{rank}.json").read_text())
            assert result["tensors"] > 4
            assert (result["memory"], result["disk"], result["seen"]) == (True, True, []), (way, rank, result)
