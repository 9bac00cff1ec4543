"""This node's devices beside the training processes: its GPUs and its host, as they were read last.

A leaf: `sentinel.collect` reads the devices, the daemon keeps them here, rules, diagnosis, metrics and people see them.
Ranks are joined to GPUs by UUID, which is the same in CUDA, NVML and DCGM. Device numbers differ: CUDA counts the
devices that CUDA_VISIBLE_DEVICES leaves, NVML counts all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

KEPT_FAULTS = 16


class GpuFault(msgspec.Struct, frozen=True):
    """A fault that a GPU reported once."""

    time: float
    """Unix seconds."""
    kind: str
    """`xid`, `silent` or `lost`."""
    code: int = 0
    """The code of an XID."""
    text: str = ""


class Gpu(msgspec.Struct):
    """One GPU of this node."""

    index: int
    """NVML's index, which is DCGM's `gpu`."""
    uuid: str
    """UUID as NVML writes it: `GPU-...`."""
    model: str = ""
    bus: str = ""
    """PCI bus id."""
    device: str = ""
    """Device file under /dev: `nvidia0`."""
    parts: tuple[str, ...] = ()
    """UUIDs of its MIG devices."""
    values: Mapping[str, float] = {}
    """Signal -> its value at the last reading; signals that the GPU did not answer are absent."""
    faults: tuple[GpuFault, ...] = ()
    """The last few faults."""
    counts: dict[tuple[str, int], int] = {}
    """(kind, code) -> how often that fault occurred."""

    def record_fault(self, fault: GpuFault) -> None:
        """Record a fault."""
        self.faults = (*self.faults, fault)[-KEPT_FAULTS:]
        key = fault.kind, fault.code
        self.counts[key] = self.counts.get(key, 0) + 1


class Devices(msgspec.Struct):
    """The devices of this node."""

    hostname: str = ""
    host: Mapping[str, float] = {}
    """Signal -> value for the host; empty before the first reading."""
    memory_limits: Mapping[str | None, Mapping[str, float]] = {}
    """Run id -> signal -> value for the nearest memory limit of the run's ranks on this node, empty without one. None:
    for the nearest of all runs."""
    gpus: dict[str, Gpu] = {}
    """UUID -> GPU."""
    trouble: str = ""
    """Why GPUs that a run trains on are not read."""

    def read_node(self, run_id: str | None = None) -> dict[str, float]:
        """Return signal -> value for the host and the memory limit of a run; None: for the nearest limit of all."""
        return {**self.host, **self.memory_limits.get(run_id, {})}

    def find_gpus(self, uuids: Iterable[str]) -> list[Gpu]:
        """Return the GPUs with these UUIDs, with or without NVML's prefix; for a MIG device, the GPU that it is part
        of."""
        wanted = {bare(uuid) for uuid in uuids}
        return [gpu for gpu in self.gpus.values() if not wanted.isdisjoint(map(bare, (gpu.uuid, *gpu.parts)))]


def bare(uuid: str) -> str:
    """Return a UUID without `GPU-` or `MIG-`, as CUDA has it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
