"""Read one GPU's numbers by NVML (docs.nvidia.com/deploy/nvml-api).

NVML is not backward compatible over drivers and boards, so each call is optional: a call that a device does not offer
is made once and never again. Nothing here creates a context on the device or takes memory from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sentinel.collect import Reading
from sentinel.runs import devices

_MILLI, _MEGA = 1e-3, 1e6


def _throttle(nvml: Any, reasons: int) -> dict[str, float]:
    """Return 1 for each reason that holds clocks down, else 0. Deliberate settings (application clocks, sync boost) and
    idleness do not count. Bits: nvml.h, nvmlClocksEventReasons."""
    thermal = nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    power = nvml.nvmlClocksEventReasonSwPowerCap
    # HwSlowdown accompanies the thermal or power-brake bit that caused it; alone it is an external signal.
    hardware = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    return {
        "gpu_throttled_thermal": float(bool(reasons & thermal)),
        "gpu_throttled_power": float(bool(reasons & power)),
        "gpu_throttled_hardware": float(bool(reasons & hardware)),
    }


def _utilization(nvml: Any, device: Any) -> dict[str, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(device)
    return {"gpu_utilization_ratio": rates.gpu / 100, "gpu_memory_utilization_ratio": rates.memory / 100}


def _memory(nvml: Any, device: Any) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return {"gpu_memory_used_bytes": float(memory.used), "gpu_memory_total_bytes": float(memory.total)}


def _temperature(nvml: Any, device: Any) -> dict[str, float]:
    return {"gpu_temperature_celsius": float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))}


def _power(nvml: Any, device: Any) -> dict[str, float]:
    return {"gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(device) * _MILLI}


def _power_limit(nvml: Any, device: Any) -> dict[str, float]:
    return {"gpu_power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(device) * _MILLI}


def _clocks(nvml: Any, device: Any) -> dict[str, float]:
    kind = nvml.NVML_CLOCK_SM
    return {
        "gpu_clock_hertz": nvml.nvmlDeviceGetClockInfo(device, kind) * _MEGA,
        "gpu_clock_limit_hertz": nvml.nvmlDeviceGetMaxClockInfo(device, kind) * _MEGA,
    }


def _reasons(nvml: Any, device: Any) -> dict[str, float]:
    return _throttle(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons(device))


def _reasons_older(nvml: Any, device: Any) -> dict[str, float]:
    """Read the reasons by the call's name before driver 535."""
    return _throttle(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


def _ecc(nvml: Any, device: Any) -> dict[str, float]:
    def count(kind: int) -> float:
        return float(nvml.nvmlDeviceGetTotalEccErrors(device, kind, nvml.NVML_VOLATILE_ECC))

    return {
        "gpu_ecc_corrected": count(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "gpu_ecc_uncorrected": count(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


def _rows(nvml: Any, device: Any) -> dict[str, float]:
    _, uncorrectable, pending, failed = nvml.nvmlDeviceGetRemappedRows(device)
    return {
        "gpu_rows_remapped_uncorrectable": float(uncorrectable),
        "gpu_row_remap_pending": float(pending),
        "gpu_row_remap_failed": float(failed),
    }


def _pcie(nvml: Any, device: Any) -> dict[str, float]:
    return {"gpu_pcie_replays": float(nvml.nvmlDeviceGetPcieReplayCounter(device))}


def _links(nvml: Any, device: Any) -> dict[str, float]:
    """Count the NVLinks that are up, and sum their error counters. A board has up to 18; the first missing one ends the
    list."""
    up, errors = 0, 0
    counters = (
        nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    )
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(device, link)
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            if link == 0:
                raise
            break
        up += active
        if active:
            errors += sum(_read_counter(nvml, device, link, counter) for counter in counters)
    return {"gpu_nvlinks_up": float(up), "gpu_nvlink_errors": float(errors)}


def _read_counter(nvml: Any, device: Any, link: int, counter: int) -> int:
    try:
        return int(nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, counter))
    except nvml.NVMLError:
        return 0


Call = Callable[[Any, Any], dict[str, float]]
_CALLS: tuple[tuple[Call, ...], ...] = (
    (_utilization,),
    (_memory,),
    (_temperature,),
    (_power,),
    (_power_limit,),
    (_clocks,),
    (_reasons, _reasons_older),
    (_ecc,),
    (_rows,),
    (_pcie,),
    (_links,),
)
"""The calls for each kind of number; the first of an entry, from left to right, that the device offers is used."""


class NvmlGpu:
    """One device."""

    def __init__(self, nvml: Any, device: Any) -> None:
        self.nvml, self.device = nvml, device
        self.uuid: str = nvml.nvmlDeviceGetUUID(device)
        self._calls = list(_CALLS)
        self._tells_processes = True

    def describe(self, index: int) -> devices.Gpu:
        """Return a description of the GPU; what its driver does not say is left empty."""
        nvml, device = self.nvml, self.device
        return devices.Gpu(
            index,
            self.uuid,
            model=self._read_text(lambda: nvml.nvmlDeviceGetName(device)),
            bus=self._read_text(lambda: nvml.nvmlDeviceGetPciInfo(device).busId),
            device=self._read_text(lambda: f"nvidia{nvml.nvmlDeviceGetMinorNumber(device)}"),
            parts=self._parts(),
        )

    def _read_text(self, call: Callable[[], str | bytes]) -> str:
        try:
            text = call()
        except self.nvml.NVMLError:
            return ""
        return text.decode() if isinstance(text, bytes) else text

    def _parts(self) -> tuple[str, ...]:
        """Return the UUIDs of its MIG devices."""
        nvml, found = self.nvml, []
        try:
            for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(self.device)):
                try:
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.device, place)
                except nvml.NVMLError_NotFound:
                    continue
                found.append(nvml.nvmlDeviceGetUUID(part))
        except nvml.NVMLError:  # no MIG on this board, or not switched on
            pass
        return tuple(found)

    def read(self) -> Reading:
        """Read all numbers that it offers. Raises NVMLError where the device itself is in trouble (lost, needs a
        reset)."""
        values: dict[str, float] = {}
        for calls in tuple(self._calls):
            found = self._read_numbers(calls)
            if found is None:
                self._calls.remove(calls)
            else:
                values |= found
        return Reading(self.uuid, time.time(), values, self._processes())

    def _processes(self) -> dict[int, int]:
        """Return pid -> bytes. Empty where the driver does not say, as in most containers."""
        if not self._tells_processes:
            return {}
        try:
            running = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.device)
        except self.nvml.NVMLError:
            self._tells_processes = False
            return {}
        return {one.pid: int(one.usedGpuMemory) for one in running if one.usedGpuMemory is not None}

    def _read_numbers(self, calls: tuple[Call, ...]) -> dict[str, float] | None:
        """Return the numbers of the first offered call; None: the device offers none of them, and never will."""
        absent = (self.nvml.NVMLError_NotSupported, self.nvml.NVMLError_FunctionNotFound)
        for call in calls:
            try:
                return call(self.nvml, self.device)
            except absent:
                continue
            except (self.nvml.NVMLError_GpuIsLost, self.nvml.NVMLError_ResetRequired):
                raise
            except self.nvml.NVMLError:
                return {}  # busy, or no permission now: asked again
        return None
