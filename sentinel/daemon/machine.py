"""Reads this node's GPUs and host every few seconds, off the event loop, and hands the values to the watched runs.

NVML is opened once a rank says that it trains on a GPU, and not before: a run on the CPU pays nothing for it. Each GPU
is read on a thread of its own, for at most `WAIT_SECONDS`: a GPU that does not answer delays nothing, and is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from sentinel.collect import DeviceFault, Reading
from sentinel.collect.gpus import SOFTWARE_XIDS, Gpus, NoGpusError
from sentinel.collect.host import Host, read_memory_limit
from sentinel.collect.patience import Patient
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine import Entity, Observation
from sentinel.runs import Run
from sentinel.runs.devices import Devices, Gpu, GpuFault

log = logging.getLogger(__name__)

READ_SECONDS = 4.0
"""Seconds between two readings: a GPU fault is reported within 5 s. An event of the driver is read without delay."""
AT_ONCE_SECONDS = 0.5
"""Least seconds between two readings: a failing GPU reports its fault again and again."""
WAIT_SECONDS = 0.5
"""Seconds to wait for all GPUs together. A read takes milliseconds; a late one is taken at the next reading."""
OPEN_SECONDS = 60.0
"""Seconds after which a driver that could not be opened yet is reported as not answering."""


class MachineReader:
    """Reads the GPUs and the host of this node. `opened` returns the GPUs, and may wait for the driver."""

    def __init__(self, opened: Callable[[], Gpus] = Gpus.open) -> None:
        self.devices = Devices(socket.gethostname())
        self._opening = Patient("nvml", opened)
        self._gpus: Gpus | None = None
        self._host = Host()
        self._lost: set[str] = set()
        self._news = asyncio.Event()

    async def serve(self, watches: Mapping[str, WatchedRun]) -> None:
        """Read and hand on the values until cancelled."""
        try:
            while True:
                await self._pause()
                live = [watch for watch in watches.values() if watch.run.attempt.live]
                if live:
                    try:
                        await self.turn(live)
                    except Exception:
                        log.exception("GPUs and host: a reading failed")
        finally:
            self.close()

    async def _pause(self) -> None:
        """Wait until the next reading is due, or the driver reports something."""
        if self._gpus is not None:
            self._gpus.when_faulty(functools.partial(_wake, asyncio.get_running_loop(), self._news))
        least = min(AT_ONCE_SECONDS, READ_SECONDS)
        await asyncio.sleep(least)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), READ_SECONDS - least)
        self._news.clear()

    async def turn(self, watches: Iterable[WatchedRun]) -> None:
        """Read once, and hand the values to these runs."""
        watches = list(watches)
        ranks = [rank for watch in watches for rank in watch.run.attempt.live]
        wanted = any(rank.hello.gpus for rank in ranks)
        jobs: dict[str | None, list[int]] = {
            watch.run.run_id: [rank.process for rank in watch.run.attempt.live] for watch in watches
        }
        jobs[None] = [rank.process for rank in ranks]
        host, limits, readings, faults = await asyncio.to_thread(self._read, wanted, jobs)
        self.devices.host, self.devices.memory_limits = host.values, limits
        if self._gpus is not None:
            self._keep(self._gpus, readings, faults, {rank.process for rank in ranks})
        now = time.monotonic()
        for watch in watches:
            watch.ingest.observe_machine(
                self.devices,
                make_observation(self.devices, watch.run),
                _select_faults(self.devices, watch, faults),
                now,
            )

    def close(self) -> None:
        """Stop without waiting."""
        self._opening.close()
        if self._gpus is not None:
            self._gpus.close()

    def _read(
        self, wanted: bool, jobs: Mapping[str | None, Iterable[int]]
    ) -> tuple[Reading, dict[str | None, dict[str, float]], list[Reading], list[DeviceFault]]:
        """Return the readings of the host, of memory limits and of the GPUs, and the GPUs' new faults. `jobs`: the
        processes of each run, and of all. Runs on a thread."""
        deadline = time.monotonic() + WAIT_SECONDS
        if wanted and self._gpus is None:
            self._open(deadline)
        if self._gpus is not None:
            self._gpus.order()
        host, limits = self._host.read(), {run_id: read_memory_limit(processes) for run_id, processes in jobs.items()}
        return host, limits, *(self._gpus.collect(deadline) if self._gpus is not None else ([], []))

    def _open(self, deadline: float) -> None:
        """Open the driver, once: a driver that is missing or refuses does not appear while the daemon lives."""
        devices = self.devices
        if devices.trouble and self._opening.silent_since is None:
            return
        self._opening.order()
        try:
            self._gpus = self._opening.collect(deadline)
        except NoGpusError as error:
            devices.trouble = str(error)
            return
        if self._gpus is not None:
            devices.trouble = ""
            devices.gpus = {gpu.uuid: gpu for gpu in self._gpus.describe_all()}
        elif (since := self._opening.silent_since) is not None and time.monotonic() - since > OPEN_SECONDS:
            devices.trouble = "the driver does not answer"

    def _keep(self, gpus: Gpus, readings: list[Reading], faults: list[DeviceFault], processes: set[int]) -> None:
        silent, read = gpus.silent(), {reading.name: reading for reading in readings}
        self._lost = (self._lost | {fault.name for fault in faults if fault.kind == "lost"}) - read.keys()
        for uuid, gpu in self.devices.gpus.items():
            mine = [fault for fault in faults if fault.name == uuid]
            for fault in mine:
                log.warning("GPU %d (%s): %s %s", gpu.index, uuid, fault.kind, fault.text)
                gpu.record_fault(GpuFault(fault.time, fault.kind, fault.code, fault.text))
            values = dict(read[uuid].values) | _foreign(read[uuid], processes) if uuid in read else {}
            gpu.values = values | {
                **_xids(mine),
                "gpu_lost": float(uuid in self._lost),
                "gpu_silent_seconds": silent.get(uuid, 0.0),
            }


def make_observation(devices: Devices, run: Run) -> Observation:
    """Return what the rules of a run judge: the values of the host and of the GPUs that its ranks train on."""
    values: dict[Entity, Mapping[str, float]] = {Entity("node", devices.hostname): devices.read_node(run.run_id)}
    for gpu in devices.find_gpus(uuid for rank in run.attempt.live for uuid in rank.hello.gpus):
        values[Entity("gpu", str(gpu.index))] = gpu.values
    return Observation(seq=run.attempt.closed_to, time=time.time(), values=values)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set the event of a loop from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon ends
        loop.call_soon_threadsafe(event.set)


def _select_faults(devices: Devices, watch: WatchedRun, faults: list[DeviceFault]) -> list[tuple[Gpu, DeviceFault]]:
    """Return the faults of the GPUs that a run trains on."""
    if not faults:
        return []
    mine = {
        gpu.uuid: gpu for gpu in devices.find_gpus(uuid for rank in watch.run.attempt.live for uuid in rank.hello.gpus)
    }
    return [(mine[fault.name], fault) for fault in faults if fault.name in mine]


def _xids(faults: list[DeviceFault]) -> dict[str, float]:
    codes = [fault.code for fault in faults if fault.kind == "xid"]
    hardware = [code for code in codes if code not in SOFTWARE_XIDS]
    program = [code for code in codes if code in SOFTWARE_XIDS]
    return {"gpu_xid": float(max(hardware, default=0)), "gpu_xid_program": float(max(program, default=0))}


def _foreign(reading: Reading, processes: set[int]) -> dict[str, float]:
    """Return the GPU memory of other processes; nothing if none of ours is listed: then the pids are of another
    namespace."""
    held = reading.processes
    if not processes & held.keys():
        return {}
    return {"gpu_memory_foreign_bytes": float(sum(used for pid, used in held.items() if pid not in processes))}
