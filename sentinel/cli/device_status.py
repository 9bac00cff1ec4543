"""The lines of `sentinel status` about GPUs and host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_GB = 1e9
_THROTTLED = {"thermal": "heat", "hardware": "hardware", "power": "power limit"}


def lines(gpus: dict[str, Any], host: Mapping[str, float]) -> Iterator[str]:
    """Yield a line per GPU that the run trains on, and one about the host, where they were read."""
    if gpus["trouble"]:
        yield f"  gpu       not read: {gpus['trouble']}"
    for gpu in gpus["devices"]:
        ranks = ", ".join(map(str, gpu["ranks"]))
        yield f"  gpu {gpu['gpu']:<5} " + ", ".join(filter(None, (f"rank {ranks}", *describe_gpu(gpu["values"]))))
        if gpu["faults"]:
            last = gpu["faults"][-1]
            code = f" {last['code']}" if last["code"] else ""
            yield f"            {last['kind']}{code}: {last['text']}"
    if host:
        yield "  host      " + ", ".join(_host(host))


def describe_gpu(values: Mapping[str, float]) -> Iterator[str]:
    """Yield what a GPU reports, in a few words per fact."""
    if values.get("gpu_lost"):
        yield "lost"
    if silent := values.get("gpu_silent_seconds"):
        yield f"silent for {silent:.0f} s"
    if "gpu_utilization_ratio" in values:
        yield f"{values['gpu_utilization_ratio']:.0%} busy"
    if "gpu_memory_used_bytes" in values:
        yield f"{values['gpu_memory_used_bytes'] / _GB:.1f} of {values['gpu_memory_total_bytes'] / _GB:.0f} GB"
    if "gpu_temperature_celsius" in values:
        yield f"{values['gpu_temperature_celsius']:.0f} C"
    if "gpu_power_watts" in values:
        yield f"{values['gpu_power_watts']:.0f} W"
    held = [word for name, word in _THROTTLED.items() if values.get(f"gpu_throttled_{name}")]
    if held:
        yield f"clock held down by {' and '.join(held)}"


def _host(host: Mapping[str, float]) -> Iterator[str]:
    if "host_cpu_ratio" in host:
        yield f"CPU {host['host_cpu_ratio']:.0%}"
    yield f"{host['host_memory_available_bytes'] / _GB:.1f} of {host['host_memory_total_bytes'] / _GB:.1f} GB free"
    if "container_memory_used_bytes" in host:
        used, limit = (host[f"container_memory_{part}_bytes"] / _GB for part in ("used", "limit"))
        yield f"container {used:.1f} of {limit:.1f} GB"
