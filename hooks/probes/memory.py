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
    "memory_allocated_bytes": "allocated_bytes.all.current",
    "memory_peak_bytes": "allocated_bytes.all.peak",
    "memory_reserved_bytes": "reserved_bytes.all.current",
    "memory_active_bytes": "active_bytes.all.current",
    "memory_inactive_split_bytes": "inactive_split_bytes.all.current",
    "allocation_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
}
"""Signal -> key of torch.cuda.memory_stats, which reads the allocator's own counters: no wait for the device."""


class Memory(Probe):
    """Resident set size; the allocator's state where the parameters are on CUDA (never run on a GPU yet)."""

    tier = 2

    def after(self, step: Step) -> None:
        if step.seq % SPACING:
            return
        step.values["rss_bytes"] = float(resident_bytes())
        device = next(p.device for group in step.optimizer.param_groups for p in group["params"])
        if device.type == "cuda":
            statistics = torch.cuda.memory_stats(device)
            for signal, key in _ALLOCATOR.items():
                step.values[signal] = float(statistics.get(key, 0))


def resident_bytes() -> int:
    """Resident set size of this process, from /proc/self/statm; elsewhere its peak, from getrusage."""
    if sys.platform == "linux":
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return int(os.read(statm, 64).split()[1]) * _PAGE
        finally:
            os.close(statm)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
