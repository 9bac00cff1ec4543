"""What the daemon knows of this node beside the training processes: its GPUs and its host, as they were read last.

A leaf: `sentinel.collect` reads the devices, the daemon keeps them here, rules, diagnosis, metrics and people see them.
Ranks are joined to GPUs by UUID, which is the same in CUDA, NVML and DCGM; numbers of devices are not: CUDA counts
what CUDA_VISIBLE_DEVICES leaves over, NVML all that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

KEPT_FAULTS = 16


class GpuFault(msgspec.Struct, frozen=True):
    """What a GPU reported once."""

    time: float
    """Unix seconds."""
    kind: str
    """`xid`, `silent` or `lost`."""
    code: int = 0
    """Of an XID."""
    text: str = ""


class Gpu(msgspec.Struct):
    """One GPU of this node."""

    index: int
    """NVML's, which is DCGM's `gpu`."""
    uuid: str
    """As NVML writes it: `GPU-...`."""
    model: str = ""
    bus: str = ""
    """PCI bus id."""
    device: str = ""
    """`nvidia0`, as under /dev."""
    parts: tuple[str, ...] = ()
    """UUIDs of its MIG devices."""
    values: Mapping[str, float] = {}
    """By signal, at the last reading; what it did not answer is not there."""
    faults: tuple[GpuFault, ...] = ()
    """The last few."""
    counts: dict[tuple[str, int], int] = {}
    """(kind, code) -> how many of them there were."""

    def record_fault(self, fault: GpuFault) -> None:
        """Take a fault down."""
        self.faults = (*self.faults, fault)[-KEPT_FAULTS:]
        key = fault.kind, fault.code
        self.counts[key] = self.counts.get(key, 0) + 1


class Devices(msgspec.Struct):
    """This node."""

    hostname: str = ""
    host: Mapping[str, float] = {}
    """By signal; empty before the first reading."""
    gpus: dict[str, Gpu] = {}
    """By UUID."""
    trouble: str = ""
    """Why GPUs that a run trains on are not read."""

    def find_gpus(self, uuids: Iterable[str]) -> list[Gpu]:
        """The GPUs of these UUIDs, with or without NVML's prefix; a MIG device's is that of the GPU it is part of."""
        wanted = {bare(uuid) for uuid in uuids}
        return [gpu for gpu in self.gpus.values() if not wanted.isdisjoint(map(bare, (gpu.uuid, *gpu.parts)))]


def bare(uuid: str) -> str:
    """Without `GPU-` or `MIG-`, as CUDA has it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
