"""Deliver cases to the receivers of one run, with one queue per receiver, so that none waits for another.

An asyncio task per receiver takes what is due, makes sure that it is in the outbox, delivers it within the receiver's
time, and marks it. The daemon's loop is not held up: a thread writes to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from sentinel.diagnose.case import Case
from sentinel.notify import UNKNOWN_ORIGIN, Message, Origin, Route
from sentinel.notify.delivery_queue import DeliveryQueue
from sentinel.notify.entry import Entry
from sentinel.notify.outbox import Outbox, row

log = logging.getLogger(__name__)

_WRITE_AGAIN = 5.0
"""Seconds between two attempts to write what could not be written."""
_KEPT_SECONDS = 5.0
"""Most seconds that a message waits to be in the outbox before it is sent: a repeated message is better than none."""

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    """Return unix seconds that never go backwards while this process runs."""
    return _BEGAN + time.monotonic()


class Pipeline:
    """The receivers of one run. `put` is called from the loop; the rest is done in the pipeline's tasks."""

    def __init__(
        self,
        run: str,
        run_id: str,
        routes: Sequence[Route],
        *,
        outbox: Outbox,
        origin: Origin = UNKNOWN_ORIGIN,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._outbox, self._clock = outbox, clock
        self._blank = Message(run=run, run_id=run_id, alert="", cases=())
        self._dirty: dict[tuple[str, str], Entry] = {}
        self._wake_sender, self._writing = asyncio.Event(), asyncio.Lock()
        self.queues: list[DeliveryQueue] = []
        """One queue per receiver."""
        self._served: dict[str, asyncio.Task[None]] = {}
        self._writer = list[asyncio.Task[None]]()
        self._saves = set[asyncio.Task[None]]()
        self._withdrawn = False
        """Whether nothing is sent here about what was sent under the run's own id."""
        self.replace(routes, origin)

    def start(self) -> None:
        """Begin to deliver, in the running loop."""
        self._writer = [asyncio.create_task(self._write())]
        self._serve()

    def replace(self, routes: Sequence[Route], origin: Origin = UNKNOWN_ORIGIN) -> None:
        """Use these receivers from now on. A receiver with the same name goes on where it was; what was not yet sent to
        a removed one stays in the outbox."""
        self._blank = msgspec.structs.replace(self._blank, origin=origin)
        former = {queue.name: queue for queue in self.queues}
        self.queues = [former.pop(route.name) if route.name in former else self._queue(route) for route in routes]
        for queue, route in zip(self.queues, routes, strict=True):
            queue.follow(route, self._blank)
        for name in former:
            if name in self._served:
                self._served.pop(name).cancel()
        if self._writer:
            self._serve()

    def _queue(self, route: Route) -> DeliveryQueue:
        queue = DeliveryQueue(self._blank, route, self._clock, self._keep_entry)
        kept = (entry for entry in self._outbox.entries() if entry.receiver == queue.name)
        queue.resume([entry for entry in kept if entry.run_id or not self._withdrawn])
        return queue

    def _serve(self) -> None:
        for queue in self.queues:
            if queue.name not in self._served:
                self._served[queue.name] = asyncio.create_task(queue.serve())

    def put(self, case: Case, run_id: str = "", *, moved: bool = False) -> None:
        """Send the case as it is now to the receivers that do not have it yet. `run_id`: the run id in the messages, if
        not the run's; for receivers another id means another group. `moved`: it is sent elsewhere from now on."""
        for queue in self.queues:
            for entry in queue.put(case, run_id, moved=moved):
                self._dirty[entry.receiver, entry.key] = entry
                self._wake_sender.set()

    def is_known(self, identity: str, run_id: str = "") -> bool:
        """Return whether a case waits to be sent, or was sent as firing and not as ended."""
        return any(identity in entry.cases and entry.run_id == run_id for entry in self.entries)

    def withdraw(self) -> list[Entry]:
        """Send no more about what was sent under the run's own id, and return it. It stays in the outbox."""
        self._withdrawn = True
        return [entry for queue in self.queues for entry in queue.withdraw()]

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove what was withdrawn from the outbox, so that the next daemon does not send it either."""
        for entry in entries:
            blank = Entry(receiver=entry.receiver, alert=entry.alert, problem_id=entry.problem_id)
            self._dirty[entry.receiver, entry.key] = blank
            self._wake_sender.set()

    def restore(self, entries: Sequence[Entry]) -> None:
        """Go on with what was withdrawn."""
        self._withdrawn = False
        for queue in self.queues:
            queue.resume([entry for entry in entries if entry.receiver == queue.name])
        self.write_anew()

    def hurry(self) -> None:
        """Send at once what waits for further changes: the run is over."""
        for queue in self.queues:
            queue.hurry()

    @property
    def pending(self) -> int:
        """How many messages are not delivered yet."""
        return sum(queue.pending for queue in self.queues)

    def write_anew(self) -> None:
        """Write everything into the outbox again, which has lost it."""
        self._dirty.update(((entry.receiver, entry.key), entry) for entry in self.entries)
        self._wake_sender.set()

    @property
    def entries(self) -> list[Entry]:
        """The entries of all receivers."""
        return [entry for queue in self.queues for entry in queue.entries.values()]

    @property
    def trouble(self) -> str:
        """What is wrong with the outbox, in words."""
        return self._outbox.trouble if self.queues else ""

    def status(self) -> list[dict[str, Any]]:
        """Return a row per receiver."""
        return [queue.status() for queue in self.queues]

    async def close(self, patience: float = 0.0) -> None:
        """Deliver what waits, for at most `patience` seconds, and stop. The rest stays in the outbox."""
        for queue in self.queues:
            queue.end()
        served = list(self._served.values())
        if served:
            await asyncio.wait(served, timeout=patience)
        for task in (*served, *self._writer):
            task.cancel()
        await asyncio.gather(*served, *self._writer, return_exceptions=True)
        await self._save()
        self._outbox.close()
        if self.pending:
            log.error("%d notifications are not delivered; the next daemon of this run delivers them", self.pending)

    async def _write(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_AGAIN):
                    await self._wake_sender.wait()
            await self._save()

    async def _keep_entry(self, entry: Entry) -> None:
        """Write an entry. Returns once it is in the file, or the disk has not answered for `_KEPT_SECONDS`."""
        self._dirty[entry.receiver, entry.key] = entry
        self._saves.add(save := asyncio.create_task(self._save()))
        save.add_done_callback(self._saves.discard)
        await asyncio.wait([save], timeout=_KEPT_SECONDS)
        if not save.done():
            self._outbox.report_fault("the disk does not answer")

    async def _save(self) -> None:
        async with self._writing:
            self._wake_sender.clear()
            for entry in [entry for queue in self.queues for entry in queue.remove_over()]:
                self._dirty[entry.receiver, entry.key] = entry
            entries, self._dirty = self._dirty, {}
            if not entries and not self._outbox.waits:
                return
            rows = [row(entry, self._clock()) for entry in entries.values()]
            written = asyncio.ensure_future(asyncio.to_thread(self._outbox.write, rows))
            try:
                await asyncio.wait([written])
            except asyncio.CancelledError:
                await asyncio.wait([written])  # the thread goes on, and the file must not be closed under it
                raise
            finally:
                if (error := written.exception()) is not None:  # no thread could be started
                    self._dirty = entries | self._dirty
                    self._outbox.report_fault(error)
