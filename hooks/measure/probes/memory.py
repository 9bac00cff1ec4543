"""Measures memory of the process and, on CUDA, of the caching allocator, after the step.

It is read wherever that costs little, and sent with tier 2 and at each step while it rises.

Tier 3: how much memory the optimizer's state holds.
"""

from __future__ import annotations

import math
from time import perf_counter

import torch

from sentinel.hooks.core.governor import Mean
from sentinel.hooks.core.host_memory import memory_left, resident_and_file_bytes, shared_memory_bytes
from sentinel.hooks.measure.probe import Glance, Probe, Step
from sentinel.hooks.torch_interop.layer_table import local

SPACING = 8
"""Least steps between two samples of memory that does not rise."""
SHARE = 0.001
"""Largest share of the loop's time that reading memory takes."""
RISING_SHARE = 0.01
"""The same share while memory rises."""
RISING_LOOKS = 16
"""Readings for which memory counts as rising after each new high."""
ERA = 512
"""Readings in an era. A new high exceeds the last 512 to 1,024 readings: an evaluation hours ago hides no leak."""
MARGIN = 1 << 16
"""Bytes above the last high that make a new one: less than malloc takes from the system at a time (128 kB)."""
LEFT_SECONDS = 5.0
"""Most seconds between two readings of the memory that is left. Other processes take from it, too."""
LEFT_SHARE = 0.002
"""Largest share of the loop's time that this reading takes: it is a dozen files, a millisecond."""
URGENT = 0.9
"""Free memory is sent without delay once it falls below this share of what was free when last sent so."""

OF_PROCESS = ("rss_bytes", "memory_held_bytes")
"""Signals in which is what our own queues hold."""
_ALLOCATOR = {
    "memory_allocated_bytes": ("allocated_bytes", "current"),
    "memory_peak_bytes": ("allocated_bytes", "peak"),
    "memory_reserved_bytes": ("reserved_bytes", "current"),
    "memory_active_bytes": ("active_bytes", "current"),
    "memory_inactive_split_bytes": ("inactive_split_bytes", "current"),
}
"""Signal -> its place in the allocator's own counters, over all of its pools. Reading them waits for no device."""
_COUNTS = {"allocation_retries": "num_alloc_retries", "out_of_memory_errors": "num_ooms"}


class Supply:
    """One kind of memory: whether it rises, and whether little of it is left."""

    def __init__(self) -> None:
        self._highest = self._highest_before = -math.inf
        """Highest reading of this era, and of the one before."""
        self._looks = 0
        self._left_sent = 0.0

    def rises(self, held: float) -> bool:
        """Add a reading of the bytes that are held; return whether it is a new high."""
        high = held > max(self._highest, self._highest_before) + MARGIN
        self._highest = max(self._highest, held)
        self._looks += 1
        if self._looks % ERA == 0:
            self._highest_before, self._highest = self._highest, -math.inf
        return high

    def is_urgent(self, left: float) -> bool:
        """Add a reading of the free bytes; return whether it must be sent without delay."""
        urgent = left < URGENT * self._left_sent
        if urgent or left > self._left_sent:
            self._left_sent = left
        return urgent


class HostMemory:
    """Host memory, in bytes: what the process holds, and what it may still take."""

    def __init__(self) -> None:
        self.resident = self.held = self.left = 0.0
        self._left_then = self._resident_then = self._shared_memory = 0.0
        """Values at the last reading of what is left."""
        self._due_at = self._allowed_at = 0.0

    def look(self, now: float) -> float:
        """Update all values; return the seconds that reading what is left took. That is read only now and then, and
        otherwise estimated from what the process took since."""
        reading = 0.0
        resident, shared = resident_and_file_bytes()
        if now >= self._due_at or (
            now >= self._allowed_at and abs(resident - self._resident_then) > self._left_then / 64
        ):
            self._left_then, self._shared_memory = memory_left()[0], float(shared_memory_bytes())
            self._resident_then = resident
            self._due_at = now + LEFT_SECONDS
            reading = perf_counter() - now
            self._allowed_at = now + reading / LEFT_SHARE
        self.resident = float(resident)
        self.held = resident - shared + self._shared_memory
        self.left = max(self._left_then - (resident - self._resident_then), 0.0)
        return reading


class MemoryProbe(Probe):
    """Resident set size, and the allocator's state where the parameters are on CUDA."""

    tier = 0
    skipped_on_fast_path = True

    def __init__(self) -> None:
        self._host, self._host_supply, self._device_supply = HostMemory(), Supply(), Supply()
        self._device: torch.device | None = None
        self._cost = Mean()
        self._due = 0.0
        self._rising_looks = 0
        self._urgent = False

    def after(self, step: Step) -> None:
        sampled = (step.thorough or step.gradients_missing) and step.seq % SPACING == 0
        if sampled or step.left >= self._due:
            device = next((p.device for group in step.optimizer.param_groups for p in group["params"]), None)
            self._device = device if device is not None and device.type == "cuda" else None
            step.values.update(self._look(sampled))
            step.urgent, self._urgent = step.urgent or self._urgent, False

    def glance(self, glance: Glance) -> None:
        if glance.now >= self._due:
            glance.values.update(self._look(sampled=False))
            if self._urgent:
                glance.whole, self._due = True, 0.0
        glance.due = self._due

    def _look(self, sampled: bool) -> dict[str, float]:
        """Read memory, and return the values to be sent."""
        begin = perf_counter()
        host = self._host
        reading = host.look(begin)
        rises = self._host_supply.rises(host.held)
        self._urgent |= self._host_supply.is_urgent(host.left)
        of_device = {} if self._device is None else _look_at_device(self._device)
        if of_device:
            rises |= self._device_supply.rises(of_device["memory_allocated_bytes"])
            self._urgent |= self._device_supply.is_urgent(of_device.get("device_memory_left_bytes", math.inf))
        self._rising_looks = RISING_LOOKS if rises else max(self._rising_looks - 1, 0)
        values = {}
        if sampled or self._rising_looks:
            values = {"rss_bytes": host.resident, "memory_held_bytes": host.held, **of_device}
            if host.left < math.inf:
                values["memory_left_bytes"] = host.left
        end = perf_counter()
        self._cost.add(end - begin - reading)
        self._due = end + self._cost.value / (RISING_SHARE if self._rising_looks else SHARE)
        return values


def _look_at_device(device: torch.device) -> dict[str, float]:
    # Nested, as the allocator gives it: memory_stats() flattens and sorts everything, which takes many times as long.
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    values = {
        signal: float(counters.get(kind, {}).get("all", {}).get(which, 0))
        for signal, (kind, which) in _ALLOCATOR.items()
    }
    values.update((signal, float(counters.get(kind, 0))) for signal, kind in _COUNTS.items())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        total = torch.cuda.get_device_properties(device).total_memory
        values["device_memory_left_bytes"] = max(total - values["memory_allocated_bytes"], 0.0)
    return values


class StateSize(Probe):
    """Bytes of the tensors in `optimizer.state`, in this rank's shards: Adam's two moments are twice the parameters."""

    tier = 3

    def after(self, step: Step) -> None:
        held = 0
        for state in step.optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    part = local(value)
                    held += part.numel() * part.element_size()
        step.values["optimizer_state_bytes"] = float(held)
