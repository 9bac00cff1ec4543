"""A non-finite value in a real job of two ranks: where it came from, or why that cannot be known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sentinel.node import paths
from sentinel.store import History
from tests.programs import poisoned_ranks
from tests.zygote import RANKS, TORCHRUN, run_fork

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_ddp_names_the_batch_and_fsdp_says_why_nothing_was_run_again(private_places: Path) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*torchrun, "-m", poisoned_ranks.__name__]
    done = run_fork(command, RANKS, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr  # neither DDP nor FSDP hangs
    found = cases()
    ddp, fsdp = found["poisoned ddp"], found["poisoned fsdp"]
    assert ddp["diagnosis"]["cause"].startswith(
        "bad data: NaN or infinite values in args[0] of the batch of step 40 of rank 1"
    )
    assert ddp["provenance"]["1"]["origin"] == "data"
    assert {one["origin"] for one in fsdp["provenance"].values()} == {"not known"}
    assert any("under FSDP the parameters are gathered by all ranks" in one for one in fsdp["diagnosis"]["missing"])
    assert fsdp["diagnosis"]["confidence"] != "high"


def cases() -> dict[str, dict[str, Any]]:
    """Return run name -> its case of NonFiniteLoss."""
    found = {}
    for path in paths.histories():
        with History(path) as history:
            (found[history.run],) = [case for case in history.incidents() if case["alert"] == "NonFiniteLoss"]
    return found
