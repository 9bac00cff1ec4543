"""What DeepSpeed prints: its progress, its pipeline engine's losses, and the steps that its loss scaler withholds.

    [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[0.0001], mom=[(0.9, 0.999)]
    steps: 10 loss: 2.3456 iter time (s): 1.234 samples/sec: 6.5
    [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536,

A withheld step is printed without its number: it is taken for the first step after the last line that has one. Other
lines of progress are the script's own, and are not read.
"""

from __future__ import annotations

import re
from pathlib import Path

from sentinel.logs.recording import Recording, number
from sentinel.logs.text import lines, matches, plain, seconds

NAME = "DeepSpeed"

_NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf))"
_PROGRESS = re.compile(rf"\bstep=(\d+), skipped=(\d+), lr=\[?{_NUMBER}")
_PIPELINE = re.compile(rf"\bsteps: (\d+) loss: {_NUMBER}(?: iter time \(s\): {_NUMBER})?")
_OVERFLOW = re.compile(rf"OVERFLOW! Rank 0 Skipping step\. Attempted loss scale: {_NUMBER}")
_ANY = re.compile("|".join(pattern.pattern for pattern in (_PROGRESS, _PIPELINE, _OVERFLOW)))
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+\]")


def recognised(path: Path, head: bytes) -> bool:
    """Whether one of its lines is in it."""
    return b"\0" not in head and matches(path, _ANY)


def read(path: Path) -> Recording:
    """A row a line that tells of a step."""
    recording, step, told = Recording(path, NAME), 0, _Told()
    for _, raw in lines(path):
        line = plain(raw)
        stamp = _STAMP.search(line)
        time = seconds(stamp[1]) if stamp else None
        for overflow in _OVERFLOW.finditer(line):
            step = told.one(step + 1)
            recording.add(step, time, {"step_skipped": 1.0, **_numbers(loss_scale=overflow[1])})
        if found := _PROGRESS.search(line):
            step = int(found[1])
            recording.add(step, time, {**told.total(step, int(found[2])), **_numbers(learning_rate=found[3])})
        elif found := _PIPELINE.search(line):
            step = int(found[1])
            recording.add(step, time, _numbers(loss=found[2], step_seconds=found[3]))
    return recording


class _Told:
    """Withheld steps are told twice: each when it happens, where logging lets it through, and all in the progress."""

    def __init__(self) -> None:
        self._count, self._step = 0, -1

    def one(self, step: int) -> int:
        """One is told of, at that step."""
        self._count, self._step = self._count + 1, step
        return step

    def total(self, step: int, count: int) -> dict[str, float]:
        """So many up to that step: was one of them not told of yet?"""
        news, self._count = count > self._count, max(count, self._count)
        return {} if step == self._step else {"step_skipped": float(news)}


def _numbers(**texts: str | None) -> dict[str, float]:
    found = {name: number(text) for name, text in texts.items()}
    return {name: value for name, value in found.items() if value is not None}
