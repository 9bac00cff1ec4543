"""Made-up standstills, read from files as a job leaves them: the right rank is blamed, no innocent one with certainty.

`bench/hang_verdicts.py` prints them side by side with the verdicts of torch's own analyser.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.diagnose.evidence import NOT_KNOWN, SURENESS
from sentinel.diagnose.explainers.ranks import name_ranks
from sentinel.diagnose.standstill.collectives import find_standstill
from sentinel.diagnose.standstill.waits import Standstill
from sentinel.toolkit.postmortem.files import remains
from sentinel.toolkit.postmortem.verdict import verdict
from tests.hang.made_cases import Case, make_cases

CASES = {case.name: case for case in make_cases()}


def write(case: Case, folder: Path) -> None:
    """Write a case's records as a job leaves them: NCCL's watchdog pickles them, those of gloo come out as JSON."""
    for rank, record in case.records.items():
        if case.backend == "nccl":
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(record))
        else:
            (folder / f"trace_rank_{rank}.json").write_text(json.dumps(record))


def judge(case: Case, folder: Path) -> tuple[Standstill | None, str, str]:
    """Return (who waits for whom, the cause in words, its confidence)."""
    write(case, folder)
    found = remains([folder])
    groups = [group for flight in found.flights.values() for group in flight.groups.values()]
    world = max([*found.flights, *(rank for group in groups for rank in group.ranks)]) + 1
    told = verdict(found)
    closed = any(group.ranks for group in groups)
    return find_standstill(found.flights, world, closed=closed), told.cause, told.confidence


def test_sixty_cases_have_their_cause_in_the_records() -> None:
    told = [case for case in CASES.values() if case.recorded]
    assert len(told) >= 60
    assert sum(case.backend == "gloo" for case in told) >= 30


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.recorded])
def test_the_right_rank_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stand, cause, confidence = judge(case, tmp_path)
    if not case.kinds:
        assert (stand, cause) == (None, "")
        return
    assert stand is not None
    assert stand.kind in case.kinds, cause
    blamed = set(stand.culprits)
    assert set(case.culprits) == blamed or (confidence == "low" and set(case.culprits) <= blamed), cause
    assert case.says in cause
    if stand.kind == "missing":
        assert cause.startswith(
            (name_ranks(case.culprits), name_ranks(stand.culprits), f"rank {min(case.culprits)} never came")
        )
    if confidence == "low":
        assert stand.doubts, "two explanations, with what would decide"
        assert all(re.search(r" decides?$", doubt) for doubt in stand.doubts)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.recorded])
def test_no_rank_is_blamed_with_certainty_for_what_is_not_recorded(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stand, cause, confidence = judge(case, tmp_path)
    assert stand is None or set(stand.culprits) == set(case.culprits) or SURENESS[confidence] <= SURENESS["low"], cause
    assert verdict(remains([tmp_path])).missing


def test_a_healthy_job_ends_well(tmp_path: Path) -> None:
    write(CASES["TP x DP x PP: healthy, nccl"], tmp_path)
    shown = CliRunner().invoke(cli, ["hang", str(tmp_path)])
    assert shown.exit_code == 0
    assert "state       all groups are complete: no rank stands in a collective" in shown.output
    assert "group default_pg: 3 collectives complete on ranks 0 to 7" in shown.output
    (tmp_path / "nccl_trace_rank_5").unlink()
    shown = CliRunner().invoke(cli, ["hang", str(tmp_path), "--json"])
    assert shown.exit_code == 1
    found = json.loads(shown.output)
    assert found["cause"] == NOT_KNOWN
    assert found["missing"] == ["what rank 5 did: nothing of it is here"]


def test_all_ranks_are_said_to_be_in_a_collective_only_if_all_records_show_it(tmp_path: Path) -> None:
    write(CASES["a link that is down, nccl"], tmp_path)
    found = verdict(remains([tmp_path]))
    assert found.cause.startswith("all ranks were in all_reduce of 1000, number 3 in group mesh_dp")
    assert "network" in found.remedy
    (tmp_path / "nccl_trace_rank_3").unlink()
    found = verdict(remains([tmp_path]))
    assert found.cause.startswith("rank 3 never came")
    assert found.confidence == "low"
    assert found.missing[-1].endswith("their records or logs decide")


def test_the_whole_chain_is_reported(tmp_path: Path) -> None:
    write(CASES["a chain over 3 groups, gloo"], tmp_path)
    found = verdict(remains([tmp_path]))
    assert found.cause == (
        "rank 3 never came to barrier, number 2 in group pair2, in which rank 2 waited; ranks 0, 1 waited behind"
    )
    assert found.evidence[:3] == (
        "rank 2 waited in barrier, number 2 in group pair2 (time-out 600 s), for rank 3",
        "rank 1 waited in barrier, number 2 in group pair1 (time-out 600 s), for rank 2",
        "rank 0 waited in barrier, number 2 in group pair0 (time-out 600 s), for rank 1",
    )


def test_both_halves_of_an_opposite_order_are_reported(tmp_path: Path) -> None:
    write(CASES["the other order in two groups, once, nccl"], tmp_path)
    found = verdict(remains([tmp_path]))
    assert found.cause == (
        "ranks 2, 3 wait for each other, in opposite order: rank 2 in all_reduce of 16, number 2 in group mesh_tp, "
        "rank 3 in barrier, number 2"
    )
    assert found.confidence == "medium"
