"""What a sample costs must not grow with the window: lines of Python that run, which do not depend on the machine."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sentinel.engine.expressions.functions import FUNCTIONS, Window
from sentinel.engine.windows.sliding import WindowState

SMALL, LARGE = 50, 5_000
WINDOWED = [name for name, function in FUNCTIONS.items() if function.state is not None]


def lines_a_sample(make: Callable[[Window], WindowState], count: int) -> float:
    """Over as many samples as the large window has, after the window is full."""
    generator = random.Random(1)
    values = [generator.random() for _ in range(2 * LARGE)]
    state, ran = make(Window(count=count)), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        return trace

    for i, value in enumerate(values[:LARGE]):
        state.push(float(i), value)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for i, value in enumerate(values[LARGE:], LARGE):
            state.push(float(i), value)
    finally:
        sys.settrace(before)
    return ran / LARGE


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_a_hundred_times_as_long_costs_no_more(name: str) -> None:
    """`mad` looks by halves, which is 7 times more over a hundred times as many samples, of 6 then and 13 now."""
    make = FUNCTIONS[name].state
    assert make is not None
    assert lines_a_sample(make, LARGE) < (2.5 if name == "mad" else 1.3) * lines_a_sample(make, SMALL)
