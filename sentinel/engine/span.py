"""Lengths of time: "1 step", "20 steps", "90s", "5m", "2h", and "3 of 5 steps"."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""Unit -> seconds."""

DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)")
STEPS = re.compile(r"(\d{1,9}) steps?")
SHARE = re.compile(r"(\d{1,4}) of (\d{1,4}) steps")


@dataclass(frozen=True, slots=True)
class Span:
    """A length in steps, or in seconds where `steps` is 0."""

    steps: int = 0
    seconds: float = 0.0

    def is_reached(self, steps: int, seconds: float) -> bool:
        """Return whether so many steps or seconds are at least this long."""
        return seconds >= self.seconds if self.seconds else steps >= self.steps

    def __str__(self) -> str:
        if self.seconds:
            return f"{self.seconds:g}s"
        return f"{self.steps} step{'s' * (self.steps != 1)}"


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a condition must hold before its rule fires: a span, or `times` of the last `of` judgements."""

    span: Span = Span(steps=1)
    times: int = 0
    of: int = 0

    def __str__(self) -> str:
        return f"{self.times} of {self.of} steps" if self.of else str(self.span)


def seconds(text: str) -> float | None:
    """Read a duration in seconds, `5m` -> 300.0; None where it is none."""
    match = DURATION.fullmatch(text)
    return float(match[1]) * UNITS[match[2]] if match else None


def span(text: str) -> Span | None:
    """Read a span, `20 steps` or `90s`; None where it is neither."""
    if match := STEPS.fullmatch(text):
        return Span(steps=int(match[1]))
    length = seconds(text)
    return None if not length else Span(seconds=length)


def hold(text: str) -> Hold | None:
    """Read what `span` reads, or `3 of 5 steps`; None where it is neither or can never hold."""
    if match := SHARE.fullmatch(text):
        times, of = int(match[1]), int(match[2])
        return Hold(times=times, of=of) if 1 <= times <= of else None
    length = span(text)
    return Hold(length) if length and length != Span() else None
