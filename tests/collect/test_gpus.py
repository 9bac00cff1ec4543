"""GPUs by NVML: offered figures are read, missing ones left out, and a stuck GPU holds up no other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from sentinel.collect import DeviceFault, Reading
from sentinel.collect import gpus as gpus_module
from sentinel.collect.gpus import Gpus, NoGpusError
from tests.collect.fake_nvml import FakeNvml

LONG = 30.0


@pytest.fixture
def nvml() -> Iterator[FakeNvml]:
    fake = FakeNvml()
    yield fake
    for board in fake.boards:
        board.free.set()


@pytest.fixture
def gpus(nvml: FakeNvml) -> Iterator[Gpus]:
    opened = Gpus.open(nvml)
    yield opened
    opened.close()


def read(gpus: Gpus, seconds: float = LONG) -> tuple[list[Reading], list[DeviceFault]]:
    gpus.order()
    return gpus.collect(time.monotonic() + seconds)


def test_all_numbers_come_in_base_units(nvml: FakeNvml, gpus: Gpus) -> None:
    readings, faults = read(gpus)
    assert [reading.name for reading in readings] == [board.uuid for board in nvml.boards]
    assert faults == []
    assert readings[0].values == {
        "gpu_utilization_ratio": 0.87,
        "gpu_memory_utilization_ratio": 0.41,
        "gpu_memory_used_bytes": float(60 << 30),
        "gpu_memory_total_bytes": float(80 << 30),
        "gpu_temperature_celsius": 64.0,
        "gpu_power_watts": 412.0,
        "gpu_power_limit_watts": 700.0,
        "gpu_clock_hertz": 1.755e9,
        "gpu_clock_limit_hertz": 1.98e9,
        "gpu_throttled_thermal": 0.0,
        "gpu_throttled_power": 0.0,
        "gpu_throttled_hardware": 0.0,
        "gpu_ecc_corrected": 3.0,
        "gpu_ecc_uncorrected": 0.0,
        "gpu_rows_remapped_uncorrectable": 2.0,
        "gpu_row_remap_pending": 1.0,
        "gpu_row_remap_failed": 0.0,
        "gpu_pcie_replays": 5.0,
        "gpu_nvlinks_up": 2.0,
        "gpu_nvlink_errors": 2.0,
    }


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [
        (pynvml.nvmlClocksEventReasonGpuIdle, set()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, {"gpu_throttled_power"}),
        (
            pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            {"gpu_throttled_hardware", "gpu_throttled_thermal"},
        ),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, {"gpu_throttled_hardware"}),
    ],
)
def test_throttle_reasons_are_told_apart(nvml: FakeNvml, gpus: Gpus, reasons: int, throttled: set[str]) -> None:
    nvml.boards[0].reasons = reasons
    values = read(gpus)[0][0].values
    assert {name for name in values if name.startswith("gpu_throttled") and values[name]} == throttled


def test_a_call_that_a_board_does_not_offer_is_asked_once(nvml: FakeNvml, gpus: Gpus) -> None:
    board = nvml.boards[0]
    board.absent = {"TotalEccErrors", "NvLinkState"}
    for _ in range(3):
        values = read(gpus)[0][0].values
    assert "gpu_ecc_corrected" not in values
    assert "gpu_nvlinks_up" not in values
    assert values["gpu_temperature_celsius"] == 64.0
    assert board.calls.count("TotalEccErrors") == 1


def test_an_older_driver_is_asked_by_the_older_name(nvml: FakeNvml, gpus: Gpus) -> None:
    nvml.boards[0].absent = {"CurrentClocksEventReasons"}
    nvml.boards[0].reasons = pynvml.nvmlClocksThrottleReasonSwPowerCap
    assert read(gpus)[0][0].values["gpu_throttled_power"] == 1.0


def test_a_call_that_fails_today_is_asked_again(nvml: FakeNvml, gpus: Gpus) -> None:
    board = nvml.boards[0]
    board.failing["PowerUsage"] = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    assert "gpu_power_watts" not in read(gpus)[0][0].values
    board.failing.clear()
    assert read(gpus)[0][0].values["gpu_power_watts"] == 412.0


def test_a_gpu_that_does_not_answer_delays_no_other(
    nvml: FakeNvml, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_module, "SILENT_SECONDS", 0.0)
    stuck, other = nvml.boards
    stuck.free.clear()
    asked = len(stuck.calls)
    readings, faults = read(gpus, 0.2)
    assert [reading.name for reading in readings] == [other.uuid]
    assert [(fault.name, fault.kind) for fault in faults] == [(stuck.uuid, "silent")]
    readings, faults = read(gpus, 0.2)  # neither asked nor reported again
    assert [reading.name for reading in readings] == [other.uuid]
    assert faults == []
    assert len(stuck.calls) == asked + 1
    stuck.free.set()
    readings, _ = gpus.collect(time.monotonic() + LONG)
    assert [reading.name for reading in readings] == [stuck.uuid]


def test_a_gpu_that_is_lost_is_reported_once(nvml: FakeNvml, gpus: Gpus) -> None:
    nvml.boards[1].failing["UtilizationRates"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    readings, faults = read(gpus)
    assert len(readings) == 1
    assert [(fault.name, fault.kind) for fault in faults] == [(nvml.boards[1].uuid, "lost")]
    assert read(gpus)[1] == []


def test_an_xid_is_named_and_explained_though_its_gpu_answers_no_more(nvml: FakeNvml, gpus: Gpus) -> None:
    nvml.boards[1].failing["UUID"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml.events.put((nvml.boards[1], 79))
    faults: list[DeviceFault] = []
    deadline = time.monotonic() + LONG
    while not faults and time.monotonic() < deadline:
        faults = read(gpus)[1]
    assert [(fault.name, fault.kind, fault.code) for fault in faults] == [(nvml.boards[1].uuid, "xid", 79)]
    assert "fallen off the bus" in faults[0].text


def test_xids_of_other_gpus_are_seen_after_one_is_lost(
    nvml: FakeNvml, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_module, "EVENT_WAIT_MS", 10)
    told = threading.Event()
    gpus.when_faulty(told.set)
    nvml.events.put(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    nvml.events.put((nvml.boards[0], 94))
    assert told.wait(LONG)
    assert [(fault.name, fault.code) for fault in read(gpus)[1]] == [(nvml.boards[0].uuid, 94)]


def test_a_gpu_is_described(nvml: FakeNvml) -> None:
    nvml.boards[1].absent = {"MinorNumber", "MaxMigDeviceCount"}
    nvml.boards[0].parts = [SimpleNamespace(uuid="MIG-1"), SimpleNamespace(uuid="MIG-2")]
    opened = Gpus.open(nvml)
    first, second = opened.describe_all()
    opened.close()
    assert (first.index, first.uuid, first.model) == (0, nvml.boards[0].uuid, "NVIDIA Fake 80GB")
    assert (first.bus, first.device, first.parts) == ("00000000:00:00.0", "nvidia0", ("MIG-1", "MIG-2"))
    assert (second.index, second.device, second.parts) == (1, "", ())


def test_memory_of_processes_is_read_where_the_driver_offers_it(nvml: FakeNvml, gpus: Gpus) -> None:
    nvml.boards[0].processes = [
        SimpleNamespace(pid=7, usedGpuMemory=1 << 30),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ]
    nvml.boards[1].absent = {"ComputeRunningProcesses"}
    for _ in range(2):
        first, second = read(gpus)[0]
    assert (first.processes, second.processes) == ({7: 1 << 30}, {})
    assert nvml.boards[1].calls.count("ComputeRunningProcesses") == 1


def test_a_missing_gpu_or_driver_is_reported_in_words() -> None:
    with pytest.raises(NoGpusError, match="no GPU can be asked"):
        Gpus.open(FakeNvml(boards=0))
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(NoGpusError, match="NVML: "):
            Gpus.open()
