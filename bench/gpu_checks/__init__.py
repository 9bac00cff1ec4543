"""The checks of bench/gpu.py, a module each, with a `check(device)` that yields what it found, line by line."""

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
    """Whether the bar is met; None: there is none."""
    bar: str = ""


def run_check(name: str, device: str) -> None:
    """Run a check in this process and print each line as JSON."""
    for line in importlib.import_module(f"{__name__}.{name}").check(device):
        print(json.dumps({key: value for key, value in line._asdict().items() if value != ""}), flush=True)


def at_most(what: str, value: float, bar: float, form: str, device: str) -> Line:
    """A figure that must not be over its bar; on the CPU, where it says nothing, there is none."""
    if device == "cpu":
        return Line(what, format(value, form))
    return Line(what, format(value, form), math.isfinite(value) and value <= bar, format(bar, form))


def equal(what: str, one: Any, other: Any) -> Line:
    """Two things that must be the same."""
    return Line(what, "the same" if one == other else f"{one} against {other}", one == other)
