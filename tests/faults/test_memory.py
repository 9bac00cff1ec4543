"""Real training processes that keep memory, and their twins that do not."""

from __future__ import annotations

import re

import pytest

from tests.faults.training import trained

pytestmark = pytest.mark.processes

STEPS = 1700


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "holder"), [("graph", "with the graph that made it"), ("outputs", "256 float32 a step")]
)
def test_what_is_kept_is_told_with_bytes_a_step(kind: str, holder: str) -> None:
    (case,), _ = trained("leaking.py", kind, str(STEPS), "census")
    assert (case["alert"], case["severity"]) == ("MemoryCreep", "warning")
    assert case["step"] < STEPS - 50
    assert case["diagnosis"]["cause"].startswith("Keeper.kept, an attribute of a __main__.Keeper")
    assert holder in " ".join(case["diagnosis"]["evidence"])
    assert re.search(r"the resident set grows by [\d.]+ kB a step", case["diagnosis"]["cause"])
    gone = r"and the [\d.]+ GB that are left \(.+\) are gone in [\d,]+ steps"
    assert re.search(gone, case["diagnosis"]["cause"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["nothing", "cycles", "evaluations"])
def test_healthy_loops_are_silent(kind: str) -> None:
    assert trained("leaking.py", kind, str(STEPS))[0] == []


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_a_step", "steps", "latest", "left"),
    [("1e8", 139, 131, "[89]\\d\\d MB"), ("1e6", 900, 600, "1.[6-9]\\d? GB")],
)
def test_of_2_gb_enough_is_left_when_it_is_told(bytes_a_step: str, steps: int, latest: int, left: str) -> None:
    (case,), _ = trained("filling.py", bytes_a_step, str(steps), "0.02", "120")
    assert case["alert"] == "MemoryCreep"
    assert 120 < case["step"] <= latest
    assert re.search(rf"the {left} that are left \(ulimit -d\) are gone in", case["diagnosis"]["cause"])
    assert re.match(r"kept, a local of main \(.*filling.py:\d+\) keeps", case["diagnosis"]["cause"])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps"),
    [("ten", 900), ("sawtooth", 900), ("pagecache", 900), ("evaluation", 900), ("batches", 900), ("adam", 40)],
)
def test_of_2_gb_healthy_loops_take_some_and_are_silent(kind: str, steps: int) -> None:
    assert trained("filling.py", kind, str(steps), "0", "100")[0] == []


@pytest.mark.slow
def test_a_process_that_ran_out_of_memory_reports_what_held_it() -> None:
    (case,), _ = trained("exhausting.py", status=1)
    assert (case["alert"], case["severity"]) == ("OutOfMemory", "critical")
    held = case["out_of_memory"]["0"]
    assert (held["phase"], held["requested"], held["optimizer"] // held["parameters"]) == ("forward", 4 << 50, 2)
    assert re.search(r"one tensor of 4,504 TB was asked for at .*exhausting.py:26", case["diagnosis"]["cause"])
