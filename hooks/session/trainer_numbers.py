"""What a trainer logs by itself, handed on to the run: integrations have one of these."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.session.monitor import Monitor
from sentinel.naming import clean_name
from sentinel.signals import SIGNALS

LIMIT = 256
"""Columns that are handed on. A trainer logs a few dozen; each is a series in the history and in Prometheus."""


class TrainerNumbers:
    """Gives each column a name that rules can write, and logs it. What Sentinel measures itself stays as measured."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """Column -> name; empty: left out."""
        self._full = False

    def log(self, monitor: Monitor, columns: Mapping[str, object]) -> None:
        """Log finite numbers, for the present step. It never waits for a device: what is on one is not checked."""
        with fault_guard.swallow_faults("the trainer's numbers", "they are lost"):
            found: dict[str, float | torch.Tensor] = {}
            for column, value in columns.items():
                if isinstance(value, int | float | torch.Tensor) and _is_finite(value):
                    found[self._name(str(column))] = value
            found.pop("", None)
            if found:
                monitor.log(**found)

    def _name(self, column: str) -> str:
        name = self._names.get(column)
        if name is None:
            if len(self._names) >= LIMIT:
                if not self._full:
                    self._full = True
                    fault_guard.say(f"the trainer logs more than {LIMIT} numbers: {column!r} and others are left out")
                return ""
            name = clean_name(column, self._names.values())
            self._names[column] = name = "" if name in SIGNALS else name
        return name


def _is_finite(value: float | torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and (not value.is_cpu or bool(torch.isfinite(value)))
    return math.isfinite(value)
