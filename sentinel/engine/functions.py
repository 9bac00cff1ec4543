"""The functions of the rule language: what each takes, gives and keeps. The docs are made of this table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sentinel.engine.folds import Folded
from sentinel.engine.order_statistics import Ordered
from sentinel.engine.since_start import First, Highest, Lowest, Smoothed
from sentinel.engine.windows import Change, Counted, CountedByAge, Ends, Extreme, Past, State

Kind = Literal["number", "condition", "metric", "window", "count", "share", "lag", "how"]
"""What an argument must be. `number` and `condition` are expressions, `metric` a bare name; the others are literals:
`window` a number of samples or a duration, `count` a number of samples, `share` 0 to 1, `lag` a number of samples."""

HOWS = ("max", "min", "mean", "spread", "argmax")
"""What `across` makes of the values of all ranks, layers, GPUs or nodes."""


@dataclass(frozen=True, slots=True)
class Window:
    """The literal arguments of a call, as a state is made of them."""

    count: int = 0
    seconds: float = 0.0
    needed: int = 0
    """Samples that will do, where the rule has `min_samples`; 0: the window must be full."""
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class Function:
    """One row of the table."""

    signature: str
    takes: tuple[Kind, ...]
    gives: Literal["number", "condition"]
    meaning: str
    state: Callable[[Window], State] | None = None
    """Makes what the call keeps for one series; None where it keeps nothing."""
    pure: Callable[[float], float] | None = None
    optional: int = 0
    """How many arguments at the end may be left out."""
    least: int = 1
    """Smallest window."""

    @property
    def name(self) -> str:
        return self.signature.partition("(")[0]


def _delta(window: Window) -> State:
    return Ends("delta", 0, window.seconds, window.needed) if window.seconds else Change(window.count, window.needed)


def _folded(what: str) -> Callable[[Window], State]:
    return lambda w: Folded(what, w.count, w.seconds, w.needed)


def _extreme(what: str) -> Callable[[Window], State]:
    sign = 1.0 if what == "max" else -1.0
    return lambda w: Folded(what, 0, w.seconds, w.needed) if w.seconds else Extreme(sign, w.count, w.needed)


def _ordered(what: str) -> Callable[[Window], State]:
    return lambda w: Ordered(what, w.count, w.seconds, w.needed, w.share)


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def _sqrt(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _windowed(name: str, meaning: str, state: Callable[[Window], State], least: int = 1) -> Function:
    return Function(f"{name}(x, window)", ("number", "window"), "number", meaning, state=state, least=least)


_ALL = (
    _windowed("mean", "arithmetic mean of the window", _folded("mean")),
    _windowed("median", "middle value; the mean of the two where their number is even", _ordered("median")),
    _windowed("mad", "median absolute deviation from the median, unscaled", _ordered("mad")),
    _windowed("std", "sample standard deviation (n - 1)", _folded("std"), least=2),
    _windowed("min", "smallest value", _extreme("min")),
    _windowed("max", "largest value", _extreme("max")),
    _windowed("sum", "sum of the values", _folded("sum")),
    Function("quantile(x, share, window)", ("number", "share", "window"), "number",
             "the value that `share` (0 to 1) of the samples are below, linear between samples", _ordered("quantile")),
    Function("ewma(x, n)", ("number", "count"), "number",
             "exponentially weighted mean with weight 2 / (n + 1) on the newest sample",
             lambda w: Smoothed(w.count, w.needed)),
    _windowed("slope", "slope of the least-squares line, per sample", _folded("slope"), least=2),
    _windowed("delta", "newest less oldest value", _delta, least=2),
    _windowed("rate", "newest less oldest value, over the seconds between them",
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
             '"spread" (max less min), "argmax" (the rank that has the largest)'),
)  # fmt: skip

FUNCTIONS: dict[str, Function] = {function.name: function for function in _ALL}
"""By name. Order is the order of the docs."""
