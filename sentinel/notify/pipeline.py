"""From a case to the receivers of one run: one queue a receiver, so that none waits for another.

An asyncio task a receiver takes what is due, sees that it is in the outbox, delivers it within the receiver's time, and
marks it. The daemon's loop is not held up: the disk is written from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sentinel.diagnose.case import Case
from sentinel.notify import Delivery, Fault, Message, Route
from sentinel.notify.attempt import attempt
from sentinel.notify.entry import FIRST_PAUSE, LONGEST_AFTER, Entry
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
    held: int = 0
    """Messages that waited for a rate limit."""


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
        self._outbox, self._clock = outbox, clock
        self._blank = Message(run=run, run_id=run_id, alert="", cases=())
        self._dirty: dict[tuple[str, str], Entry] = {}
        self._bell, self._writing = asyncio.Event(), asyncio.Lock()
        self.queues: list[_Queue] = []
        """One a receiver."""
        self._served: dict[str, asyncio.Task[None]] = {}
        self._writer = list[asyncio.Task[None]]()
        self._saves = set[asyncio.Task[None]]()
        self.replace(routes, link)

    def start(self) -> None:
        """Begin to deliver, in the running loop."""
        self._writer = [asyncio.create_task(self._write())]
        self._serve()

    def replace(self, routes: Sequence[Route], link: str = "") -> None:
        """These receivers from now on. One of the same name goes on where it was; what one that is gone was not told
        yet stays in the outbox."""
        self._blank = msgspec.structs.replace(self._blank, link=link)
        former = {queue.name: queue for queue in self.queues}
        self.queues = [former.pop(route.name) if route.name in former else self._queue(route) for route in routes]
        for queue, route in zip(self.queues, routes, strict=True):
            queue.follow(route, self._blank)
        for name in former:
            if name in self._served:
                self._served.pop(name).cancel()
        if self._writer:
            self._serve()

    def _queue(self, route: Route) -> _Queue:
        queue = _Queue(self._blank, route, self._clock, self._kept)
        queue.resume([entry for entry in self._outbox.entries() if entry.receiver == queue.name])
        return queue

    def _serve(self) -> None:
        for queue in self.queues:
            if queue.name not in self._served:
                self._served[queue.name] = asyncio.create_task(queue.serve())

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

    def write_anew(self) -> None:
        """The outbox lost all: put it there again."""
        self._dirty.update(((entry.receiver, entry.alert), entry) for entry in self.entries)
        self._bell.set()

    @property
    def entries(self) -> list[Entry]:
        """All that is known of all receivers."""
        return [entry for queue in self.queues for entry in queue.entries.values()]

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
                async with asyncio.timeout(_WRITE_AGAIN if self._outbox.waits else None):
                    await self._bell.wait()
            await self._save()

    async def _kept(self, entry: Entry) -> None:
        """Returns once it is in the file, or the disk has not answered for a while."""
        self._dirty[entry.receiver, entry.alert] = entry
        self._saves.add(save := asyncio.create_task(self._save()))
        save.add_done_callback(self._saves.discard)
        await asyncio.wait([save], timeout=_KEPT_SECONDS)
        if not save.done():
            self._outbox.unanswered()

    async def _save(self) -> None:
        async with self._writing:
            self._bell.clear()
            rows = [row(entry) for entry in self._dirty.values()]
            self._dirty.clear()
            if not rows and not self._outbox.waits:
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
        self._clock, self._keep = clock, keep
        self._wake = asyncio.Event()
        self._ending = False
        self.follow(route, blank)

    def follow(self, route: Route, blank: Message) -> None:
        """From now on."""
        self._blank, self._route, self._grouping = blank, route, route.grouping
        self._wake.set()

    def resume(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.resumed(self._clock(), self._grouping)
            self.entries[entry.alert] = entry

    def put(self, case: Case) -> Entry | None:
        known = self.entries.get(case.alert)
        if not self._route.wants(case) and (known is None or case.id not in known.told):
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
            "held": self.counts.held,
            "pending": self.pending,
            "trouble": next((entry.trouble for entry in self.entries.values() if entry.trouble), ""),
        }

    async def serve(self) -> None:
        while True:
            now = self._clock()
            due = self._due(now)
            wait = min((entry.due for entry in self.entries.values()), default=math.inf) - now
            if self._ending and not due:
                return
            if due and not (wait := self._route.limiter.wait(now)):
                await self._send(due[0])
                continue
            self.counts.held += sum(not entry.held for entry in due)
            for entry in due:
                entry.held = True
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, _LONGEST_SLEEP)):
                    await self._wake.wait()

    def _due(self, now: float) -> list[Entry]:
        """What is to be sent by now, critical ones first."""
        return sorted((e for e in self.entries.values() if e.due <= now), key=lambda e: (-e.urgency(), e.due))

    async def _send(self, entry: Entry) -> None:
        cases = entry.spoken()
        if not cases:
            entry.rest(self._clock(), self._grouping)
            return await self._keep(entry)
        await self._keep(entry)
        self._route.limiter.took(self._clock())
        self.counts.retried += bool(entry.attempts)
        delivery = await attempt(self._route, self._message(entry, cases))
        if delivery.fault is None:
            self.counts.sent += 1
            entry.delivered(cases, self._clock(), self._grouping, delivery.reference)
            for other in self._lost():
                other.lost = ""
                await self._keep(other)
        else:
            self._failed(entry, delivery)
        await self._keep(entry)

    def _message(self, entry: Entry, cases: Sequence[Case]) -> Message:
        now = self._clock()
        limited = self._route.limiter.wait(now) > _WORTH_SAYING
        return msgspec.structs.replace(
            self._blank,
            alert=entry.alert,
            cases=tuple(cases),
            reference=entry.reference,
            repeated=entry.repeats(),
            held=tuple(other.alert for other in self._due(now) if other is not entry) if limited else (),
            lost=tuple(f"{other.alert} ({other.lost})" for other in self._lost()),
        )

    def _lost(self) -> list[Entry]:
        """What was given up since the last message that was taken."""
        return [entry for entry in self.entries.values() if entry.lost]

    def _failed(self, entry: Entry, delivery: Delivery) -> None:
        assert delivery.fault is not None
        self.counts.failed[delivery.fault] += 1
        first, again = not entry.attempts, entry.failed(delivery, self._clock(), self._grouping)
        if delivery.fault == "rate limited":
            self._route.limiter.rest(self._clock() + (min(delivery.after, LONGEST_AFTER) or FIRST_PAUSE))
        if not again:
            self.counts.given_up += 1
            log.error("receiver %s: %s was not told, and will not be: %s", self.name, entry.alert, delivery.detail)
        elif first:
            log.warning("receiver %s: %s is told later: %s", self.name, entry.alert, delivery.detail)


_WRITE_AGAIN = 5.0
"""Seconds between two tries to write what did not fit on the disk."""
_KEPT_SECONDS = 5.0
"""Seconds that a message waits for being kept before it is sent: told twice is better than not told."""
_WORTH_SAYING = 5.0
"""Seconds that others wait for a rate limit: less is pace, and no news."""
_LONGEST_SLEEP = 3600.0
"""Seconds; a task that slept for ever would keep an infinite timer in the loop."""
