"""Every window function against the simplest computation of it, on any input with gaps and non-finite samples."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import RUN, Evaluator, Observation, load_rules
from sentinel.engine.expressions.functions import FUNCTIONS, Window
from sentinel.engine.windows.folds import Folded
from sentinel.engine.windows.order_statistics import Ordered, median_deviation

Samples = Sequence[float | None]

NUMBERS = st.floats(min_value=-1e6, max_value=1e6).map(lambda value: round(value, 6))
SAMPLES = st.lists(st.one_of(NUMBERS, NUMBERS, st.sampled_from([math.nan, math.inf, -math.inf, None])), max_size=100)


def played(function: str, samples: Samples, *, interval: float = 1.0, keys: str = "") -> list[float | None]:
    """Return the value of `function` after each step; None: it has none yet."""
    text = f"{{group: t, rules: [{{alert: T, let: {{v: '{function}'}}, expr: loss > 1e9{keys}}}]}}"
    evaluator, said = Evaluator(load_rules(text, "t").rules, run="t"), list[float | None]()
    for seq, sample in enumerate(samples):
        evaluator.observe(Observation(seq, seq * interval, {RUN: {} if sample is None else {"loss": sample}}))
        said.append(evaluator.status()[0].values.get("v"))
    return said


def finite(samples: Samples) -> list[list[float]]:
    """Return the finite samples so far, after each step."""
    kept, history = list[float](), list[list[float]]()
    for sample in samples:
        kept += [sample] if sample is not None and math.isfinite(sample) else []
        history.append(kept.copy())
    return history


def expected(samples: Samples, window: int, compute: Callable[[list[float]], float]) -> list[float | None]:
    """Return `compute` of the last `window` finite samples after each step, once there are so many."""
    return [compute(kept[-window:]) if len(kept) >= window else None for kept in finite(samples)]


def close(values: Sequence[float | None]) -> list[object]:
    """Return values that are equal but for rounding: values are up to 1e6, and sums of 40 of them up to 4e7."""
    return [None if value is None else pytest.approx(value, rel=1e-9, abs=1e-6) for value in values]


def mad(values: list[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


COMPUTED: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "mad": mad,
    "std": statistics.stdev,
    "min": min,
    "max": max,
    "sum": math.fsum,
    "slope": lambda values: statistics.linear_regression(range(len(values)), values).slope,
    "delta": lambda values: values[-1] - values[0],
}


@pytest.mark.parametrize("name", COMPUTED)
@settings(max_examples=40)
@given(samples=SAMPLES, window=st.integers(2, 40))
def test_a_window_of_samples(name: str, samples: Samples, window: int) -> None:
    assert played(f"{name}(loss, {window})", samples) == close(expected(samples, window, COMPUTED[name]))


@pytest.mark.parametrize("window", [1, 2, 3, 20, 33])
@pytest.mark.parametrize("name", ["min", "max", "median", "quantile", "count", "past"])
def test_a_window_of_samples_after_very_many(name: str, window: int) -> None:
    """Samples rise, fall and stay level in turn, many of them equal: what is kept is dropped, and packed again."""
    source, values, level = random.Random(window), list[float](), 0
    for place in range(2000):
        level += source.choice([(-1, 0, 1), (0, 1), (-1, 0), (0,), (-40, 40)][place // 100 % 5])
        values.append(float(level % 2 if name == "count" else level))
    computed = {**COMPUTED, "count": math.fsum, "past": lambda last: last[0], "quantile": min}[name]
    make, kept = FUNCTIONS[name].state, window + 1 if name == "past" else window
    assert make is not None
    state = make(Window(count=window, share=0.0 if name == "quantile" else 0.5))
    said = [computed(values[end - kept : end]) for end in range(kept, len(values) + 1)]
    assert [state.push(0.0, value) for value in values] == [None] * (kept - 1) + said


@given(samples=SAMPLES, window=st.integers(1, 40), percent=st.integers(0, 100))
def test_quantile_is_that_of_numpy(samples: Samples, window: int, percent: int) -> None:
    reference = expected(samples, window, lambda values: float(np.quantile(values, percent / 100)))
    assert played(f"quantile(loss, {percent / 100}, {window})", samples) == close(reference)


@given(samples=SAMPLES, window=st.integers(2, 40))
def test_rate_is_per_second(samples: Samples, window: int) -> None:
    times = [0.5 * seq for seq, sample in enumerate(samples) if sample is not None and math.isfinite(sample)]
    reference = [
        (kept[-1] - kept[-window]) / (times[len(kept) - 1] - times[len(kept) - window]) if len(kept) >= window else None
        for kept in finite(samples)
    ]
    assert played(f"rate(loss, {window})", samples, interval=0.5) == close(reference)


@given(samples=SAMPLES, window=st.integers(2, 40), least=st.integers(2, 50))
def test_min_samples_lets_a_window_speak_before_it_is_full(samples: Samples, window: int, least: int) -> None:
    reference = [
        statistics.median(kept[-window:]) if len(kept) >= min(window, least) else None for kept in finite(samples)
    ]
    assert played(f"median(loss, {window})", samples, keys=f", min_samples: {least}") == close(reference)


@given(samples=SAMPLES, seconds=st.integers(1, 30))
def test_a_window_of_time_is_full_once_it_was_lived_through(samples: Samples, seconds: int) -> None:
    """At 0.5 s a step, a window of s seconds holds the samples younger than that."""
    stamped = [(0.5 * seq, value) for seq, value in enumerate(samples) if value is not None and math.isfinite(value)]
    reference: list[float | None] = []
    said = None
    for seq, sample in enumerate(samples):
        now = 0.5 * seq
        if sample is not None and math.isfinite(sample) and now - stamped[0][0] >= seconds:
            said = statistics.fmean(value for time, value in stamped if now - seconds < time <= now)
        reference.append(said)
    assert played(f"mean(loss, {seconds}s)", samples, interval=0.5) == close(reference)


@pytest.mark.parametrize("name", COMPUTED)
@settings(max_examples=30)
@given(samples=SAMPLES, seconds=st.integers(2, 30))
def test_windows_of_time_hold_what_those_of_samples_would(name: str, samples: Samples, seconds: int) -> None:
    """With one sample a second or none, a window holds the samples that there are of the last seconds."""
    least = 1 if name not in ("std", "slope", "delta") else 2
    reference: list[float | None] = []
    said, begun = None, None
    for seq, sample in enumerate(samples):
        if sample is not None and math.isfinite(sample):
            begun = seq if begun is None else begun
            recent = finite([value for value in samples[max(0, seq + 1 - seconds) : seq + 1]])[-1]
            if seq - begun >= seconds and len(recent) >= least:
                said = COMPUTED[name](recent)
        reference.append(said)
    assert played(f"{name}(loss, {seconds}s)", samples) == close(reference)


@given(samples=SAMPLES, window=st.integers(1, 40))
def test_count_lets_non_finite_samples_in(samples: Samples, window: int) -> None:
    bad, reference = list[bool](), list[float | None]()
    for sample in samples:
        bad += [] if sample is None else [not math.isfinite(sample)]
        reference.append(float(sum(bad[-window:])) if len(bad) >= window else None)
    assert played(f"count(not isfinite(loss), {window})", samples) == reference


@given(samples=SAMPLES, back=st.integers(1, 40))
def test_past_is_the_sample_that_many_before(samples: Samples, back: int) -> None:
    assert played(f"past(loss, {back})", samples) == expected(samples, back + 1, lambda values: values[0])
    assert played(f"mean(past(loss, {back}), 3)", samples) == close(
        expected(samples, back + 3, lambda values: statistics.fmean(values[:3]))
    )


@given(samples=SAMPLES)
def test_since_the_start(samples: Samples) -> None:
    history = finite(samples)
    assert played("first(loss)", samples) == [kept[0] if kept else None for kept in history]
    assert played("lowest(loss)", samples) == [min(kept, default=None) for kept in history]
    assert played("highest(loss)", samples) == [max(kept, default=None) for kept in history]
    medians = expected(samples, 5, statistics.median)
    assert played("lowest(median(loss, 5))", samples) == [
        min((value for value in medians[: seq + 1] if value is not None), default=None) for seq in range(len(samples))
    ]


def is_line(blocks: Sequence[float]) -> bool:
    lows = [min(blocks[at : at + 3]) for at in (0, 3, 6, 9)]
    whole = lows[3] - lows[0]
    if whole <= 0 or min(np.diff(lows)) < 0.27 * whole or blocks[-1] - lows[3] < 1.5 * whole / 9:
        return False
    return statistics.correlation(range(12), blocks) > 0.98


@pytest.mark.slow
@given(seed=st.integers(0, 999), tooth=st.integers(1, 9), begin=st.integers(0, 40))
def test_a_steady_rise_is_that_of_the_best_stretch(seed: int, tooth: int, begin: int) -> None:
    source = random.Random(seed)
    samples = [max(n - begin, 0) + 3.0 * (n % tooth) + source.random() for n in range(120)]
    reference: list[tuple[float, float] | None] = []
    for end in range(1, len(samples) + 1):
        best = (0.0, 0.0)
        for size in (1, 2, 4, 8):
            blocks = [min(samples[at : at + size]) for at in range(0, end - size + 1, size)][-12:]
            if len(blocks) == 12 and is_line(blocks) and (blocks[-1] - blocks[0]) * size > best[0] * best[1] / 12:
                best = (blocks[-1] - blocks[0], 12.0 * size)
        reference.append(best if end >= 12 else None)
    assert played("steady_rise(loss)", samples) == [found and pytest.approx(found[0]) for found in reference]
    assert played("steady_samples(loss)", samples) == [found and found[1] for found in reference]


def test_the_steps_of_a_steady_rise_count_those_without_a_sample() -> None:
    samples = [None if n % 4 else float(n) for n in range(48)]
    assert played("steady_steps(loss)", samples)[44:] == [45.0] * 4


@given(samples=SAMPLES, span=st.integers(1, 30))
def test_ewma_is_that_of_pandas_without_adjustment(samples: Samples, span: int) -> None:
    def smoothed(kept: list[float]) -> float:
        value = kept[0]
        for sample in kept[1:]:
            value += 2 / (span + 1) * (sample - value)
        return value

    reference = [smoothed(kept) if len(kept) >= span else None for kept in finite(samples)]
    assert played(f"ewma(loss, {span})", samples) == close(reference)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("abs(loss)", [2.0, 0.0, 2.0, math.inf]),
        ("sqrt(loss)", [math.nan, 0.0, math.sqrt(2), math.inf]),
        ("log(loss)", [math.nan, -math.inf, math.log(2), math.inf]),
        ("count(isnan(loss), 1)", [0, 0, 0, 0, 1]),
        ("count(isinf(loss), 1)", [0, 0, 0, 1, 0]),
        ("count(isfinite(loss), 1)", [1, 1, 1, 0, 0]),
    ],
)
def test_functions_of_one_number(call: str, expected: list[float]) -> None:
    samples = [-2.0, 0.0, 2.0, math.inf, math.nan][: len(expected)]
    assert played(call, samples) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("name", ["mean", "std", "sum", "slope"])
def test_a_huge_value_leaves_no_trace_once_it_is_gone(name: str) -> None:
    clean, hit = Folded(name, 50), Folded(name, 50)
    for i in range(400):
        said = (clean.push(i, math.sin(i)), hit.push(i, 1e300 if i in (100, 130) else math.sin(i)))
    assert said[1] == pytest.approx(said[0], rel=1e-9)


def test_mean_does_not_drift() -> None:
    window = Folded("mean", 10)
    for i in range(50_000):
        said = window.push(i, 0.1 if i % 2 else 1e9)
    assert said == pytest.approx((1e9 + 0.1) / 2, rel=1e-15)


def test_mad_of_two_neighbouring_numbers_whose_middle_is_rounded_to_one_of_them() -> None:
    low, high = 1 + 2**-52, 1 + 2**-51
    assert played("mad(loss, 2)", [low, high]) == [None, (high - low) / 2]


def test_mad_of_a_large_window_takes_no_pass_over_it() -> None:
    """`mad` is a binary search: of 20,001 samples it reads about 60."""

    class Counting(list[float]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            Counting.reads += 1
            return super().__getitem__(index)

    assert median_deviation(Counting(range(20_001))) == 5000  # type: ignore[arg-type]
    assert Counting.reads < 100


def test_a_window_does_not_keep_what_has_left_it() -> None:
    window = Ordered("quantile", 10)
    for i in range(5000):
        window.push(i, float(i))
    assert (len(window), len(window._values) < 64, list(window._sorted)) == (
        10,
        True,
        [float(i) for i in range(4990, 5000)],
    )


def test_a_window_of_time_is_bounded() -> None:
    window = Ordered("quantile", 0, seconds=1e9, needed=1)
    window._count = 1000
    for i in range(5000):
        window.push(i, float(i))
    assert len(window) == 1000
