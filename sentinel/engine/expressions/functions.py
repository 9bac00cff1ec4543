"""The functions of the rule language: their arguments, results and state. The docs are generated from this table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sentinel.engine.windows.folds import Folded
from sentinel.engine.windows.order_statistics import Ordered
from sentinel.engine.windows.since_start import First, Highest, Lowest, Smoothed
from sentinel.engine.windows.sliding import Counted, CountedByAge, Ends, Extreme, Past, WindowChange, WindowState
from sentinel.engine.windows.steady import Steady

Kind = Literal["number", "condition", "metric", "window", "count", "share", "lag", "how"]
"""What an argument must be. `number` and `condition` are expressions, `metric` a bare name; the others are literals:
`window` a number of samples or a duration, `count` a number of samples, `share` 0 to 1, `lag` a number of samples."""

HOWS = ("max", "min", "mean", "spread", "norm", "argmax")
"""How `across` combines the values of all ranks, layers, GPUs or nodes."""


@dataclass(frozen=True, slots=True)
class Window:
    """The literal arguments of a call, from which a state is made."""

    count: int = 0
    seconds: float = 0.0
    needed: int = 0
    """Samples that are enough, where the rule has `min_samples`; 0: the window must be full."""
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class Function:
    """One row of the table."""

    signature: str
    takes: tuple[Kind, ...]
    gives: Literal["number", "condition"]
    meaning: str
    state: Callable[[Window], WindowState] | None = None
    """Makes the state that the call keeps for one series; None where it keeps none."""
    pure: Callable[[float], float] | None = None
    optional: int = 0
    """How many arguments at the end may be left out."""
    least: int = 1
    """Smallest window, in samples."""
    body: str = ""
    """Its definition in the rule language; empty where the engine computes it."""
    lets: Mapping[str, str] = field(default_factory=dict)
    """Names that `body` uses, defined as in a rule: each may use those before it."""
    source: str = ""
    """Where the numbers in it come from."""

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\w+", self.signature)[1:]


def _delta(window: Window) -> WindowState:
    return (
        Ends("delta", 0, window.seconds, window.needed) if window.seconds else WindowChange(window.count, window.needed)
    )


def _fold_by(what: str) -> Callable[[Window], WindowState]:
    return lambda w: Folded(what, w.count, w.seconds, w.needed)


def _extreme(what: str) -> Callable[[Window], WindowState]:
    sign = 1.0 if what == "max" else -1.0
    return lambda w: Folded(what, 0, w.seconds, w.needed) if w.seconds else Extreme(sign, w.count, w.needed)


def _order_by(what: str) -> Callable[[Window], WindowState]:
    return lambda w: Ordered(what, w.count, w.seconds, w.needed, w.share)


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def _sqrt(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _make_window_function(name: str, meaning: str, state: Callable[[Window], WindowState], least: int = 1) -> Function:
    return Function(f"{name}(x, window)", ("number", "window"), "number", meaning, state=state, least=least)


_ALL = (
    _make_window_function("mean", "arithmetic mean of the window", _fold_by("mean")),
    _make_window_function("median", "middle value; of an even number, the mean of the two", _order_by("median")),
    _make_window_function("mad", "median absolute deviation from the median, unscaled", _order_by("mad")),
    _make_window_function("std", "sample standard deviation (n - 1)", _fold_by("std"), least=2),
    _make_window_function("min", "smallest value", _extreme("min")),
    _make_window_function("max", "largest value", _extreme("max")),
    _make_window_function("sum", "sum of the values", _fold_by("sum")),
    Function("quantile(x, share, window)", ("number", "share", "window"), "number",
             "the value that `share` (0 to 1) of the samples are below, linear between samples", _order_by("quantile")),
    Function("ewma(x, n)", ("number", "count"), "number",
             "exponentially weighted mean with weight 2 / (n + 1) on the newest sample",
             lambda w: Smoothed(w.count, w.needed)),
    _make_window_function("slope", "slope of the least-squares line, per sample", _fold_by("slope"), least=2),
    _make_window_function("delta", "newest less oldest value", _delta, least=2),
    _make_window_function("rate", "newest less oldest value, over the seconds between them",
              lambda w: Ends("rate", w.count, w.seconds, w.needed), least=2),
    Function("count(condition, window)", ("condition", "window"), "number",
             "how many samples of the window the condition holds for; not finite numbers are let in",
             lambda w: CountedByAge(w.seconds, w.needed) if w.seconds else Counted(w.count, w.needed)),
    Function("past(x, k=1)", ("number", "lag"), "number",
             "x as it stood k samples ago; windows over it are baselines, which freeze while the rule is pending or "
             "firing",
             lambda w: Past(w.count + 1), optional=1),
    Function("where(x, condition)", ("number", "condition"), "number",
             "x where the condition holds; at other steps x has no sample there, and keeps its last value",
             lambda w: Past(w.count)),
    Function("first(x)", ("number",), "number", "the first value since the run's start", lambda w: First()),
    Function("lowest(x)", ("number",), "number", "the lowest value since the run's start", lambda w: Lowest()),
    Function("highest(x)", ("number",), "number", "the highest value since the run's start",
             lambda w: Highest()),
    Function("steady_rise(x)", ("number",), "number",
             "by how much x has risen in a straight line, over its newest 12, 24, 48, ... samples; else 0. The "
             "low-water marks of the quarters of such a stretch rise one after the other, each by 27 % of the whole at "
             "least, and it still rises",
             lambda w: Steady("rise")),
    Function("steady_samples(x)", ("number",), "number", "the number of samples that steady_rise(x) is over",
             lambda w: Steady("samples")),
    Function("steady_steps(x)", ("number",), "number", "the number of steps that steady_rise(x) is over",
             lambda w: Steady("steps")),
    Function("age(metric)", ("metric",), "number", "steps since the metric's last sample; 0 where it is of this step"),
    Function("absent(metric, n)", ("metric", "count"), "condition",
             "no sample in the last n steps; without n: none since the run's start", optional=1),
    Function("isnan(x)", ("number",), "condition", "x is not a number", pure=math.isnan),
    Function("isinf(x)", ("number",), "condition", "x is infinite", pure=math.isinf),
    Function("isfinite(x)", ("number",), "condition", "x is neither NaN nor infinite", pure=math.isfinite),
    Function("abs(x)", ("number",), "number", "absolute value", pure=abs),
    Function("log(x)", ("number",), "number", "natural logarithm; NaN below 0", pure=_log),
    Function("sqrt(x)", ("number",), "number", "square root; NaN below 0", pure=_sqrt),
    Function('across(x, "max")', ("number", "how"), "number",
             'over all ranks (layers, GPUs, nodes, for a metric of theirs): "max", "min", "mean", '
             '"spread" (max less min), "norm" (the root of the sum of squares, as of shards), '
             '"argmax" (the rank that has the largest)'),
)  # fmt: skip

_DEFINED = (
    Function(
        "since_nonzero(x)", ("number",), "number",
        "x from its first sample that is not 0 on: a policy whose answers are all as good as each other has a loss "
        "of 0, which is no level to compare with",
        body="where(x, highest(abs(x)) > 0)",
    ),
    Function(
        "unskipped(x)", ("number",), "number",
        "x without the steps that GradScaler withheld: their gradient overflowed while a loss scale was tried, and "
        "was not applied",
        body="where(x, absent(step_skipped) or step_skipped == 0)",
    ),
    Function(
        "usual_change(x, window)", ("number", "window"), "number",
        "median change of x from one sample to the next, up or down; unlike `mad` it does not grow while x falls",
        body="median(abs(delta(x, 2)), window)",
    ),
    Function(
        "lost_share(x, level)", ("number", "number"), "number",
        "how far x is on the way back from the lowest `level` so far to the first: 0 at the best, 1 at the start",
        body="(x - lowest(level)) / (first(level) - lowest(level))",
    ),
    Function(
        "onsets(condition, window)", ("condition", "window"), "number",
        "how many times in the window the condition began to hold, after nine samples or more without it",
        body="count(condition and count(condition, 10) < 2, window)",
    ),
    Function(
        "around_zero(x)", ("number",), "condition",
        "x has been on both sides of 0, and has not come down by ten times its usual change: the loss of a policy "
        "gradient is such noise, and less noise once the policy is sure",
        lets={"level": "median(x, 20)"},
        body="lowest(level) * highest(x) < 0 and first(level) - lowest(level) <= 10 * highest(usual_change(x, 100))",
    ),
    Function(
        "stuck_at(x, level)", ("number", "number"), "condition",
        "x has not come further down from `level` than its noise explains",
        lets={
            "noise": "usual_change(x, 100)",
            "late": "lowest(median(x, 50))",
        },
        body="level - lowest(median(x, 10)) < 3.4 * noise"
        " and (level - late < 0.5 * noise or level - late < 0.02 * abs(level))",
        source="Recorded networks that never learnt came to 3.2 times the usual change at most; of 155 healthy runs"
        " one that learns from noisy batches to 3.6, and two detectors that had been trained before, whose "
        "loss indeed does not come down, to 3.0. A loss that jumps by half its level from batch to batch may"
        " have halved all the same, which the median of 50 shows.",
    ),
    Function(
        "loss_jumps(x)", ("number",), "condition",
        "the median of the newest three samples is far above the 100 before, in four ways: by 20 usual changes, "
        "above each of the last 30, by a twentieth of the level, and by a tenth of what x had come down since its "
        "start",
        lets={
            "now": "median(x, 3)",
            "base": "median(past(x, 3), 100)",
            "noise": "usual_change(past(x, 3), 100)",
            "progress": "first(now) - lowest(now)",
        },
        body="now > base + 20 * noise and now > max(past(x, 3), 30)"
        " and now - base > 0.05 * abs(base) and now - base > 0.1 * progress"
        " and (base > 0.1 * first(now) or now - base > 0.25 * progress)"
        " and (noise > 0 or now - base > 0.5 * progress)",
        source="No rule on single rows works: in most healthy recorded runs rows lie 6 MAD above the median. A hard"
        " batch, or noise that comes in bursts, is among the last 30. A run that starts from a good state "
        "has hardly made progress: hence the twentieth of the level. Of a loss under a tenth of its start a "
        "quarter of the progress must be lost, for a network that has learnt its data by heart meets single "
        "batches that it has not (0.03 to 0.4 for three rows, after a start at 2.3). Where most samples are "
        "the same, as 0 is of a hinge or triplet loss that has nearly learnt all, there is no usual change, "
        "and half must be lost: the few that are not 0 come in twos and threes.",
    ),
    Function(
        "explodes(x)", ("number",), "condition",
        "a single sample exceeds all before by as much as all of those had spread, and has more than doubled, where"
        " single samples have not stood out like that before",
        lets={
            "base": "median(past(x, 3), 100)",
            "best": "lowest(median(x, 3))",
            "worst": "highest(past(x, 3))",
            "calm": "highest(median(past(x, 3), 3))",
        },
        body="x > worst + (worst - best) and x - base > 1.1 * abs(base) and worst - best < 2 * (calm - best)",
        source="In 155 healthy recorded runs the most was 0.6 of the spread, but for one whose label tells of "
        "explosions; single hard batches come to twice the level (80 runs of small GPTs). Of rewards and "
        "heavy tails single rows lie twice as far from the best as any three in a row: there one more is "
        "nothing new.",
    ),
)  # fmt: skip
"""Functions defined by other functions: a call is replaced by `body`."""

FUNCTIONS: dict[str, Function] = {function.name: function for function in (*_ALL, *_DEFINED)}
"""Functions by name, in the order of the docs."""
