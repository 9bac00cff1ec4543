"""A real job whose steps are the reduction of gradients."""

from __future__ import annotations

import pytest

from tests.faults.training import trained

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_step_that_is_mostly_communication() -> None:
    cases, _ = trained("reducing.py", ranks=2)
    (case,) = [case for case in cases if case["alert"] == "CommunicationBound"]
    assert case["severity"] == "warning"
    assert [member["scope"] for member in case["members"]] == ["run"]
    assert 8 <= case["step"] < 12
