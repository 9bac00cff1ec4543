"""From a case to the receivers of one run: one queue a receiver, so that none waits for another.

An asyncio task a receiver takes what is due, sees that it is in the outbox, delivers it within the receiver's time, and
marks it. The daemon's loop is not held up: the disk is written from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sentinel.diagnose.case import Case
from sentinel.notify import Delivery, Fault, Message, Route
from sentinel.notify.entry import Entry
from sentinel.notify.outbox import Outbox, row

log = logging.getLogger(__name__)

_BEGAN = time.time() - time.monotonic()


def steady() -> float:
    """Unix seconds that nobody sets back while we run."""
    return _BEGAN + time.monotonic()


class Counts(msgspec.Struct):
    """Of one receiver, since this daemon watches the run."""

    sent: int = 0
    failed: Counter[Fault] = msgspec.field(default_factory=Counter)
    """Attempts."""
    retried: int = 0
    given_up: int = 0


class Pipeline:
    """The receivers of one run. `put` from the loop; the rest is done in its tasks."""

    def __init__(
        self,
        run: str,
        run_id: str,
        routes: Sequence[Route],
        *,
        outbox: Outbox,
        link: str = "",
        clock: Callable[[], float] = steady,
    ) -> None:
        """`link`: where people see the run."""
        self._outbox = outbox
        self._dirty: dict[tuple[str, str], Entry] = {}
        self._bell, self._writing = asyncio.Event(), asyncio.Lock()
        blank = Message(run=run, run_id=run_id, alert="", cases=(), link=link)
        self.queues = [_Queue(blank, route, clock, self._kept) for route in routes]
        """One a receiver."""
        left = outbox.entries()
        for queue in self.queues:
            queue.resume([entry for entry in left if entry.receiver == queue.name])
        self._served = list[asyncio.Task[None]]()
        self._writer = list[asyncio.Task[None]]()

    def start(self) -> None:
        """Begin to deliver, in the running loop."""
        self._served = [asyncio.create_task(queue.serve()) for queue in self.queues]
        self._writer = [asyncio.create_task(self._write())]

    def put(self, case: Case) -> None:
        """The case as it is now: who does not know it yet will be told."""
        for queue in self.queues:
            if (entry := queue.put(case)) is not None:
                self._dirty[entry.receiver, entry.alert] = entry
                self._bell.set()

    def known(self, identity: str) -> bool:
        """Whether a case is on its way, or was told as firing and not as ended."""
        return any(identity in entry.cases for queue in self.queues for entry in queue.entries.values())

    def hurry(self) -> None:
        """The run is over: send what waits for more."""
        for queue in self.queues:
            queue.hurry()

    @property
    def pending(self) -> int:
        """Messages that receivers have not got yet."""
        return sum(queue.pending for queue in self.queues)

    @property
    def trouble(self) -> str:
        """What is wrong with the outbox, in words."""
        return self._outbox.trouble if self.queues else ""

    def status(self) -> list[dict[str, Any]]:
        """A row a receiver."""
        return [queue.status() for queue in self.queues]

    async def close(self, patience: float = 0.0) -> None:
        """Deliver what waits, for at most so many seconds, and stop. The rest is in the outbox."""
        for queue in self.queues:
            queue.end()
        if self._served:
            await asyncio.wait(self._served, timeout=patience)
        for task in (*self._served, *self._writer):
            task.cancel()
        await asyncio.gather(*self._served, *self._writer, return_exceptions=True)
        await self._save()
        self._outbox.close()
        if self.pending:
            log.error("%d notifications are not delivered; the next daemon of this run delivers them", self.pending)

    async def _write(self) -> None:
        while True:
            await self._bell.wait()
            await self._save()

    async def _kept(self, entry: Entry) -> None:
        """Returns once it is in the file."""
        self._dirty[entry.receiver, entry.alert] = entry
        await self._save()

    async def _save(self) -> None:
        async with self._writing:
            self._bell.clear()
            rows = [row(entry) for entry in self._dirty.values()]
            self._dirty.clear()
            if not rows:
                return
            written = asyncio.ensure_future(asyncio.to_thread(self._outbox.write, rows))
            try:
                await asyncio.shield(written)
            except asyncio.CancelledError:
                await written  # a thread is not cancelled, and the file must not be closed under it
                raise


class _Queue:
    """What one receiver is told of one run."""

    def __init__(
        self,
        blank: Message,
        route: Route,
        clock: Callable[[], float],
        keep: Callable[[Entry], Awaitable[None]],
    ) -> None:
        self.name = route.name
        self.counts = Counts()
        self.entries: dict[str, Entry] = {}
        """By alert. As many as there are rules."""
        self._blank, self._route, self._grouping = blank, route, route.grouping
        self._clock, self._keep = clock, keep
        self._wake = asyncio.Event()
        self._ending = False

    def resume(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.resumed(self._clock(), self._grouping)
            self.entries[entry.alert] = entry

    def put(self, case: Case) -> Entry | None:
        if not self._route.wants(case):
            return None
        if case.alert not in self.entries:
            self.entries[case.alert] = Entry(receiver=self.name, alert=case.alert)
        entry = self.entries[case.alert]
        entry.put(case, self._clock(), self._grouping)
        self._wake.set()
        return entry

    def hurry(self) -> None:
        for entry in self.entries.values():
            entry.hurry(self._clock())
        self._wake.set()

    def end(self) -> None:
        """Return from `serve` once nothing is due."""
        self._ending = True
        self.hurry()

    @property
    def pending(self) -> int:
        return sum(entry.pending for entry in self.entries.values())

    def status(self) -> dict[str, Any]:
        return {
            "receiver": self.name,
            "sent": self.counts.sent,
            "failed": dict(self.counts.failed),
            "retried": self.counts.retried,
            "given_up": self.counts.given_up,
            "pending": self.pending,
            "trouble": next((entry.trouble for entry in self.entries.values() if entry.trouble), ""),
        }

    async def serve(self) -> None:
        while True:
            entry = min(self.entries.values(), key=lambda entry: entry.due, default=None)
            wait = entry.due - self._clock() if entry is not None else float("inf")
            if self._ending and wait > 0:
                return
            if entry is None or wait > 0:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait, _LONGEST_SLEEP)):
                        await self._wake.wait()
            else:
                await self._send(entry)

    async def _send(self, entry: Entry) -> None:
        cases = entry.spoken()
        if not cases:
            entry.rest(self._clock(), self._grouping)
            return await self._keep(entry)
        await self._keep(entry)
        self.counts.retried += bool(entry.attempts)
        delivery = await self._tried(
            msgspec.structs.replace(
                self._blank,
                alert=entry.alert,
                cases=tuple(cases),
                reference=entry.reference,
                repeated=entry.repeats(),
            )
        )
        if delivery.fault is None:
            self.counts.sent += 1
            entry.delivered(cases, self._clock(), self._grouping, delivery.reference)
        else:
            self._failed(entry, delivery)
        await self._keep(entry)

    async def _tried(self, message: Message) -> Delivery:
        try:
            async with asyncio.timeout(self._route.timeout):
                return await self._route.receiver.deliver(message)
        except TimeoutError:
            return Delivery(fault="timeout", detail=f"no answer within {self._route.timeout:g} s", retry=True)
        except Exception as error:
            # Not its text: that may hold the URL.
            return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)

    def _failed(self, entry: Entry, delivery: Delivery) -> None:
        assert delivery.fault is not None
        self.counts.failed[delivery.fault] += 1
        first, again = not entry.attempts, entry.failed(delivery, self._clock(), self._grouping)
        if not again:
            self.counts.given_up += 1
            log.error("receiver %s: %s was not told, and will not be: %s", self.name, entry.alert, delivery.detail)
        elif first:
            log.warning("receiver %s: %s is told later: %s", self.name, entry.alert, delivery.detail)


_LONGEST_SLEEP = 3600.0
"""Seconds; a task that slept for ever would keep an infinite timer in the loop."""
