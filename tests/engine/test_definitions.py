"""Functions that are defined by other ones: what each gives, and that a call equals its definition written out."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence

import pytest

from sentinel.engine import RUN, Evaluator, Observation, load_rules
from sentinel.engine.expressions.functions import FUNCTIONS, Function
from sentinel.errors import RuleError

DEFINED = [function for function in FUNCTIONS.values() if function.body]
SOURCE = random.Random(3)
FALLING = [4 - 0.01 * i + SOURCE.gauss(0, 0.05) for i in range(300)]
LEVEL = [2.3 + SOURCE.gauss(0, 0.02) for _ in range(300)]
AROUND = [SOURCE.gauss(0, 0.5) for _ in range(300)]


def read_lets(lets: dict[str, str], **series: Sequence[float | None]) -> list[dict[str, float]]:
    """Return the value of each let after each step; a condition must be in count(), to be a number."""
    written = "".join(f"      {name}: '{text}'\n" for name, text in lets.items())
    text = f"group: t\nrules:\n  - alert: T\n    min_samples: 25\n    let:\n{written}    expr: loss > 1e9\n"
    evaluator, said = Evaluator(load_rules(text, "t").rules, run="t"), list[dict[str, float]]()
    for seq in range(max(map(len, series.values()))):
        values = {name: value[seq] for name, value in series.items() if seq < len(value)}
        known = {name: value for name, value in values.items() if value is not None}
        evaluator.observe(Observation(seq, float(seq), {RUN: known}))
        said.append(dict(evaluator.status()[0].values))
    return said


def last(text: str, **series: Sequence[float | None]) -> float:
    return read_lets({"v": text}, **series)[-1]["v"]


def holds(condition: str, losses: Sequence[float | None]) -> bool:
    return bool(last(f"count({condition}, 1)", loss=losses))


@pytest.mark.parametrize("function", DEFINED, ids=lambda function: function.name)
def test_a_call_does_what_its_definition_does(function: Function) -> None:
    given = {"condition": "loss > 2.3", "x": "loss", "window": "30", "level": "median(loss, 5)"}
    arguments = [given[parameter] for parameter in function.parameters]
    written = dict(zip(function.parameters, arguments, strict=True))

    def put_in(text: str) -> str:
        return re.sub(r"\w+", lambda word: written.get(word[0], word[0]), text)

    for name, text in function.lets.items():
        written[name] = f"({put_in(text)})"
    call, body = f"{function.name}({', '.join(arguments)})", put_in(function.body)
    if function.gives == "condition":
        call, body = f"count({call}, 20)", f"count({body}, 20)"
    skipped = [float(i % 7 == 0) for i in range(300)]
    for losses in (FALLING, AROUND, [*LEVEL[:200], *[9.0] * 9, math.nan, *LEVEL[210:]]):
        said = read_lets({"call": call, "body": body}, loss=losses, step_skipped=skipped)
        assert [str(row.get("call")) for row in said] == [str(row.get("body")) for row in said]  # nan is nan
        assert any("call" in row for row in said)


def test_since_nonzero() -> None:
    assert last("first(since_nonzero(loss))", loss=[0, 0, 0, 2, 3, 0]) == 2
    assert last("median(since_nonzero(loss), 30)", loss=[0] * 90 + [2] * 24 + [0]) == 2


def test_unskipped() -> None:
    norms, skipped = [1.0, 2.0, math.inf, 3.0], [0.0, 0.0, 1.0, 0.0]
    assert last("max(unskipped(grad_norm), 3)", loss=[1.0] * 30, grad_norm=norms * 7, step_skipped=skipped * 7) == 3
    assert last("max(unskipped(grad_norm), 3)", loss=[1.0] * 28, grad_norm=[1.0, 2.0, 5.0, 3.0] * 7) == 5


def test_usual_change_is_that_from_sample_to_sample_and_not_the_fall() -> None:
    changes = [abs(after - before) for before, after in zip(FALLING[-101:], FALLING[-100:], strict=False)]
    assert last("usual_change(loss, 100)", loss=FALLING) == pytest.approx(statistics.median(changes))
    assert last("usual_change(loss, 100)", loss=FALLING) < 0.3 * last("mad(loss, 100)", loss=FALLING)


def test_lost_share_is_0_at_the_best_and_1_at_the_start() -> None:
    way = [8.0 - 0.1 * i for i in range(60)]
    assert last("lost_share(loss, loss)", loss=way) == 0
    assert last("lost_share(loss, loss)", loss=[*way, 8.0]) == 1
    assert last("lost_share(loss, loss)", loss=[*way, (8.0 + way[-1]) / 2]) == pytest.approx(0.5)


def test_onsets_counts_what_lasts_once() -> None:
    losses = [0.0] * 30 + [9.0] * 5 + [0.0] * 3 + [9.0] * 5 + [0.0] * 20 + [9.0]
    assert last("onsets(loss > 5, 60)", loss=losses) == 2
    assert last("onsets(loss > 5, 25)", loss=losses) == 1


def test_around_zero() -> None:
    assert holds("around_zero(loss)", AROUND)
    assert not holds("around_zero(loss)", [value + 9 for value in AROUND])
    assert not holds("around_zero(loss)", [5 - 0.1 * i + value for i, value in enumerate(AROUND[:99])])


def test_stuck_at() -> None:
    assert holds("stuck_at(loss, first(loss))", LEVEL)
    assert not holds("stuck_at(loss, first(loss))", FALLING)


@pytest.mark.parametrize(
    ("after", "jumps"),
    [
        ([3.0, 3.0, 3.0], True),
        ([3.0, 1.0, 1.0], False),  # one row
        ([1.15, 1.15, 1.15], False),  # a tenth of the progress, which is 3, is 0.3
        ([1.4, 1.4, 1.4], True),
    ],
)
def test_loss_jumps(after: list[float], jumps: bool) -> None:
    before = [4 - 0.02 * i + 0.01 * (i % 2) for i in range(150)] + [1 + 0.01 * (i % 2) for i in range(100)]
    assert holds("loss_jumps(loss)", [*before, *after]) is jumps


def test_a_loss_that_has_come_to_nothing_jumps_where_a_quarter_is_lost_and_a_flat_one_where_half_is() -> None:
    learnt = [2.3 - 0.02 * i for i in range(114)] + [0.02 + 0.001 * (i % 2) for i in range(150)]
    assert not holds("loss_jumps(loss)", [*learnt, 0.5, 0.5, 0.5])
    assert holds("loss_jumps(loss)", [*learnt, 0.7, 0.7, 0.7])
    flat = [2.3 - 0.02 * i for i in range(65)] + [1.0] * 150
    assert not holds("loss_jumps(loss)", [*flat, 1.5, 1.5, 1.5])
    assert holds("loss_jumps(loss)", [*flat, 1.8, 1.8, 1.8])


def test_a_level_that_occurred_before_is_no_jump() -> None:
    steady = [1 + 0.01 * (i % 2) for i in range(150)]
    assert holds("loss_jumps(loss)", [*steady, 3.0, 3.0])
    assert not holds("loss_jumps(loss)", [*steady, 4.0, *steady[:20], 3.0, 3.0])


def test_explodes() -> None:
    falling = [4 - 0.02 * i + 0.01 * (i % 2) for i in range(150)]
    assert holds("explodes(loss)", [*falling, 9.0])
    assert not holds("explodes(loss)", [*falling, 6.0])
    assert not holds("explodes(loss)", [*falling, 9.0, *falling[-60:], 40.0]), "single rows have stood out before"


def test_an_error_in_an_argument_is_shown_at_its_place() -> None:
    def load(expr: str) -> object:
        return load_rules(f"group: t\nrules:\n  - alert: T\n    expr: {expr}\n", "my.yaml")

    with pytest.raises(RuleError, match=r"my\.yaml:4:38: unknown metric 'los'"):
        load("loss > usual_change(loss + los, 30)")
    with pytest.raises(RuleError, match=r"my\.yaml:4:18: usual_change is written usual_change\(x, window\)"):
        load("loss > usual_change(loss)")
    with pytest.raises(RuleError, match=r"my\.yaml:4:18: expected a condition, but loss"):
        load("onsets(loss, 5) > 3")
