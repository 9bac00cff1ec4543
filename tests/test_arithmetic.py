"""Sums and means near the largest float."""

from __future__ import annotations

import math
import sys

import pytest

from sentinel.engine import RUN, Entity, Evaluator, Observation, load_rules
from sentinel.engine.expressions.arithmetic import exact_mean, exact_sum
from sentinel.runs.steps import combine_ranks

LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("values", "total", "mean"),
    [
        ([1.0, 2.0, 3.0], 6.0, 2.0),
        ([LARGEST, LARGEST], math.inf, LARGEST),
        ([LARGEST, LARGEST, -LARGEST], LARGEST, LARGEST / 3),
        ([-LARGEST] * 4, -math.inf, -LARGEST),
    ],
    ids=str,
)
def test_no_sum_raises(values: list[float], total: float, mean: float) -> None:
    assert exact_sum(values) == total
    assert exact_mean(values) == mean


def test_ranks_near_the_largest_float_are_judged_as_others() -> None:
    text = "{group: t, rules: [{alert: T, let: {v: 'across(grad_norm, \"mean\")'}, expr: v > 1}]}"
    evaluator = Evaluator(load_rules(text, "t").rules, run="t")
    values = {Entity("rank", str(number)): {"grad_norm": LARGEST} for number in range(4)}
    (fired,) = evaluator.observe(Observation(0, 0.0, {RUN: {"loss": 1.0}, **values}))
    assert fired.kind == "fired"
    assert evaluator.status()[0].values["v"] == LARGEST


def test_signals_that_add_up_over_ranks_may_be_as_large() -> None:
    assert combine_ranks([{"batch_size": LARGEST}, {"batch_size": LARGEST}])["batch_size"] == math.inf


def test_a_time_that_is_no_number_does_no_harm_to_a_window_by_age() -> None:
    text = "{group: t, rules: [{alert: T, let: {v: 'mean(loss, 10s)'}, expr: v > 1e9}]}"
    evaluator = Evaluator(load_rules(text, "t").rules, run="t")
    for seq, at in enumerate([0.0, 1.0, math.inf, 3.0, math.nan, 5.0]):
        evaluator.observe(Observation(seq, at, {RUN: {"loss": 2.0}}))
    assert evaluator.status()[0].judged >= 0
