"""Read all GPUs of a node: their numbers, asked in parallel with one deadline, and the faults that they report.

    gpus = Gpus.open()          raises NoGpusError where there is no NVIDIA driver
    gpus.order()                all are asked at once
    gpus.collect(deadline)      the GPUs that answered in time, and what went wrong

An XID is the driver's code for a failure of a GPU (docs.nvidia.com/deploy/xid-errors). NVML delivers them as events: a
thread waits for them, since there is no descriptor that a loop could wait for.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sentinel.collect import DeviceFault, Reading
from sentinel.collect.gpu import NvmlGpu
from sentinel.collect.patience import Patient
from sentinel.runs import devices as known

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""Seconds after which a GPU whose driver owes an answer is reported. A read takes milliseconds; a busy driver never
takes 10 s."""
EVENT_WAIT_MS = 1000
"""Milliseconds of one wait for an event: the end of the daemon may take as long."""
_EVENTS_KEPT = 256


class NoGpusError(Exception):
    """Raised where there is no GPU that can be asked; says why."""


class Gpus:
    """The GPUs of this node. Its methods never wait beyond the given deadline, and never raise."""

    def __init__(self, nvml: Any, devices: list[NvmlGpu], descriptions: list[known.Gpu]) -> None:
        self._nvml = nvml
        self._descriptions = descriptions
        self._patients = [Patient(device.uuid, device.read) for device in devices]
        self._told_silent: set[str] = set()
        self._told_lost: set[str] = set()
        self._events = _Events(nvml, devices)

    @classmethod
    def open(cls, nvml: Any = None) -> Gpus:
        """Open all devices. `nvml`: the module to ask, instead of pynvml. Raises NoGpusError where there are no devices
        or no driver. May wait for the driver: call it on a thread."""
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except ImportError:
            raise NoGpusError("nvidia-ml-py is not installed") from None
        except Exception as error:  # NVMLError, which belongs to the module being opened
            raise NoGpusError(f"NVML: {error}") from None
        devices: list[NvmlGpu] = []
        descriptions: list[known.Gpu] = []
        for index in range(count):
            try:
                gpu = NvmlGpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
                descriptions.append(gpu.describe(index))
                devices.append(gpu)
            except nvml.NVMLError as error:
                log.warning("GPU %d is not watched: %s", index, error)
        if not devices:
            raise NoGpusError("NVML: no GPU can be asked")
        return cls(nvml, devices, descriptions)

    def when_faulty(self, tell: Callable[[], None]) -> None:
        """Call `tell` at each event, on the thread that waits for events; the event is then in the next `collect`."""
        self._events.told = tell

    def describe_all(self) -> list[known.Gpu]:
        """Return their descriptions, in NVML's order, which is that of the PCI bus."""
        return list(self._descriptions)

    def silent(self) -> dict[str, float]:
        """Return UUID -> for how many seconds an answer has been owed, for those that owe one."""
        now = time.monotonic()
        return {p.name: now - p.silent_since for p in self._patients if p.silent_since is not None}

    def order(self) -> None:
        """Ask all of them in parallel, except those that still owe an answer."""
        for patient in self._patients:
            patient.order()

    def collect(self, deadline: float) -> tuple[list[Reading], list[DeviceFault]]:
        """Return the readings that arrived by `deadline` (monotonic seconds), and the faults since the last call."""
        readings, faults = [], self._events.take_faults()
        for patient in self._patients:
            try:
                reading = patient.collect(deadline)
            except self._nvml.NVMLError as error:
                faults += self._report_lost(patient.name, str(error))
                continue
            if reading is not None:
                self._told_silent.discard(reading.name)
                self._told_lost.discard(reading.name)
                readings.append(reading)
            else:
                faults += self._silent(patient)
        return readings, faults

    def close(self) -> None:
        """Stop without waiting. NVML is not shut down, as a call may still be in it, and the process ends anyway."""
        self._events.close()
        for patient in self._patients:
            patient.close()

    def _silent(self, patient: Patient[Reading]) -> list[DeviceFault]:
        since = patient.silent_since
        if since is None or time.monotonic() - since < SILENT_SECONDS or patient.name in self._told_silent:
            return []
        self._told_silent.add(patient.name)
        return [
            DeviceFault(
                patient.name, time.time(), "silent", text=f"no answer from the driver in {SILENT_SECONDS:.0f} s"
            )
        ]

    def _report_lost(self, uuid: str, text: str) -> list[DeviceFault]:
        if uuid in self._told_lost:
            return []
        self._told_lost.add(uuid)
        return [DeviceFault(uuid, time.time(), "lost", text=text)]


class _Events:
    """Collects XIDs as they occur."""

    def __init__(self, nvml: Any, devices: list[NvmlGpu]) -> None:
        self._nvml = nvml
        self.told: Callable[[], None] = lambda: None
        self._uuids = {bytes(device.device): device.uuid for device in devices}
        """By handle: a GPU that fell off the bus no longer tells its UUID."""
        self._faults: queue.SimpleQueue[DeviceFault] = queue.SimpleQueue()
        self._ending = threading.Event()
        try:
            self._set = nvml.nvmlEventSetCreate()
            registered = sum(self._register(device) for device in devices)
        except nvml.NVMLError as error:
            log.info("XIDs are not seen: %s", error)
            return
        if registered:
            threading.Thread(target=self._listen, name="sentinel-xid", daemon=True).start()

    def _register(self, device: NvmlGpu) -> bool:
        try:
            self._nvml.nvmlDeviceRegisterEvents(device.device, self._nvml.nvmlEventTypeXidCriticalError, self._set)
        except self._nvml.NVMLError as error:  # as under vGPU, MIG, WSL
            log.info("XIDs of %s are not seen: %s", device.uuid, error)
            return False
        return True

    def take_faults(self) -> list[DeviceFault]:
        faults: list[DeviceFault] = []
        while len(faults) < _EVENTS_KEPT:
            try:
                faults.append(self._faults.get_nowait())
            except queue.Empty:
                break
        return faults

    def close(self) -> None:
        self._ending.set()

    def _listen(self) -> None:
        while not self._ending.is_set():
            try:
                event = self._nvml.nvmlEventSetWait(self._set, EVENT_WAIT_MS)
            except self._nvml.NVMLError_Timeout:
                continue
            except self._nvml.NVMLError_GpuIsLost:  # one of them, as `collect` reports; those of the others still come
                self._ending.wait(EVENT_WAIT_MS / 1000)
                continue
            except self._nvml.NVMLError as error:
                log.warning("XIDs are no longer seen: %s", error)
                return
            if self._faults.qsize() < _EVENTS_KEPT:
                code = int(event.eventData)
                uuid = self._uuids.get(bytes(event.device), "")
                self._faults.put(DeviceFault(uuid, time.time(), "xid", code, xid_meaning(code)))
                self.told()


_XIDS = {
    13: "graphics engine exception: most often an illegal access of the program",
    31: "memory page fault: most often an illegal access of the program",
    43: "the program was stopped after a fault of its own",
    45: "the program's work was cleared away, as after another error or at its end",
    48: "double-bit ECC error: uncorrectable",
    61: "internal microcontroller error",
    62: "internal microcontroller halt",
    63: "a row is to be remapped, at the next reset",
    64: "a row could not be remapped",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error: the program that hit it is lost",
    95: "uncontained memory error: the GPU must be reset",
    109: "context switch time-out",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
"""XID -> meaning, from NVIDIA's catalogue of XID errors (docs.nvidia.com/deploy/xid-errors)."""
SOFTWARE_XIDS = frozenset({13, 31, 43, 45, 68, 69})
"""XIDs that are most often the program's own fault: not a reason to drain a node."""


def xid_meaning(code: int) -> str:
    """Return the meaning of an XID in words."""
    return _XIDS.get(code, "see docs.nvidia.com/deploy/xid-errors")
