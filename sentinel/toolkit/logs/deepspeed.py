"""Reads DeepSpeed's output: its progress, its pipeline engine's losses, and the steps that its loss scaler withholds.

    [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[0.0001], mom=[(0.9, 0.999)]
    steps: 10 loss: 2.3456 iter time (s): 1.234 samples/sec: 6.5
    [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536,

A withheld step is printed without its number: it is taken to be the first step after the last line with a number.
Withheld steps that only the progress counts are taken to be the last ones before it. The steps between were applied,
and get rows that say so: rules count steps. Other lines of progress are the script's own, and are not read. The line of
step 0, which the engine prints at its creation, is no progress: only the Trainer's own lines may follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import lines, matches, plain, seconds

NAME = "DeepSpeed"

_NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf))"
_PROGRESS = re.compile(rf"\bstep=([1-9]\d*), skipped=(\d+), lr=\[?{_NUMBER}")
_PIPELINE = re.compile(rf"\bsteps: (\d+) loss: {_NUMBER}(?: iter time \(s\): {_NUMBER})?")
_OVERFLOW = re.compile(rf"OVERFLOW! Rank 0 Skipping step\. Attempted loss scale: {_NUMBER}")
_NUMBERED = re.compile("|".join(pattern.pattern for pattern in (_PROGRESS, _PIPELINE)))
"""Lines that number steps. Without any, as under the Trainer, withheld steps cannot be told from applied ones."""
FILLED_STEPS = 10_000
"""Most steps between two lines of progress. With more between them, the run continued from another place."""
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+\]")


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file has a line of DeepSpeed that numbers a step."""
    return b"\0" not in head and matches(path, _NUMBERED)


def read(path: Path) -> Recording:
    """Return one row for each line about a step, and for each step that is known to have been applied."""
    recording, skips, last = Recording(path, NAME), _Skips(), 0
    for _, raw in lines(path):
        line = plain(raw)
        stamp = _STAMP.search(line)
        time = seconds(stamp[1]) if stamp else None
        for overflow in _OVERFLOW.finditer(line):
            recording.add(skips.take_one(), time, {"step_skipped": 1.0, **_numbers(loss_scale=overflow[1])})
        if found := _PROGRESS.search(line):
            step = int(found[1])
            for each, skipped in skips.take_all(step, int(found[2])):
                if each >= last:  # the pipeline engine may have printed the step before
                    recording.add(each, time, {"step_skipped": skipped})
            recording.add(step, time, _numbers(learning_rate=found[3]))
            last = 0
        elif found := _PIPELINE.search(line):
            last = int(found[1])
            recording.add(last, time, _numbers(loss=found[2], step_seconds=found[3]))
    return recording


class _Skips:
    """Numbers withheld steps, which are printed twice: each as it happens, if logged, and all in the progress."""

    def __init__(self) -> None:
        self._step, self._count = 0, 0
        """The last step known to have been withheld or applied, and how many were withheld by then."""

    def take_one(self) -> int:
        """Count the step after the last one as withheld, and return its number."""
        self._step, self._count = self._step + 1, self._count + 1
        return self._step

    def take_all(self, step: int, count: int) -> Iterator[tuple[int, float]]:
        """Take the progress: `count` steps were withheld by `step`. Yields (step, 1 if withheld or 0) of the steps
        since the last known one, or of this one alone if none is known."""
        since, untold = self._step, max(count - self._count, 0)
        if not 0 < since <= step <= since + FILLED_STEPS:
            since = step - 1
        self._step, self._count = step, count
        for each in range(since + 1, step + 1):
            yield each, float(each > step - untold)


def _numbers(**texts: str | None) -> dict[str, float]:
    found = {name: number(text) for name, text in texts.items()}
    return {name: value for name, value in found.items() if value is not None}
