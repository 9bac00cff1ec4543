"""What signals are called in Prometheus: the collector writes these names, alerting rules and dashboards read them."""

from __future__ import annotations

from typing import Literal

from sentinel.signals import CLOCK, SIGNALS, Signal

PREFIX = "sentinel_"


def with_unit(signal: Signal) -> str:
    """A signal's name as Prometheus wants it, its unit at the end."""
    bare = signal.unit == "1" or signal.name.endswith(f"_{signal.unit}")
    return signal.name if bare else f"{signal.name}_{signal.unit}"


def of_run(signal: Signal) -> bool:
    """Whether the run's value of a signal is exported: it comes with a step, and is not part of another signal."""
    return signal.scope == "rank" and signal.tier != CLOCK and not signal.part_of


Scope = Literal["run", "rank", "gpu", "node"]
"""Of which a series is; of layers none is exported by signal."""


def name_series(name: str, scope: Scope) -> str:
    """The series of a signal, whole as Prometheus has it; empty where there is none."""
    signal = SIGNALS.get(name)
    if signal is None:
        return ""
    counted = "_total" if signal.kind == "counter" else ""
    if scope == "run":
        return f"{PREFIX}run_{with_unit(signal)}{counted}" if of_run(signal) else ""
    if scope == "rank":
        return f"{PREFIX}{with_unit(signal)}" if signal.by_rank else ""
    return f"{PREFIX}{with_unit(signal)}{counted}" if signal.scope == scope and signal.kind != "event" else ""
