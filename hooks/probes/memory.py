"""Tier 2: memory of the process and, on CUDA, of the caching allocator, after the step."""

from __future__ import annotations

import os
import resource
import sys

import torch

from sentinel.hooks.probe import Probe, Step

SPACING = 8
"""Steps between two samples, at least. Memory is judged over many: at every step, a garbage collection that comes once
in 500 would look like a leak until then."""

_PAGE = resource.getpagesize()
_ALLOCATOR = {
    "memory_allocated_bytes": ("allocated_bytes", "current"),
    "memory_peak_bytes": ("allocated_bytes", "peak"),
    "memory_reserved_bytes": ("reserved_bytes", "current"),
    "memory_active_bytes": ("active_bytes", "current"),
    "memory_inactive_split_bytes": ("inactive_split_bytes", "current"),
}
"""Signal -> where the allocator's own counters have it, for all of its pools. Reading them waits for no device."""
_COUNTS = {"allocation_retries": "num_alloc_retries", "out_of_memory_errors": "num_ooms"}


class Memory(Probe):
    """Resident set size; the allocator's state where the parameters are on CUDA (never run on a GPU yet)."""

    tier = 2

    def after(self, step: Step) -> None:
        if step.seq % SPACING:
            return
        step.values["rss_bytes"] = float(resident_bytes())
        device = next((p.device for group in step.optimizer.param_groups for p in group["params"]), None)
        if device is not None and device.type == "cuda":
            # Nested, as the allocator gives it: memory_stats() flattens and sorts the lot, in many times the time.
            counters = torch.cuda.memory_stats_as_nested_dict(device)
            for signal, (kind, which) in _ALLOCATOR.items():
                step.values[signal] = float(counters.get(kind, {}).get("all", {}).get(which, 0))
            for signal, kind in _COUNTS.items():
                step.values[signal] = float(counters.get(kind, 0))


def resident_bytes() -> int:
    """Resident set size of this process, from /proc/self/statm; elsewhere its peak, from getrusage."""
    if sys.platform == "linux":
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return int(os.read(statm, 64).split()[1]) * _PAGE
        finally:
            os.close(statm)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
