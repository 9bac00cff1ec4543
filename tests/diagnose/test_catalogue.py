"""The catalogue as a whole: every stock alert has a diagnosis, and every cause names its source."""

from __future__ import annotations

import string

import pytest

import sentinel.diagnose.catalogue  # noqa: F401  # has the explanations register themselves
from sentinel.diagnose.causes import Cause, causes, finding
from sentinel.diagnose.explanations import list_explained_alerts
from tests.stock import RULES

EXPLAINED = list_explained_alerts()
CAUSES = [(alert, name, cause) for alert, known in causes().items() for name, cause in known.items()]


@pytest.mark.parametrize("alert", sorted(causes()))
def test_causes_are_of_alerts_that_exist(alert: str) -> None:
    assert alert in RULES
    assert alert in EXPLAINED


@pytest.mark.parametrize(("alert", "name", "cause"), CAUSES)
def test_every_cause_can_be_worded(alert: str, name: str, cause: Cause) -> None:
    assert cause.source
    words = cause.cause + cause.remedy + cause.confirm
    wanted = {field: _Anything() for _, field, _, _ in string.Formatter().parse(words) if field}
    found = finding(alert, name, **wanted)
    assert "{" not in found.cause
    assert found.confirm
    assert found.confidence != "none"


class _Anything:
    def __format__(self, _: str) -> str:
        return "1"


def test_every_stock_alert_has_a_diagnosis() -> None:
    without = RULES.keys() - EXPLAINED
    assert without == set(), "these alerts say `not known` whatever the evidence is; CONTRIBUTING.md: A cause"
    assert EXPLAINED - RULES.keys() == set(), "no rule raises these"
