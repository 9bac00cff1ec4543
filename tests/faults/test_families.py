"""Every fault is found in time, with its cause; its healthy twin is silent. Real training, a real daemon."""

from __future__ import annotations

import pytest

from tests.faults.fault import Fault
from tests.faults.train import FAMILIES, faults
from tests.faults.verdict import verdicts

pytestmark = pytest.mark.processes

FAULTS = [(family, fault) for family in FAMILIES for fault in faults(family)]


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=[fault.id for _, fault in FAULTS])
def test_found_in_time_with_its_cause_and_the_twin_is_silent(family: str, fault: Fault) -> None:
    """The settings are the defaults, or `every_step` for faults that are reported late unless all is sampled."""
    (verdict,) = verdicts(family, 0, [fault.id], every_step=fault.every_step)
    assert not verdict.notes, "\n".join(verdict.notes)


@pytest.mark.slow
def test_a_fault_is_found_at_a_slower_pace() -> None:
    (verdict,) = verdicts("bugs", 0, ["B5"], pace=2)
    assert verdict.notes == []
    assert verdict.right
    assert verdict.seconds > 2 * 200 * 0.002, "200 steps of 2 ms, and the twin's"
