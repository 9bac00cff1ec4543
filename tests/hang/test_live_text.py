"""What `sentinel hang` prints of runs that are watched now: one line for ranks alike, and where, why and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.cli import hang as command

PLACE = "/job/train.py:41 in loss"
COLLECTIVE = "waits in a collective"


def make_rank(rank: int, node: int = 0, **more: Any) -> dict[str, Any]:
    seen = {
        "rank": rank, "node": node, "hostname": f"host{node}", "pid": 100 + rank, "state": "live", "phase": "",
        "step": 60, "quiet_seconds": 45.4, "kind": COLLECTIVE, "at": PLACE,
    }  # fmt: skip
    return seen | more


def make_run(*ranks: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {
        "run": "gpt", "run_id": "gpt-1", "ranks": list(ranks), "cause": "", "confidence": "none", "evidence": [],
        "remedy": "", "missing": [], "command": "", "answered": True,
    }  # fmt: skip
    return found | more


def invoke(monkeypatch: pytest.MonkeyPatch, *answers: list[dict[str, Any]]) -> Result:
    """Return what the command does if the daemons give these answers, one after the other."""
    left = list(answers)
    monkeypatch.setattr(command, "ask_daemons", lambda question, body=None: [left.pop(0)] if left else [])
    result = CliRunner().invoke(cli, ["hang"])
    assert not left
    return result


def test_the_ranks_of_a_node_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = (make_rank(0), make_rank(1, step=61, kind="", quiet_seconds=0.2, at=""), make_rank(2, state="lost", at=""))
    result = invoke(monkeypatch, [make_run(*ranks)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "gpt  (gpt-1)",
        f"  rank 0      {COLLECTIVE}; step 60, quiet for 45 s",
        f"              at {PLACE}",
        "  rank 1      makes progress; step 61, quiet for 0 s",
        "  rank 2      lost; step 60, quiet for 45 s",
    ]


def test_of_many_ranks_those_in_the_same_place_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = [make_rank(rank, step=60 + (rank == 2), quiet_seconds=40.0 + rank) for rank in (0, 1, 2, 4)]
    other = make_rank(3, kind="", at="")
    result = invoke(monkeypatch, [make_run(*alike, other)])
    assert result.stdout.splitlines()[1:] == [
        f"  ranks 0, 1, 2, 4 {COLLECTIVE}; steps 60 to 61, quiet for 44 s",
        f"              at {PLACE}",
        "  rank 3      is beyond the loop, or in a phase; step 60, quiet for 45 s",
    ]


def test_the_nodes_of_a_job_are_headings_and_the_cause_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_run(
        make_rank(0), make_rank(1), make_rank(2, 1),
        cause="rank 2 does not come to the collective", confidence="high", evidence=["ranks 0 and 1 wait for 45 s"],
        remedy="see what rank 2 does", missing=["stacks of rank 3"], command="sentinel show gpt-1",
        not_asked=["node 2 (host2): not connected"],
    )  # fmt: skip
    result = invoke(monkeypatch, [job])
    assert result.exit_code == 1, "there is a cause"
    assert result.stdout.splitlines() == [
        "gpt  (gpt-1)",
        "  node 0      host0",
        f"  rank 0      {COLLECTIVE}; step 60, quiet for 45 s",
        f"              at {PLACE}",
        f"  rank 1      {COLLECTIVE}; step 60, quiet for 45 s",
        f"              at {PLACE}",
        "  node 1      host1",
        f"  rank 2      {COLLECTIVE}; step 60, quiet for 45 s",
        f"              at {PLACE}",
        "  not asked   node 2 (host2): not connected",
        "  cause       rank 2 does not come to the collective (confidence: high)",
        "  evidence    ranks 0 and 1 wait for 45 s",
        "  to do       see what rank 2 does",
        "  missing     stacks of rank 3",
        "  to know     sentinel show gpt-1",
    ]


def test_a_run_whose_ranks_have_yet_to_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, [make_run(make_rank(0, at=""), answered=False)], [make_run(make_rank(0))])
    assert f"at {PLACE}" in result.stdout


def test_a_node_without_runs_says_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch)
    assert result.exit_code == 0
    assert result.stdout == "No run is watched on this node. For a job that has ended: sentinel hang PATHS\n"
