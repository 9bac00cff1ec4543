"""What the daemon measures itself, beside the training processes: GPUs by NVML, the host by psutil."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """The numbers of one device or host at one moment."""

    name: str
    """UUID of the GPU, as NVML writes it (`GPU-...`); for a host, its name."""
    time: float
    """Unix seconds."""
    values: dict[str, float]
    """Signal -> value. What the device or its driver does not offer is absent."""
    processes: dict[int, int] = {}
    """For a GPU: pid -> bytes of its memory that the process holds, where the driver says."""


class DeviceFault(msgspec.Struct, frozen=True):
    """A fault that a device reported once."""

    name: str
    """UUID of the GPU."""
    time: float
    kind: str
    """`xid`; `silent`: its driver does not answer; `lost`: it answers that it is lost, or must be reset."""
    code: int = 0
    text: str = ""
