"""bench/faults.py counts what was found."""

from __future__ import annotations

from typing import Any

import pytest

from bench import faults
from tests.faults.throughput import FAULTS


def judge(delay: int | None, *, right: bool = True, twin: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"delay": delay, "allowed": 50, "right": right, "pages": {"Slack": 1}, "false_alarms": twin}


@pytest.mark.parametrize(("timed", "alarms"), [(True, "2 of 4"), (False, "1 of 4")])
def test_a_row_counts_what_was_in_time_and_what_was_not(timed: bool, alarms: str) -> None:
    fault = next(fault for fault in FAULTS if fault.id == "T1")
    found = [judge(20), judge(60), judge(None, right=False, twin=("SlowStep",)), judge(25, twin=("LossSpike",))]
    cells = list(faults.row(fault, found, timed=timed))
    assert cells[3:] == ["2 of 4", "20 to 60", "50", "3 of 4", "4 of 4", alarms]
