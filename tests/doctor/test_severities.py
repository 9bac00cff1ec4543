"""One mistake is as severe for `sentinel doctor` as for the rule that finds it in a run."""

from __future__ import annotations

import string
from typing import Any

import pytest

from sentinel.engine import RUN, Evaluator, Observation
from sentinel.toolkit.doctor import model
from sentinel.toolkit.doctor.finding import FindingText, describe_finding, finding_texts
from tests.doctor.test_environment import MODEL
from tests.stock import RULES

WITH_RULE = {key: text for key, text in finding_texts().items() if text.cause or text.alert}


def name_rule(text: FindingText) -> str:
    return text.alert or text.cause.partition("/")[0]


def describe(key: str) -> str:
    """Return the severity of a finding, whatever its numbers are."""
    text = finding_texts()[key]
    words = (text.name, text.what, text.why, text.line, text.source)
    fields = {field for part in words for _, field, _, _ in string.Formatter().parse(part) if field}
    return describe_finding(key, **dict.fromkeys(fields | {"ddp"}, 1)).severity


@pytest.mark.parametrize("key", list(WITH_RULE))
def test_a_finding_that_a_rule_finds_too_has_the_severity_of_the_rule(key: str) -> None:
    text = WITH_RULE[key]
    rule = RULES[name_rule(text)]
    assert describe(key) == (rule.downgrade.severity if text.downgraded and rule.downgrade else rule.severity)


def test_a_finding_that_no_rule_finds_has_a_severity_of_its_own() -> None:
    assert all(bool(text.severity) != bool(text.cause or text.alert) for text in finding_texts().values())


@pytest.mark.parametrize("share", [0.02, 0.49, 0.5, 0.96])
def test_doctor_and_rule_judge_the_share_of_unused_parameters_alike(share: float) -> None:
    evaluator = Evaluator([RULES["UnusedParameters"]], run="train")
    fired = []
    for seq in range(20):
        values: dict[str, Any] = {"parameters_without_gradient": 4.0, "without_gradient_share": share}
        fired += evaluator.observe(Observation(seq=seq, time=float(seq), values={RUN: values}))
    facts = {
        "models": [{**MODEL, "without_gradient": ["a"], "without_gradient_share": share}],
        "optimizers": [], "loaders": {}, "cuda": False, "forward": None,
    }  # fmt: skip
    assert [one.incident.severity for one in fired] == [finding.severity for finding in model.findings(facts)]
