"""Real training processes that keep memory, and their twins that do not."""

from __future__ import annotations

import re

import pytest

from tests.faults.training import trained

pytestmark = pytest.mark.processes

STEPS = 1700


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
    assert re.search(r"at this rate [\d.]+ GB are full in [\d,]+ steps", case["diagnosis"]["cause"])


@pytest.mark.parametrize("kind", ["nothing", "cycles", "evaluations"])
def test_healthy_loops_are_silent(kind: str) -> None:
    assert trained("leaking.py", kind, str(STEPS))[0] == []


def test_a_process_that_ends_for_want_of_memory_says_what_it_spent_it_on() -> None:
    (case,), _ = trained("exhausting.py", status=1)
    assert (case["alert"], case["severity"]) == ("OutOfMemory", "critical")
    held = case["out_of_memory"]["0"]
    assert (held["phase"], held["requested"], held["optimizer"] // held["parameters"]) == ("forward", 4 << 50, 2)
    assert re.search(r"one tensor of 4.5e\+06 GB was asked for at .*exhausting.py:26", case["diagnosis"]["cause"])
