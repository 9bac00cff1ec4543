"""Real training processes that keep memory, and their twins that do not."""

from __future__ import annotations

import re

import pytest

from tests.faults.training import trained

pytestmark = pytest.mark.processes

STEPS = 1700


@pytest.mark.parametrize("kind", ["graph", "outputs"])
def test_what_is_kept_is_told_with_bytes_a_step(kind: str) -> None:
    (case,), _ = trained("leaking.py", kind, str(STEPS))
    assert (case["alert"], case["severity"]) == ("MemoryCreep", "warning")
    assert case["step"] < STEPS - 50
    assert re.search(r"the resident set grows by [\d.]+ kB a step", case["diagnosis"]["cause"])
    assert re.search(r"at this rate [\d.]+ GB are full in [\d,]+ steps", case["diagnosis"]["cause"])


@pytest.mark.parametrize("kind", ["nothing", "cycles", "evaluations"])
def test_healthy_loops_are_silent(kind: str) -> None:
    assert trained("leaking.py", kind, str(STEPS))[0] == []
