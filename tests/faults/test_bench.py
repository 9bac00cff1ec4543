"""bench/faults.py counts its results correctly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench import faults
from bench.pages import read_rows, write_section
from tests.faults import bugs
from tests.faults.throughput import FAULTS
from tests.faults.verdict import Verdict, fill_steps, hold_pages

THROUGHPUT = {fault.id: fault for fault in FAULTS}


def judge(delay: int | None, *, right: bool = True, twin: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"delay": delay, "allowed": 50, "right": right, "one_page": right, "false_alarms": twin}


@pytest.mark.parametrize(("timed", "alarms"), [(True, "2 of 4"), (False, "1 of 4")])
def test_a_row_counts_alerts_in_time_and_late_ones(timed: bool, alarms: str) -> None:
    fault = THROUGHPUT["T1"]
    found = [judge(20), judge(60), judge(None, right=False, twin=("SlowStep",)), judge(25, twin=("LossSpike",))]
    cells = list(faults.row(fault, found, timed=timed))
    assert cells[3:] == ["2 of 4", "20 to 60", "50", "3 of 4", "3 of 4", alarms]


def test_a_fault_that_was_not_trained_here_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KEPT", tmp_path / "faults.jsonl")
    faults.keep_verdicts("throughput", [Verdict("T1", 0, "SlowStep", delay=7, allowed=50)], late=False, pace=0)
    page, table = tmp_path / "page.md", faults.TABLES[0]
    page.write_text("above\n<!-- trained -->\n<!-- end of trained -->\nbelow\n")
    shown, marks = {"T1": ["T1", "an old row"], "T6": ["T6", "of another day"]}, table.mark_ends()
    write_section(page, marks, faults.tabulate_faults(faults.read_kept(), shown, table))
    rows = read_rows(page, marks)
    assert rows["T1"][3:6] == ["1 of 1", "7 to 7", "50"]
    assert rows["T6"] == shown["T6"]
    assert rows["P1"][3] == "0 of 0"
    assert page.read_text().endswith("an earlier state of the code: T6.\n\n<!-- end of trained -->\nbelow\n")


def test_each_pace_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KEPT", tmp_path / "faults.jsonl")
    for pace, delay in ((3, 0), (3, 9), (20, 1)):
        verdict = Verdict("T6", delay, "DataParallelInUse", delay=delay, allowed=5)
        faults.keep_verdicts("throughput", [verdict], late=False, pace=pace)
    trained, late, *paced = (faults.tabulate_faults(faults.read_kept(), {}, table) for table in faults.TABLES)
    assert (trained, late, paced[2]) == ("", "", "")
    assert "| 1 of 2 | 0 to 9 |" in paced[0]
    assert "| 1 of 1 | 1 to 1 |" in paced[1]


def test_a_busy_machine_has_a_page_of_its_own_where_the_fault_is_not_about_time() -> None:
    pages = {"Slack": 2, "PagerDuty": 2}
    assert hold_pages(pages, 1, ["SlowStep"])
    assert hold_pages(pages, 2, [])
    assert not hold_pages(pages, 1, ["Divergence"])
    assert not hold_pages({"Slack": 0, "PagerDuty": 1}, 1, ["SlowStep"])


def test_a_kept_fault_is_trained_again_only_with_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "KEPT", tmp_path / "faults.jsonl")
    for fault in bugs.FAULTS:
        faults.keep_verdicts("bugs", [Verdict(fault.id, 0, fault.alert)], late=False, pace=20)
    assert list(faults.list_missing(["bugs"], 1, late=False, pace=20)) == []
    ids = [fault.id for fault in bugs.FAULTS]
    assert list(faults.list_missing(["bugs"], 1, late=False, pace=200)) == [("bugs", 0, [name], 200) for name in ids]
    assert list(faults.list_missing(["bugs"], 1, late=False, pace=0)) == [("bugs", 0, ids, 0)]
    monkeypatch.setattr(faults, "find_digest", lambda family: "other code")
    assert len(list(faults.list_missing(["bugs"], 1, late=False, pace=20))) == len(ids)
    assert faults.tabulate_faults(faults.read_kept(), {}, faults.TABLES[3]).endswith(
        "an earlier state of the code: all."
    )


@pytest.mark.slow
def test_faults_that_begin_late_have_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KEPT", tmp_path / "faults.jsonl")
    late = [fault for fault in bugs.FAULTS if fault.begins]
    assert list(faults.list_missing(["bugs"], 1, late=True, pace=0)) == [("bugs", 0, [fault.id], 3) for fault in late]
    faults.keep_verdicts("bugs", [Verdict("B1", 0, "ParametersNotUpdated", delay=16, allowed=20)], late=True, pace=3)

    trained, late_table = (faults.tabulate_faults(faults.read_kept(), {}, table) for table in faults.TABLES[:2])
    assert trained == ""
    (row,) = (line for line in late_table.splitlines() if line.startswith("| B1 |"))
    assert "| 1 of 1 | 16 to 16 |" in row


def test_faults_about_time_are_trained_at_their_own_pace_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KEPT", tmp_path / "faults.jsonl")
    families = ["throughput", "hardware"]
    assert list(faults.list_missing(families, 1, late=False, pace=20)) == [("throughput", 0, ["T6"], 20)]
    late = [(ids, pace) for _, _, ids, pace in faults.list_missing(families, 1, late=True, pace=0)]
    assert late == [(["T1"], 0), (["T4"], 0)]


@pytest.mark.parametrize(
    ("cause", "right"),
    [
        ("jumped at step 3949", True),
        ("jumped between steps 3948 and 3950", True),
        ("jumped between steps 3948 and 3949", True),
        ("jumped between steps 3949 and 3951", False),
        ("jumped between steps 3940 and 3948", False),
        ("jumped between steps 3940 and 39490", False),
    ],
)
def test_a_cause_may_name_the_samples_on_either_side_of_the_fault(cause: str, right: bool) -> None:
    assert bool(re.search(fill_steps("jumped (at step NEAR|AROUND)", 3949), cause)) is right
