"""bench/faults.py counts what was found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.faults.throughput import FAULTS

spec = importlib.util.spec_from_file_location("bench_faults", Path(__file__).parents[2] / "bench" / "faults.py")
assert spec is not None
assert spec.loader is not None
bench: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


def told(delay: int | None, *, right: bool = True, twin: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"delay": delay, "allowed": 50, "right": right, "false_alarms": twin}


@pytest.mark.parametrize(("timed", "alarms"), [(True, "2 of 4"), (False, "1 of 4")])
def test_a_row_counts_what_was_in_time_and_what_was_not(timed: bool, alarms: str) -> None:
    fault = next(fault for fault in FAULTS if fault.id == "T1")
    found = [told(20), told(60), told(None, right=False, twin=("SlowStep",)), told(25, twin=("LossSpike",))]
    cells = list(bench.row(fault, found, timed=timed))
    assert cells[3:] == ["2 of 4", "20 to 60", "50", "3 of 4", alarms]
