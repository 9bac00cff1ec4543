"""The checks of bench/gpu.py: each is a module whose `check(device)` yields what it found, line by line."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any, NamedTuple


class Line(NamedTuple):
    """One thing that was looked at."""

    what: str
    figure: str
    ok: bool | None = None
    """Whether the bar is met; None: there is no bar."""
    bar: str = ""


def run_check(name: str, device: str) -> None:
    """Run a check in this process and print each line that it yields as JSON."""
    for line in importlib.import_module(f"{__name__}.{name}").check(device):
        print(json.dumps({key: value for key, value in line._asdict().items() if value != ""}), flush=True)


def at_most(what: str, value: float, bar: float, form: str, device: str) -> Line:
    """Return a line for a figure that must not exceed its bar; on the CPU, where it means nothing, without a bar."""
    if device == "cpu":
        return Line(what, format(value, form))
    return Line(what, format(value, form), math.isfinite(value) and value <= bar, format(bar, form))


def equal(what: str, one: Any, other: Any) -> Line:
    """Return a line for two things that must be equal."""
    return Line(what, "the same" if one == other else f"{one} against {other}", one == other)
