"""A fake NVML (synthetic: not recorded on a GPU) with the contract that NVML's documentation states.

Handles are opaque, names and exceptions are pynvml's, calls before nvmlInit are refused, and a board offers the calls
of its generation.
"""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pynvml


class FakeBoard:
    """One GPU. `absent`: calls that it lacks. `failing`: call -> its exception. Calls block while `free` is cleared."""

    busy = 87
    """GPU utilization, in per cent of the time."""

    def __init__(self, index: int) -> None:
        self.uuid = f"GPU-{index:08d}-0000-0000-0000-000000000000"
        self.absent: set[str] = set()
        self.failing: dict[str, Exception] = {}
        self.free = threading.Event()
        self.free.set()
        self.reasons = 0
        self.links = 2
        self.temperature = 64
        self.parts: list[SimpleNamespace] = []
        """The board's MIG devices."""
        self.processes: list[SimpleNamespace] = []
        self.calls: list[str] = []

    def __bytes__(self) -> bytes:
        """Return the address that its handle holds, as ctypes does."""
        return id(self).to_bytes(8, "little")


class FakeNvml:
    """Stands in for the module pynvml, from which it takes constants and exceptions."""

    def __init__(self, boards: int = 2) -> None:
        self.boards = [FakeBoard(index) for index in range(boards)]
        self.events: queue.SimpleQueue[tuple[FakeBoard, int] | pynvml.NVMLError] = queue.SimpleQueue()
        """XIDs by board, and errors of waiting for one."""
        self._ready = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("nvmlDevice", "nvmlEventSet")):
            raise AttributeError(f"the fake has no {name}")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self._ready = True

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeBoard:
        self._check()
        return self.boards[index]

    def nvmlDeviceGetUUID(self, board: FakeBoard | SimpleNamespace) -> str:
        return self._answer(board, "UUID", board.uuid) if isinstance(board, FakeBoard) else str(board.uuid)

    def nvmlDeviceGetName(self, board: FakeBoard) -> str:
        return self._answer(board, "Name", "NVIDIA Fake 80GB")

    def nvmlDeviceGetPciInfo(self, board: FakeBoard) -> Any:
        return self._answer(board, "PciInfo", SimpleNamespace(busId=f"00000000:0{self.boards.index(board)}:00.0"))

    def nvmlDeviceGetMinorNumber(self, board: FakeBoard) -> int:
        return self._answer(board, "MinorNumber", self.boards.index(board))

    def nvmlDeviceGetMaxMigDeviceCount(self, board: FakeBoard) -> int:
        return self._answer(board, "MaxMigDeviceCount", 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: FakeBoard, place: int) -> Any:
        if place >= len(board.parts):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return board.parts[place]

    def nvmlDeviceGetComputeRunningProcesses(self, board: FakeBoard) -> list[SimpleNamespace]:
        return self._answer(board, "ComputeRunningProcesses", board.processes)

    def nvmlDeviceGetUtilizationRates(self, board: FakeBoard) -> Any:
        return self._answer(board, "UtilizationRates", SimpleNamespace(gpu=board.busy, memory=41))

    def nvmlDeviceGetMemoryInfo(self, board: FakeBoard) -> Any:
        return self._answer(board, "MemoryInfo", SimpleNamespace(total=80 << 30, used=60 << 30, free=20 << 30))

    def nvmlDeviceGetTemperature(self, board: FakeBoard, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer(board, "Temperature", board.temperature)

    def nvmlDeviceGetPowerUsage(self, board: FakeBoard) -> int:
        return self._answer(board, "PowerUsage", 412_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, board: FakeBoard) -> int:
        return self._answer(board, "EnforcedPowerLimit", 700_000)

    def nvmlDeviceGetClockInfo(self, board: FakeBoard, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return self._answer(board, "ClockInfo", 1755)

    def nvmlDeviceGetMaxClockInfo(self, board: FakeBoard, kind: int) -> int:
        return self._answer(board, "MaxClockInfo", 1980)

    def nvmlDeviceGetCurrentClocksEventReasons(self, board: FakeBoard) -> int:
        return self._answer(board, "CurrentClocksEventReasons", board.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, board: FakeBoard) -> int:
        return self._answer(board, "CurrentClocksThrottleReasons", board.reasons)

    def nvmlDeviceGetTotalEccErrors(self, board: FakeBoard, kind: int, counter: int) -> int:
        assert counter == pynvml.NVML_VOLATILE_ECC
        return self._answer(board, "TotalEccErrors", 3 if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0)

    def nvmlDeviceGetRemappedRows(self, board: FakeBoard) -> tuple[int, int, int, int]:
        return self._answer(board, "RemappedRows", (1, 2, 1, 0))

    def nvmlDeviceGetPcieReplayCounter(self, board: FakeBoard) -> int:
        return self._answer(board, "PcieReplayCounter", 5)

    def nvmlDeviceGetNvLinkState(self, board: FakeBoard, link: int) -> int:
        if link >= board.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._answer(board, "NvLinkState", 1)

    def nvmlDeviceGetNvLinkErrorCounter(self, board: FakeBoard, link: int, counter: int) -> int:
        return self._answer(board, "NvLinkErrorCounter", 1 if counter == pynvml.NVML_NVLINK_ERROR_DL_REPLAY else 0)

    def nvmlEventSetCreate(self) -> object:
        self._check()
        return object()

    def nvmlDeviceRegisterEvents(self, board: FakeBoard, kinds: int, events: object) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self._answer(board, "RegisterEvents", None)

    def nvmlEventSetWait(self, events: object, timeout_ms: int) -> Any:
        try:
            event = self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        if isinstance(event, pynvml.NVMLError):
            raise event
        board, code = event
        return SimpleNamespace(device=board, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code)

    def _answer(self, board: FakeBoard, call: str, value: Any) -> Any:
        self._check()
        board.calls.append(call)
        board.free.wait()
        if call in board.absent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if call in board.failing:
            raise board.failing[call]
        return value

    def _check(self) -> None:
        if not self._ready:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
