"""What signals are called in Prometheus: the collector writes these names, alerting rules and dashboards read them."""

from __future__ import annotations

from typing import Literal

from sentinel.signals import CLOCK, SIGNALS, Signal

PREFIX = "sentinel_"
BY_RANK = (
    "loss",
    "grad_norm",
    "step_seconds",
    "data_seconds",
    "rss_bytes",
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_inactive_split_bytes",
    "loss_scale",
)
"""Signals that are worth a series a rank."""
COUNTED = frozenset(
    {
        "allocation_retries",
        "out_of_memory_errors",
        "gpu_ecc_corrected",
        "gpu_ecc_uncorrected",
        "gpu_pcie_replays",
        "gpu_nvlink_errors",
    }
)
"""Signals that only rise: counters."""
XIDS = frozenset({"gpu_xid", "gpu_xid_program"})
"""Events: of one reading only, between two scrapes. They are counted as faults."""


def with_unit(signal: Signal) -> str:
    """A signal's name as Prometheus wants it, its unit at the end."""
    bare = signal.unit == "1" or signal.name.endswith(f"_{signal.unit}")
    return signal.name if bare else f"{signal.name}_{signal.unit}"


def of_run(signal: Signal) -> bool:
    """Whether the run's value of a signal is exported: those that come with a step, and are no part of another."""
    return signal.scope == "rank" and signal.tier != CLOCK and not signal.name.endswith("_sharded")


Scope = Literal["run", "rank", "gpu", "node"]
"""Of which a series is; of layers none is exported by signal."""


def exported(name: str, scope: Scope) -> str:
    """The series of a signal, whole as Prometheus has it; empty where there is none."""
    signal = SIGNALS.get(name)
    if signal is None:
        return ""
    counted = "_total" if name in COUNTED else ""
    if scope == "run":
        return f"{PREFIX}run_{with_unit(signal)}{counted}" if of_run(signal) else ""
    if scope == "rank":
        by_rank = name in BY_RANK or (signal.scope == "rank" and signal.tier == CLOCK)
        return f"{PREFIX}{with_unit(signal)}" if by_rank else ""
    return f"{PREFIX}{with_unit(signal)}{counted}" if signal.scope == scope and name not in XIDS else ""
