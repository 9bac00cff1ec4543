"""The step and the time of a logged row, by the names that trainers give them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import seconds

STEPS = (
    "step", "global_step", "_step", "iteration", "iter", "trainer/global_step", "steps", "num_updates", "num_steps",
    "train/step", "train_step", "update", "batch",
)  # fmt: skip
"""Keys of a step, the preferred ones first (Lightning, Hugging Face, W&B, Megatron, detectron2, fairseq)."""

TIMES = ("t", "time", "timestamp", "_timestamp", "wall_time", "created_at", "datetime", "date")
"""Keys of a time. A number counts only if it is a Unix time: detectron2's `time` is the duration of a step."""

EARLIEST = 1e9
"""Earliest time in Unix seconds, September 2001. A smaller number is a duration."""
UNITS = (1.0, 1e3, 1e6, 1e9)
"""How many of a unit are a second: Unix times are also written in milliseconds, microseconds and nanoseconds. A number
from `EARLIEST` on that is below 1,000 times that is in seconds; one of the next thousand times, in milliseconds."""

STEP_LIMIT = 2**53
"""Limit below which floats count steps exactly."""

NESTING_LIMIT = 3


def flat(row: Mapping[str, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object]]:
    """Yield the values of nested objects, with names such as `train/loss` for `{"train": {"loss": 2}}`."""
    for key, value in row.items():
        if isinstance(value, dict) and depth < NESTING_LIMIT:
            yield from flat(value, f"{prefix}{key}/", depth + 1)
        elif isinstance(value, int | float | str):
            yield prefix + key, value


def take(recording: Recording, line: int, row: Mapping[str, object]) -> None:
    """Add a row with any keys to a recording; values that are not numbers are ignored."""
    values: dict[str, float] = {}
    for key, value in flat(row):
        found = number(value)
        if found is not None:
            values[key] = found
    step_key = next((key for key in STEPS if key in values), None)
    step = values.pop(step_key) if step_key is not None else None
    if step is not None and not 0 <= step < STEP_LIMIT:
        recording.faults.add(line, f"{step_key} is {step:g}, and must be a number from 0 on")
        return
    time = _time(row, values)
    if values:
        recording.add(None if step is None else int(step), time, values)


def _time(row: Mapping[str, object], values: dict[str, float]) -> float | None:
    for key in TIMES:
        value = values.get(key)
        if value is not None and math.isfinite(value) and value >= EARLIEST:
            del values[key]
            return next((value / unit for unit in UNITS if value / unit < 1000 * EARLIEST), None)
        text = row.get(key)
        if isinstance(text, str) and (found := seconds(text)) is not None:
            return found
    return None
