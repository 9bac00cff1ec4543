"""Names of signals in Prometheus: the collector writes these names, alerting rules and dashboards read them."""

from __future__ import annotations

from typing import Literal

from sentinel.signals import CLOCK, SIGNALS, Signal

PREFIX = "sentinel_"


def with_unit(signal: Signal) -> str:
    """Return a signal's name in Prometheus' form, with its unit at the end."""
    bare = signal.unit == "1" or signal.name.endswith(f"_{signal.unit}")
    return signal.name if bare else f"{signal.name}_{signal.unit}"


def of_run(signal: Signal) -> bool:
    """Return whether the run's value of a signal is exported: it comes with a step, and is not part of another
    signal."""
    return signal.scope == "rank" and signal.tier != CLOCK and not signal.part_of


Scope = Literal["run", "rank", "gpu", "node"]
"""Scopes that a series may have; series of layers are not exported by signal."""


def name_series(name: str, scope: Scope) -> str:
    """Return the full series name of a signal, as in Prometheus; empty where there is none."""
    signal = SIGNALS.get(name)
    if signal is None:
        return ""
    counted = "_total" if signal.kind == "counter" else ""
    if scope == "run":
        return f"{PREFIX}run_{with_unit(signal)}{counted}" if of_run(signal) else ""
    if scope == "rank":
        return f"{PREFIX}{with_unit(signal)}" if signal.by_rank else ""
    return f"{PREFIX}{with_unit(signal)}{counted}" if signal.scope == scope and signal.kind != "event" else ""
