"""Rule tests: the short form of series, what is compared, and the places of mistakes."""

# ruff: noqa: E501 (tables: a mistake a line)

from __future__ import annotations

import math
import statistics

import pytest

from sentinel.engine.ruletest import load_tests
from sentinel.engine.series import expand
from sentinel.engine.source import Text
from sentinel.errors import RuleError

RULES = """
group: mine
rules:
  - alert: High
    expr: loss > 5
    annotations: {summary: "loss {loss:.1f}"}
  - alert: Slow
    scope: rank
    expr: step_seconds > 1
"""
HEAD = "rule_files: [mine.yaml]\ntests:\n  - name: it\n    input_series:\n      - {series: loss, values: 1 9 9 1}\n"


@pytest.mark.parametrize(
    ("written", "samples"),
    [
        ("2.5 -1e-3 .5", [2.5, -1e-3, 0.5]),
        ("inf -inf", [math.inf, -math.inf]),
        ("_ 1 _x3 2", [None, 1, None, None, None, 2]),
        ("2x3", [2, 2, 2, 2]),
        ("3-0.5x2 1+2x2", [3, 2.5, 2, 1, 3, 5]),
        ("-3+1x2", [-3, -2, -1]),
        ("infx1\n  4", [math.inf, math.inf, 4]),
    ],
)
def test_series(written: str, samples: list[float | None]) -> None:
    assert expand(Text.plain(written)) == pytest.approx(samples)


def test_nan_in_a_series() -> None:
    assert [math.isnan(value) for value in expand(Text.plain("1 nan nanx1")) if value] == [False, True, True, True]


def test_noise_is_the_same_each_time_and_of_the_spread_that_is_written() -> None:
    text = Text.plain("noise(4-0.001, 0.5, 2000)")
    samples = [value for value in expand(text) if value is not None]
    assert samples == expand(text)
    assert samples != expand(Text.plain("noise(4-0.001, 0.5, 2000) 1"))[:2000], "another series has other noise"
    slope, start = statistics.linear_regression(range(2000), samples)
    assert (slope, start) == (pytest.approx(-0.001, abs=1e-4), pytest.approx(4, abs=0.05))
    assert statistics.stdev(y - start - slope * x for x, y in enumerate(samples)) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("written", "column"),
    [
        ("1 2 x 4", 5),
        ("1 2..3", 3),
        ("1 3-0.1", 3),
        ("noise(1, 2)", 1),
        ("1 noise(1, 2, 3", 3),
        ("1x", 1),
        ("1x9999999", 1),
    ],
)
def test_a_piece_that_is_no_sample(written: str, column: int) -> None:
    with pytest.raises(RuleError, match="is no sample") as caught:
        expand(Text.plain(written))
    assert caught.value.column == column


def failures(expectation: str) -> list[str]:
    """Return what a test with this expectation finds wrong."""
    (test,) = load_tests(HEAD + expectation, "mine_test.yaml", lambda name: RULES)
    return [f"{failure.line}: {failure.message}" for failure in test.run()]


@pytest.mark.parametrize(
    ("expectation", "wrong"),
    [
        ("    expect: [{step: 1, alerts: [{alert: High}], states: {High: firing, Slow: no data}}]", []),
        ("    expect: [{step: 1, alerts: []}]", ["6: step 1: expected alerts [], got [High]"]),
        ("    expect: [{step: 0, alerts: [{alert: High}]}]", ["6: step 0: expected alerts [High], got []"]),
        ("    interval: 30s\n    expect: [{at: 1m, alerts: [{alert: High}]}, {at: 89s, alerts: [{alert: High}]}]", []),
        (
            "    interval: 30s\n    expect: [{at: 29s, alerts: [{alert: High}]}]",
            ["7: step 0: expected alerts [High], got []"],
        ),
        ("    expect: [{step: 1, states: {High: pending}}]", ["6: step 1: expected High pending, got firing"]),
        (
            "    expect:\n      - step: 2\n        alerts:\n          - {alert: High, first_step: 2, severity: info}",
            [
                "9: step 2: High: expected severity 'info', got 'warning'",
                "9: step 2: High: expected first_step 2, got 1",
            ],
        ),
        (
            "    expect: [{step: 1, alerts: [{alert: High, actions: [rollback], members: [rank 1]}]}]",
            [
                "6: step 1: High: expected actions [rollback], got []",
                "6: step 1: High: expected members [rank 1], got [the run]",
            ],
        ),
        (
            "    expect: [{step: 1, alerts: [{alert: High, annotations: {summary: loss 8.0}}]}]",
            ["6: step 1: High: expected summary 'loss 8.0', got 'loss 9.0'"],
        ),
        (
            "    expect: [{step: 1, alerts: []}, {at: 1s, alerts: [{alert: High}]}, {step: 1, states: {Slow: firing}}]",
            ["6: step 1: expected alerts [], got [High]", "6: step 1: expected Slow firing, got no data"],
        ),
        ("    fired: {}", ["6: fired: expected {}, got {High: [1]}"]),
        ("    fired: {High: [1], Slow: []}", []),
        ("    fired: {High: []}", ["6: fired: expected {}, got {High: [1]}"]),
        ("    fired: {High: [1, 3]}", ["6: fired: expected {High: [1, 3]}, got {High: [1]}"]),
    ],
)
def test_what_is_compared(expectation: str, wrong: list[str]) -> None:
    assert failures(expectation) == wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "mine_test.yaml:3:5: a test needs 'expect' or 'fired': it could not fail"),
        (HEAD + "    expect: [{step: 1}]", "mine_test.yaml:6:14: an expectation needs 'alerts' or 'states': it could not fail"),
        (HEAD + "    expect: [{step: 4, alerts: []}]", "mine_test.yaml:6:21: step: 4 is not between 0 and 3"),
        (HEAD + "    expect: [{at: 4s, alerts: []}]", "mine_test.yaml:6:19: at: '4s' is no time within the 4 steps; write 90s or 5m"),
        (HEAD + "    fired: {Hihg: []}", "mine_test.yaml:6:13: no rule is called 'Hihg'; did you mean 'High'?"),
        (HEAD + "    expect: [{step: 1, states: {High: fireing}}]", "mine_test.yaml:6:39: 'fireing' is no state; did you mean 'firing'?"),
        (HEAD.replace("loss", "lss") + "    fired: {}", "mine_test.yaml:5:18: unknown metric 'lss'; did you mean 'loss'?"),
        (HEAD.replace("loss,", "layer_grad_norm,") + "    fired: {}", "mine_test.yaml:5:18: layer_grad_norm is one number a layer: write `layer: NAME`"),
        (HEAD.replace("loss,", "loss, layer: x,") + "    fired: {}", "mine_test.yaml:5:18: loss is no number of a layer"),
        (HEAD.replace("1 9 9 1", "1 9 y 1") + "    fired: {}", "mine_test.yaml:5:36: 'y' is no sample; write 2.5, nan, inf, _, 2.5x10, 3-0.1x10 or noise(2.5, 0.01, 200)"),
        (HEAD + "    interval: fast\n    fired: {}", "mine_test.yaml:6:15: interval: 'fast' is no duration; write 1s or 100ms"),
        (HEAD + "    excpect: []", "mine_test.yaml:6:5: unknown key 'excpect' in a test; did you mean 'expect'?"),
    ],
)  # fmt: skip
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        load_tests(text, "mine_test.yaml", lambda name: RULES)
    assert str(caught.value) == message


def test_a_mistake_in_the_rules_is_named_there() -> None:
    with pytest.raises(RuleError, match=r"mine.yaml:5:11: unknown metric 'lss'"):
        load_tests(HEAD + "    fired: {}", "mine_test.yaml", lambda name: RULES.replace("loss > 5", "lss > 5"))
