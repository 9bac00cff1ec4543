"""Every fault is found in time; its healthy twin is silent. Real training, a real daemon."""

from __future__ import annotations

import pytest

from tests.faults.train import FAMILIES, faults
from tests.faults.verdict import verdicts

pytestmark = pytest.mark.processes

UNSTEADY = {"M1", "S8", "B7", "H1"}
"""Right in some runs and not in others: bench/faults.py trains them, and docs/detection.md tells."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_found_in_time_and_the_twin_is_silent(family: str) -> None:
    steady = [fault.id for fault in faults(family) if fault.id not in UNSTEADY]
    found = verdicts(family, 0, steady)
    assert {verdict.id: wrong for verdict in found if (wrong := [n for n in verdict.notes if not _is_cause(n)])} == {}


def _is_cause(note: str) -> bool:
    """Causes are the bench's to count: a run of a second may be over before all evidence of it has come."""
    return note.startswith(("cause ", "the case does not say "))


def test_some_that_take_no_time() -> None:
    found = verdicts("bugs", 0, ["B5", "B6"])
    assert {verdict.id: verdict.notes for verdict in found} == {"B5": [], "B6": []}
    assert all(verdict.right for verdict in found)
