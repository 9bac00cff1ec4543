"""The cost of a sample must not grow with the window, and hardly with the layers.

Cost is counted in executed lines of Python, which do not depend on the machine.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sentinel.engine import RUN, Entity, Evaluator, Observation, Table
from sentinel.engine.expressions.functions import FUNCTIONS, Window
from sentinel.engine.windows.sliding import WindowState
from sentinel.rulebook import loader

SMALL, LARGE = 50, 5_000
WINDOWED = [name for name, function in FUNCTIONS.items() if function.state is not None]


def count_lines(work: Callable[[], None]) -> int:
    """Return the number of lines of Python that `work` runs."""
    ran = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return ran


def lines_a_sample(make: Callable[[Window], WindowState], count: int) -> float:
    """Return the lines run for a sample of a full window, over as many samples as the large window has."""
    generator = random.Random(1)
    values = [generator.random() for _ in range(2 * LARGE)]
    state = make(Window(count=count))

    def push(start: int) -> None:
        for i, value in enumerate(values[start : start + LARGE], start):
            state.push(float(i), value)

    push(0)
    return count_lines(lambda: push(LARGE)) / LARGE


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_a_hundred_times_as_long_costs_no_more(name: str) -> None:
    """`mad` searches by halving, which takes 13 halvings instead of 6 for a hundred times as many samples."""
    make = FUNCTIONS[name].state
    assert make is not None
    assert lines_a_sample(make, LARGE) < (2.5 if name == "mad" else 1.3) * lines_a_sample(make, SMALL)


@pytest.mark.parametrize("layers", [50, 500])
def test_a_layer_for_which_no_rule_holds_costs_next_to_nothing(layers: int) -> None:
    """A fast loop that samples all has 200 layers at each step: judged one by one they took 15 % of its time."""
    entities = tuple(Entity("layer", f"l{number}") for number in range(layers))
    norms, nonfinite = array("f", [1.0] * layers), array("f", [0.0] * layers)
    table = Table(entities, {"layer_grad_norm": norms, "layer_nonfinite": nonfinite})
    run = [Observation(seq, float(seq), {RUN: {"grad_norm_applied": 1.0}}, table) for seq in range(60)]
    evaluator = Evaluator(loader.stock_rules(), run="r", rewindable=False)

    def observe(steps: list[Observation]) -> None:
        for step in steps:
            evaluator.observe(step)

    observe(run[:50])
    # What does not depend on the layers comes to some hundred lines.
    assert count_lines(lambda: observe(run[50:])) / 10 < 3 * layers + 1000
