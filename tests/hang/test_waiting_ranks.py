"""Real DDP jobs under torchrun in which a rank does not come: which one, in which collective, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from tests.hang.jobs import RUN_ID, cause, job, wait_for_incident
from tests.hang.processes import SOON, ask
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CHECKSUM_STEPS = 16
"""Steps between two checksums, as in the program."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("uneven", "rank 1 came to the end of its loader, after 200 batches"),
        ("user-code", "in wait_for_the_file"),
        ("gil", "rank 1 holds the GIL"),
    ],
)
def test_the_rank_that_never_came_is_named_and_why(private_places: Path, kind: str, words: str) -> None:
    with job(kind, private_places):
        case = wait_for_incident("Hang", words, "rank 1 never came to all_reduce of", confidence="high")
        if kind == "uneven":
            warning = wait_for_incident("UnevenBatches")
        if kind == "user-code":
            shown = CliRunner().invoke(cli, ["hang"])
            assert shown.exit_code == 1
            assert "rank 1      waits, and uses no processor" in shown.output
            assert "cause       rank 1 never came to all_reduce" in shown.output
    assert cause(case).startswith("rank 1 never came")
    assert "in which rank 0 waits" in cause(case)
    assert "rank 0 waits in all_reduce" in case["diagnosis"]["evidence"][0]
    if kind == "uneven":
        assert "drop_last" in case["diagnosis"]["remedy"]
        assert "Join" in case["diagnosis"]["remedy"]
        assert "(rank 0 had more)" in cause(case)
        assert cause(warning) == (
            "rank 1 will be through after 200 batches, rank 0 after 300: a loop that goes by epochs hangs then"
        )
        assert warning["step"] < 100


def test_a_rank_that_waits_itself_is_not_blamed(private_places: Path) -> None:
    with job("chain", private_places, world=3):
        words = "rank 2 never came to barrier", "in which rank 1 waits; rank 0 waits behind: rank 2 "
        wait_for_incident("Hang", *words, "in wait_for_the_file", confidence="high")


def test_ranks_that_wait_for_each_other_are_both_named(private_places: Path) -> None:
    with job("circle", private_places, world=3):
        words = "ranks 1, 2 wait for each other, in opposite order: rank 1 in barrier, number 1 in group "
        wait_for_incident("Hang", words, "rank 2 in barrier, number ", confidence="medium")


def test_mismatched_collectives_are_told_apart(private_places: Path) -> None:
    with job("mismatch", private_places) as running:
        cases = [wait_for_incident(alert, "mismatched collectives") for alert in ("CollectiveDesync", "Hang")]
    for case in cases:
        assert cause(case).startswith("mismatched collectives: as number ")
        assert "rank 0 issued all_reduce of" in cause(case)
        assert "rank 1 broadcast of 3" in cause(case)
    assert cases[0]["time"] < cases[1]["time"] + 1, "as soon as the limit of the hang, which is 3 s here, at the latest"
    assert running.stalled < cases[0]["time"]


def test_a_replica_that_drifts_is_named_with_its_layer(private_places: Path) -> None:
    """Batch norm's buffers differ between ranks from the first step on, which is no divergence."""
    with job("drift", private_places, world=4):
        case = wait_for_incident("ReplicaDivergence", "rank 3 holds other parameters than the other 3, after step 1")
    assert case["diagnosis"]["confidence"] == "high"
    assert case["diagnosis"]["evidence"] == [f"at step {case['step']} 1 layer differs: 2.weight"]
    assert 150 < case["step"] <= 150 + 2 * CHECKSUM_STEPS


def test_an_evaluation_of_one_rank_is_no_hang_of_the_others(private_places: Path) -> None:
    with job("evaluation", private_places, SOON.replace("> 3", "> 8"), seconds=60):

        def waits() -> bool:
            ranks = [rank for run in ask(RUN_ID, "status")["runs"] for rank in run["ranks"]]
            return any(rank["stall"]["quiet_seconds"] > 15 for rank in ranks if rank["rank"] == 1)

        until(waits, "fifteen quiet seconds")
        assert not ask(RUN_ID, "incidents")


def test_a_rank_that_was_killed_is_reported(private_places: Path) -> None:
    with job("killed", private_places):
        case = wait_for_incident("RankLost")
    assert cause(case) == "rank 1 was ended by SIGKILL"
    assert case["members"][0]["name"] == "1"
    assert "reported step" in case["diagnosis"]["evidence"][0]
