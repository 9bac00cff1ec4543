"""What the daemon measures by itself, beside the training processes: GPUs by NVML, the host by psutil."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """The numbers of one device or host at one moment."""

    name: str
    """UUID of the GPU, as NVML writes it (`GPU-...`); of a host, its name."""
    time: float
    """Unix seconds."""
    values: dict[str, float]
    """By signal. What the device or its driver does not offer is not there."""
    processes: dict[int, int] = {}
    """Of a GPU: pid -> bytes of its memory that the process holds, where the driver says."""


class DeviceFault(msgspec.Struct, frozen=True):
    """Something that a device reported once."""

    name: str
    """UUID of the GPU."""
    time: float
    kind: str
    """`xid`; `silent`: its driver does not answer; `lost`: it answers that it is lost, or must be reset."""
    code: int = 0
    text: str = ""
