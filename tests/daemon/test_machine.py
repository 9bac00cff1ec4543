"""GPUs and host as the daemon reads them: which rank is on which, what the rules see, and that no reading blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sentinel import wire
from sentinel.cli import device_status
from sentinel.collect import host as host_module
from sentinel.collect.gpus import Gpus, NoGpusError
from sentinel.daemon import machine as machine_module
from sentinel.daemon.frontend import views
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.metrics import LiveCollector
from sentinel.daemon.machine import MachineReader, make_observation
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine import Entity, Observation
from sentinel.node import paths
from sentinel.node.cgroup_memory import MemoryLimit
from sentinel.node.question import ask_daemon
from sentinel.rulebook.loader import Reloads
from sentinel.runs import Run
from sentinel.runs.devices import Devices, Gpu
from sentinel.store import History, Store
from sentinel.web.http import exposition
from tests.collect.fake_nvml import FakeNvml
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.run_parts import watch_run
from tests.waiting import until

OURS, STRANGER = 4000, 4001


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Return a fake driver, and lengthen the time limit: on a busy machine half a second may be too short."""
    monkeypatch.setattr(machine_module, "WAIT_SECONDS", 30.0)
    fake = FakeNvml()
    yield fake
    for board in fake.boards:
        board.free.set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "h.sqlite", run="train", run_id="r1")
    yield made
    made.close()


def watched(store: Store | None, *gpus: str, run_id: str = "r1", process: int = OURS) -> WatchedRun:
    """Return a run of as many ranks as there are UUIDs, each on its GPU; an empty UUID stands for the CPU."""
    pipeline: Any = SimpleNamespace(queues=(), status=list, trouble="")
    silences: Any = SimpleNamespace(of_run=lambda *_: [])
    notifier: Any = SimpleNamespace(pipeline=pipeline, silences=silences)
    watch = watch_run(Run("train", run_id, 0.0), (), store, notifier=notifier)
    for number, uuid in enumerate(gpus):
        identity = wire.Identity(run="train", run_id=run_id, rank=number, world_size=len(gpus), session=f"s{number}")
        watch.ingest.hello(wire.Hello(version="t", identity=identity, gpus=(uuid,) if uuid else ()), 0.0, process)
    return watch


def bare(nvml: FakeNvml, index: int) -> str:
    """Return the UUID as CUDA writes it."""
    return nvml.boards[index].uuid.removeprefix("GPU-").upper()


def turned(nvml: FakeNvml, *watches: WatchedRun, turns: int = 1) -> MachineReader:
    machine = MachineReader(lambda: Gpus.open(nvml))

    async def turn() -> None:
        for _ in range(turns):
            await machine.turn(watches)

    asyncio.run(turn())
    machine.close()
    return machine


def test_ranks_are_joined_to_gpus_by_uuid(nvml: FakeNvml) -> None:
    nvml.boards[0].parts = [SimpleNamespace(uuid="MIG-aa-bb")]
    devices = Devices("n", gpus={gpu.uuid: gpu for gpu in Gpus.open(nvml).describe_all()})
    assert [gpu.index for gpu in devices.find_gpus([bare(nvml, 1)])] == [1]
    assert [gpu.index for gpu in devices.find_gpus([nvml.boards[1].uuid, "AA-BB"])] == [0, 1]
    assert devices.find_gpus(["cc-dd"]) == []


def test_a_run_sees_its_own_gpus_and_the_host(nvml: FakeNvml) -> None:
    one, other = watched(None, bare(nvml, 1)), watched(None, "")
    machine = turned(nvml, one, other)
    host = Entity("node", machine.devices.hostname)
    seen = make_observation(machine.devices, one.run).values
    assert seen.keys() == {host, Entity("gpu", "1")}
    assert seen[Entity("gpu", "1")]["gpu_temperature_celsius"] == 64.0
    assert seen[Entity("gpu", "1")]["gpu_lost"] == 0.0
    assert seen[host]["host_memory_total_bytes"] > 0
    assert make_observation(machine.devices, other.run).values.keys() == {host}


def test_a_run_sees_the_memory_limit_of_its_own_job(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that serves a node took its own limit, and the jobs of others, for the run's."""
    limits = {OURS: MemoryLimit(100, 95, Path("a")), OURS + 1: MemoryLimit(100, 40, Path("b"))}
    monkeypatch.setattr(
        host_module, "list_memory_limits", lambda _, process: [limits[process]] if process in limits else []
    )
    runs = [watched(None, "", run_id=f"r{number}", process=OURS + number) for number in range(3)]
    machine = turned(nvml, *runs)
    node = Entity("node", machine.devices.hostname)
    seen = [make_observation(machine.devices, watch.run).values[node] for watch in runs]
    assert [values.get("container_memory_used_bytes") for values in seen] == [95.0, 40.0, None]
    assert machine.devices.read_node()["container_memory_used_bytes"] == 95.0


def test_nvml_is_not_opened_for_a_run_on_the_cpu() -> None:
    machine = MachineReader(lambda: pytest.fail("it was opened"))
    watch = watched(None, "")
    asyncio.run(machine.turn([watch]))
    assert machine.devices.trouble == ""
    assert views.status([watch])["runs"][0]["gpus"] == {"trouble": "", "devices": []}


def test_no_driver_is_one_line(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def opened() -> Gpus:
        asked.append(1)
        raise NoGpusError("NVML: Shared Library Not Found")

    machine, watch = MachineReader(opened), watched(None, "aa-bb")
    for _ in range(3):
        asyncio.run(machine.turn([watch]))
    assert asked == [1]
    assert not caplog.records
    gpus = views.status([watch])["runs"][0]["gpus"]
    assert list(device_status.lines(gpus, {})) == ["  gpu       not read: NVML: Shared Library Not Found"]


def test_a_stuck_gpu_and_a_stuck_driver_delay_nothing_else(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(None, bare(nvml, 0), bare(nvml, 1))
    machine = MachineReader(lambda: Gpus.open(nvml))

    async def turns() -> int:
        await machine.turn([watch])
        monkeypatch.setattr(machine_module, "WAIT_SECONDS", 0.05)
        nvml.boards[0].free.clear()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await machine.turn([watch])
        while silent(1):  # on a busy machine the second GPU may be late, too
            await machine.turn([watch])
        ticking.cancel()
        return ticks

    def silent(index: int) -> float:
        return machine.devices.gpus[nvml.boards[index].uuid].values["gpu_silent_seconds"]

    assert asyncio.run(turns()) > 0
    stuck, other = machine.devices.gpus.values()
    assert set(stuck.values) == {"gpu_xid", "gpu_xid_program", "gpu_lost", "gpu_silent_seconds"}
    assert stuck.values["gpu_silent_seconds"] > 0.0
    assert other.values["gpu_silent_seconds"] == 0.0
    assert (other.values["gpu_xid"], other.values["gpu_xid_program"]) == (0.0, 0.0)
    assert other.values["gpu_temperature_celsius"] == 64.0
    machine.close()

    never = threading.Event()
    blocked = MachineReader(lambda: [never.wait(), Gpus.open(nvml)][1])  # type: ignore[return-value]
    monkeypatch.setattr(machine_module, "OPEN_SECONDS", 0.0)
    asyncio.run(blocked.turn([watch]))
    assert blocked.devices.trouble == "the driver does not answer"
    assert blocked.devices.host
    never.set()
    blocked.close()


def test_faults_go_to_rules_history_and_people(nvml: FakeNvml, store: Store) -> None:
    watch = watched(store, bare(nvml, 0))
    machine = MachineReader(lambda: Gpus.open(nvml))

    async def turns() -> Gpu:
        await machine.turn([watch])
        nvml.events.put((nvml.boards[0], 31))
        nvml.events.put((nvml.boards[0], 79))
        nvml.events.put((nvml.boards[1], 48))
        gpu = machine.devices.gpus[nvml.boards[0].uuid]
        deadline = time.monotonic() + 20.0
        while not gpu.values["gpu_xid"] and time.monotonic() < deadline:
            await machine.turn([watch])
        return gpu

    gpu = asyncio.run(turns())
    machine.close()
    assert gpu.values["gpu_xid"] == 79.0
    assert gpu.counts == {("xid", 31): 1, ("xid", 79): 1}
    store.write()
    with History(store.path) as history:
        kept = [(event.detail["gpu"], event.detail["code"]) for event in history.events("gpu fault")]
        assert kept == [(0, 31), (0, 79)]  # the other GPU is not used by this run
        assert history.devices() == ["gpu 0", f"node {machine.devices.hostname}"]
        temperature = history.readings(["gpu_temperature_celsius"], "gpu 0")["gpu_temperature_celsius"]
    assert (list(temperature.values), list(temperature.seqs)) == ([64.0], [-1])  # the next reading is kept 15 s later
    status = views.status([watch])["runs"][0]
    lines = list(device_status.lines(status["gpus"], status["host"]))
    assert lines[0] == "  gpu 0     rank 0, 87% busy, 64.4 of 86 GB, 64 C, 412 W"
    assert "xid 79: the GPU has fallen off the bus" in lines[1]
    assert lines[2].startswith("  host      ")
    assert all(len(line) <= 80 for line in lines)


def test_a_gpu_that_answers_late_is_kept_from_its_first_reading(store: Store) -> None:
    """The host is read before the GPU, and each is kept every 15 s."""
    watch = watched(store)
    host, gpu = Entity("node", "a"), Entity("gpu", "0")
    for now, read in ((0.0, [host]), (4.0, [host, gpu]), (8.0, [host, gpu]), (15.0, [host, gpu])):
        values = {entity: {"read_at": now} for entity in read}
        watch.ingest.observe_machine(Devices(), Observation(seq=-1, time=now, values=values), (), now)
    store.write()
    with History(store.path) as history:
        assert list(history.readings(["read_at"], "node a")["read_at"].values) == [0.0, 15.0]
        assert list(history.readings(["read_at"], "gpu 0")["read_at"].values) == [4.0]


def test_a_lost_gpu_is_lost_until_it_answers(nvml: FakeNvml) -> None:
    import pynvml

    watch = watched(None, bare(nvml, 0))
    nvml.boards[0].failing["UtilizationRates"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    machine = turned(nvml, watch, turns=3)
    (gpu,) = machine.devices.find_gpus([bare(nvml, 0)])
    assert gpu.values["gpu_lost"] == 1.0
    assert gpu.counts == {("lost", 0): 1}
    nvml.boards[0].failing.clear()


@pytest.mark.parametrize(
    ("pids", "foreign"), [((OURS, STRANGER), 3.0), ((OURS,), 0.0), ((STRANGER,), None)], ids=["both", "ours", "unknown"]
)
def test_memory_of_other_processes_is_measured_where_pids_are_known(
    nvml: FakeNvml, pids: tuple[int, ...], foreign: float | None
) -> None:
    nvml.boards[0].processes = [SimpleNamespace(pid=pid, usedGpuMemory=3) for pid in pids]
    machine = turned(nvml, watched(None, bare(nvml, 0)), turns=2)
    (gpu,) = machine.devices.find_gpus([bare(nvml, 0)])
    assert gpu.values.get("gpu_memory_foreign_bytes") == foreign


def test_prometheus_can_join_them_with_dcgm(nvml: FakeNvml) -> None:
    watch = watched(None, bare(nvml, 1), "")
    machine = turned(nvml, watch, turns=2)
    text = exposition(LiveCollector({"r1": watch}, Reloads(), FaultCounter()).collect()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (info,) = families["sentinel_rank_gpu_info"].samples
    assert info.labels == {
        "run": "r1",
        "rank": "0",
        "hostname": machine.devices.hostname,
        "gpu": "1",
        "UUID": nvml.boards[1].uuid,
        "pci_bus_id": "00000000:01:00.0",
        "device": "nvidia1",
        "modelName": "NVIDIA Fake 80GB",
    }
    (temperature,) = families["sentinel_gpu_temperature_celsius"].samples
    assert (temperature.labels["UUID"], temperature.value) == (nvml.boards[1].uuid, 64.0)
    (corrected,) = families["sentinel_gpu_ecc_corrected"].samples
    assert (corrected.name, corrected.value) == ("sentinel_gpu_ecc_corrected_total", 3.0)
    (host,) = families["sentinel_host_memory_total_bytes"].samples
    assert host.labels == {"hostname": machine.devices.hostname}


@pytest.mark.slow
@pytest.mark.processes
def test_a_real_daemon_reads_a_fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root / 'tests' / 'collect' / 'driver'}:{root}")
    uuids = [board.uuid.removeprefix("GPU-") for board in FakeNvml().boards]
    with daemon_process(FAKE_STUCK="1", FAKE_XIDS="48") as (path, process), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity, gpus=tuple(uuids)))
        rank.expect(wire.Welcome)
        rank.steps(0, [1.0, 2.0])

        def read() -> Any:
            (run,) = ask_daemon(path, "status")["runs"]
            gpus = run["gpus"]["devices"]
            return run if gpus and gpus[0]["faults"] and "gpu_power_watts" in gpus[0]["values"] else None

        run = until(read, "the reading", 30)
        first, second = run["gpus"]["devices"]
        assert (first["gpu"], first["ranks"], first["values"]["gpu_power_watts"]) == (0, [0], 412.0)
        assert [fault["code"] for fault in first["faults"]] == [48]
        assert "gpu_power_watts" not in second["values"]
        assert "host_load_ratio" in run["host"]
        cases = {case["alert"]: case for case in until(lambda: ask_daemon(path, "incidents"), "the alert")}
        assert cases.keys() == {"GpuFault", "GpuWearing"}  # a row of memory waits for a reset
        case = cases["GpuFault"]
        assert (case["severity"], case["members"][0]["name"]) == ("critical", "0")
        assert case["diagnosis"]["cause"].startswith("GPU 0: XID 48, double-bit ECC error")
        assert "on it rank 0" in case["diagnosis"]["evidence"][0]
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    with History(paths.histories()[0]) as history:
        assert "gpu 0" in history.devices()


def test_what_the_driver_reports_by_itself_is_seen_at_once(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next regular reading would be in an hour."""
    monkeypatch.setattr(machine_module, "AT_ONCE_SECONDS", 0.01)
    watch, machine = watched(None, bare(nvml, 0)), MachineReader(lambda: Gpus.open(nvml))

    async def serve() -> dict[str, float]:
        await machine.turn([watch])  # opens the driver
        monkeypatch.setattr(machine_module, "READ_SECONDS", 3600.0)
        serving = asyncio.create_task(machine.serve({"r1": watch}))
        await asyncio.sleep(0.05)
        nvml.events.put((nvml.boards[0], 48))
        values: dict[str, float] = {}
        while not values.get("gpu_xid"):
            await asyncio.sleep(0.01)
            values = dict(make_observation(machine.devices, watch.run).values[Entity("gpu", "0")])
        serving.cancel()
        return values

    assert asyncio.run(asyncio.wait_for(serve(), 20))["gpu_xid"] == 48.0
