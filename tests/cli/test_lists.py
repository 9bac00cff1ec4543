"""Lists as they look in a terminal, and as another program reads them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from click.testing import CliRunner

from sentinel.cli import cli, history, incidents, status
from sentinel.text import format_clock, format_moment

RUN_ID = "60473060-269f-404c-8604-4f2e46368951-tra"
"""A run id as made from torchrun's id and a script's name."""
CASE: dict[str, Any] = {
    "run": "train", "run_id": RUN_ID, "id": "0.1", "alert": "LossSpike", "severity": "critical",
    "state": "rolled_back", "first_step": 123_456_789, "time": 1e9,
    "summary": "loss 3416 by step 420, median of up to 100 steps before: 2.582",
}  # fmt: skip
ROW: dict[str, Any] = {
    "run": "train", "run_id": RUN_ID, "modified": 1e9, "step": 1_234_567, "bytes": 999_999_999, "trouble": "",
}  # fmt: skip


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("terminal")
def test_incidents_are_wrapped_in_a_terminal() -> None:
    run, head, *words = incidents.format_incidents([CASE], "none").splitlines()
    assert run == f"train ({RUN_ID})"
    assert head.split() == ["0.1", "LossSpike", "critical", "rolled", "back"]
    told = f"{format_clock(CASE['time'])}, since step 123456789: {CASE['summary']}"
    assert " ".join(line.strip() for line in words) == told
    assert max(map(len, [head, *words])) <= 80


@pytest.mark.usefixtures("terminal")
def test_a_narrow_terminal_cuts_nothing_off_an_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, head, *words = incidents.format_incidents([CASE | {"alert": "AccumulationNotNormalised"}], "none").splitlines()
    assert head.split() == ["0.1", "AccumulationNotNormalised", "critical", "rolled", "back"]
    assert "since step 123456789: loss" in " ".join(line.strip() for line in words)
    assert max(map(len, [head, *words])) <= 60


def test_incidents_are_a_line_each_for_another_program() -> None:
    _, row = incidents.format_incidents([CASE], "none").splitlines()
    assert row.startswith(f"{RUN_ID} 0.1   {format_moment(CASE['time'])} ")
    assert row.endswith(CASE["summary"])


RUNNING: dict[str, Any] = {
    "run": "train", "run_id": RUN_ID, "attempt": 0, "step": 43, "values": {"loss": 2.0, "opening_step": 1.0},
    "gpus": {"trouble": "", "devices": []}, "host": {}, "rollback": {"armed": False}, "open_incidents": 0,
    "incidents": 0, "silences": [], "notifications": [], "trouble": "", "notifications_trouble": "",
}  # fmt: skip
SPACING = {"0": 1, "1": 1, "2": 16, "3": 8192}
RANK = {
    "rank": 0, "state": "live", "step": 43, "phase": "", "dropped": 0, "spacing": SPACING, "wanted": SPACING,
    "costs": {"hooks": 0.1}, "unseen": [], "kernel_missing": "",
}  # fmt: skip


def shown_status(monkeypatch: pytest.MonkeyPatch, **run: Any) -> str:
    answer = {"runs": [RUNNING | run], "pid": 1, "version": "1", "http": "", "trouble": []}
    monkeypatch.setattr(status, "ask_daemons", lambda _: [answer])
    return CliRunner().invoke(cli, ["status"]).output


def test_the_status_says_in_words_what_is_looked_at_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    other = RANK | {"rank": 1, "wanted": SPACING | {"2": 4}}
    lines = shown_status(monkeypatch, ranks=[RANK, other]).splitlines()
    at = lines.index("  samples   every step: the loss, times (tier 0), the total gradient norm (tier 1)")
    assert lines[at + 1 : at + 3] == [
        "            every 16 steps: gradients of each layer (tier 2)",
        "            every 8,192 steps: weights and their updates (tier 3)",
    ]
    assert "  rank 0    live, step 43" in lines
    assert "  rank 1    live, step 43, alone it would sample tiers 0 to 3 every 1, 1, 4, 8,192 steps" in lines


def test_the_status_says_that_the_first_steps_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the first 64 steps are examined whole"
    assert words in shown_status(monkeypatch, ranks=[RANK])
    assert words not in shown_status(monkeypatch, ranks=[RANK], values={"loss": 2.0})


@pytest.mark.parametrize(
    ("newest", "on_all", "said"),
    [
        (1200, 1000, "newest part step 1,200, newest of all nodes step 1,000"),
        (1200, None, "newest part step 1,200, newest of all nodes not known"),
        (None, None, "newest part none yet, newest of all nodes not known"),
    ],
)
def test_the_status_says_which_snapshots_the_nodes_have_on_disk(
    newest: int | None, on_all: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"where": "/scratch/train", "newest": newest, "newest_on_all": on_all}
    rollback = {"armed": True, "held": [], "done": [], "disk": disk}
    lines = shown_status(monkeypatch, ranks=[RANK], rollback=rollback).splitlines()
    assert f"            on disk: this node's {said}, in /scratch/train" in lines


def test_one_element_is_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [{"name": name, "nonfinite": count} for name, count in (("bias", 1), ("weight", 2))]
    diagnosis = {"cause": "c", "confidence": "low", "evidence": [], "remedy": "", "missing": []}
    shown = {
        "attempt": 0,
        "step": 9,
        "diagnosis": diagnosis,
        "members": [],
        "done": [],
        "resolved_step": 9,
        "runbook": "",
    }
    monkeypatch.setattr(incidents, "find_incident", lambda *_: CASE | shown | {"layers": layers})
    lines = CliRunner().invoke(cli, ["incidents", "show", "0.1"]).output.splitlines()
    assert [line for line in lines if line.startswith("  layer ")] == [
        "  layer       bias: 1 non-finite element in one gradient",
        "  layer       weight: 2 non-finite elements in one gradient",
    ]


@pytest.mark.usefixtures("terminal")
def test_runs_of_one_name_are_told_apart() -> None:
    lines = incidents.format_incidents([CASE, CASE | {"id": "0.2"}, CASE | {"run_id": "train-2"}], "none").splitlines()
    assert [line for line in lines if line[0] != " "] == [f"train ({RUN_ID})", "train (train-2)"]


def test_a_silenced_alert_is_shown_as_silenced_while_it_fires() -> None:
    fired = CASE | {"state": "firing"}
    assert " firing " in incidents.format_incidents([fired], "none")
    assert " silenced " in incidents.format_incidents([fired | {"silenced": "me"}], "none")
    assert " until the end " in incidents.format_incidents([CASE | {"state": "unresolved", "silenced": "me"}], "none")


@pytest.mark.usefixtures("terminal")
def test_the_id_of_a_run_is_whole_in_a_terminal_of_80_columns() -> None:
    head, row, _ = history.format_rows([ROW])
    assert RUN_ID in row
    assert len(head) == len(row) <= 80


@pytest.mark.usefixtures("terminal")
def test_long_names_leave_room_for_the_rest() -> None:
    _, row, _ = history.format_rows([ROW | {"run": "x" * 300}])
    assert row.endswith(" 1234567    1 GB")
    assert len(row) <= 80


def test_ids_are_whole_where_the_output_is_no_terminal() -> None:
    assert RUN_ID in "\n".join(history.format_rows([ROW | {"run": "x" * 300}]))
