"""Each rank keeps its own part of the state, without a word to the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WAYS = ("zero", "fsdp")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_state_of_ranks_is_local_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.programs.sharded_state", str(tmp_path), *WAYS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for way in WAYS:
        for rank in range(2):
            result = json.loads((tmp_path / f"{way}.{rank}.json").read_text())
            assert result["tensors"] > 4
            assert (result["memory"], result["disk"], result["seen"]) == (True, True, []), (way, rank, result)
