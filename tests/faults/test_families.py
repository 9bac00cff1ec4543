"""Every fault is found in time, with its cause; its healthy twin is silent. Real training, a real daemon."""

from __future__ import annotations

import pytest

from tests.faults.train import FAMILIES, faults
from tests.faults.verdict import verdicts

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_found_in_time_with_its_cause_and_the_twin_is_silent(family: str) -> None:
    """At default settings; some are told in time only where everything is sampled."""
    costly = [fault.id for fault in faults(family) if fault.every_step]
    found = verdicts(family, 0, [fault.id for fault in faults(family) if not fault.every_step])
    found += verdicts(family, 0, costly, every_step=True) if costly else []
    assert {verdict.id: verdict.notes for verdict in found if not verdict.good} == {}


def test_some_that_take_no_time() -> None:
    found = verdicts("bugs", 0, ["B5", "B6"])
    assert {verdict.id: verdict.notes for verdict in found} == {"B5": [], "B6": []}
    assert all(verdict.right for verdict in found)
