"""One receiver's part of the pipeline: what is sent to it about one run, when, and with what result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sentinel.diagnose.case import Case
from sentinel.notify import Delivery, Fault, Message, Route
from sentinel.notify.attempt import attempt
from sentinel.notify.entry import FIRST_PAUSE, LONGEST_AFTER, Entry

log = logging.getLogger(__name__)

_WORTH_SAYING = 5.0
"""Seconds that others wait for a rate limit before the message says so: less is normal pacing."""
_LONGEST_SLEEP = 3600.0
"""Seconds of a sleep at most; a task that slept without end would keep an infinite timer in the loop."""


class Counts(msgspec.Struct):
    """Counts of one receiver since this daemon began to watch the run."""

    sent: int = 0
    failed: Counter[Fault] = msgspec.field(default_factory=Counter)
    """Failed attempts by fault."""
    retried: int = 0
    given_up: int = 0
    held: int = 0
    """Messages that waited for a rate limit."""


class DeliveryQueue:
    """What is sent to one receiver about one run."""

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
        """By `Entry.key`. An ended problem's is removed `HANDED_OVER_SECONDS` after the receiver knows of the end."""
        self._clock, self._keep = clock, keep
        self._wake = asyncio.Event()
        self._ending = False
        self.follow(route, blank)

    def follow(self, route: Route, blank: Message) -> None:
        """Use this route and this blank message from now on."""
        self._blank, self._route, self._grouping = blank, route, route.grouping
        self._wake.set()

    def resume(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.resume_after(self._clock(), self._grouping)
            if (present := self.entries.setdefault(entry.key, entry)) is not entry:
                present.add_former(entry)
        self._wake.set()

    def put(self, case: Case, run_id: str, *, moved: bool = False) -> list[Entry]:
        """Take the case as it is now, and return the entries that changed. Where it was sent as another problem's, it
        ends there."""
        knowing = [entry for entry in self.entries.values() if entry.run_id == run_id and entry.knows(case)]
        known = max(
            knowing, key=lambda entry: (entry.problem_id == case.problem_id, entry.fires(case.id)), default=None
        )
        if known is None and not self._route.wants(case):
            return []
        former = list[Entry]()
        if case.state == "firing":  # else its end goes where it was sent before
            former = [entry for entry in knowing if entry.problem_id not in ("", case.problem_id)]
            known = None if known in former else known
        entry = known or self._entry_of(case, run_id)
        if entry.finished and case.state == "firing":  # kept for ends that come again alone: what it fired is over
            del self.entries[entry.key]
            entry = self._entry_of(case, run_id)
        entry.edits, entry.tracks = self._route.edits, self._route.tracks
        now = self._clock()
        (entry.move if moved else entry.put)(case, now, self._grouping)
        for other in former:
            other.separate(case, now, self._grouping)
        self._wake.set()
        return [entry, *former]

    def _entry_of(self, case: Case, run_id: str) -> Entry:
        blank = Entry(receiver=self.name, alert=case.alert, problem_id=case.problem_id, run_id=run_id)
        return self.entries.setdefault(blank.key, blank)

    def withdraw(self) -> list[Entry]:
        withdrawn = [entry for entry in self.entries.values() if not entry.run_id]
        self.entries = {key: entry for key, entry in self.entries.items() if entry.run_id}
        return withdrawn

    def remove_over(self) -> list[Entry]:
        """Remove the entries that are over, and return them."""
        over = [entry for entry in self.entries.values() if entry.is_over(self._clock())]
        for entry in over:
            del self.entries[entry.key]
        return over

    def hurry(self) -> None:
        for entry in self.entries.values():
            entry.hurry(self._clock())
        self._wake.set()

    def end(self) -> None:
        """Have `serve` return once nothing is due."""
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
        """Return the entries that are due, critical ones first."""
        return sorted((e for e in self.entries.values() if e.due <= now), key=lambda e: (-e.urgency(), e.due))

    async def _send(self, entry: Entry) -> None:
        cases = entry.list_news()
        if not cases:
            entry.rest(self._clock(), self._grouping)
            return await self._keep(entry)
        entry.sending = [case.id for case in cases]
        await self._keep(entry)
        self._route.limiter.took(self._clock())
        self.counts.retried += bool(entry.attempts)
        delivery = await attempt(self._route, self._message(entry, cases))
        if delivery.fault is None:
            self.counts.sent += 1
            entry.record_delivery(cases, self._clock(), self._grouping, delivery.reference)
            if self._ending:  # for the end of a case that was just sent as firing
                entry.hurry(self._clock())
            for other in self._take_lost():
                other.lost = ""
                await self._keep(other)
        else:
            self._record_failure(entry, delivery)
        await self._keep(self.entries.get(entry.key, entry))  # its problem may have fired again meanwhile

    def _message(self, entry: Entry, cases: Sequence[Case]) -> Message:
        now = self._clock()
        limited = self._route.limiter.wait(now) > _WORTH_SAYING
        return msgspec.structs.replace(
            self._blank,
            run_id=entry.run_id or self._blank.run_id,
            alert=entry.alert,
            problem_id=entry.problem_id,
            cases=tuple(cases),
            quiet=frozenset(entry.quiet),
            outgrown=dict(entry.outgrown),
            escalated=entry.escalated,
            reference=entry.reference,
            repeated=entry.repeats(),
            unchanged=frozenset(entry.list_unchanged()),
            held=tuple(other.alert for other in self._due(now) if other is not entry) if limited else (),
            lost=tuple(f"{other.alert} ({other.lost})" for other in self._take_lost()),
        )

    def _take_lost(self) -> list[Entry]:
        """Return the entries that were given up since the last message that the receiver took."""
        return [entry for entry in self.entries.values() if entry.lost]

    def _record_failure(self, entry: Entry, delivery: Delivery) -> None:
        assert delivery.fault is not None
        self.counts.failed[delivery.fault] += 1
        first, again = not entry.attempts, entry.record_failure(delivery, self._clock(), self._grouping)
        if delivery.fault == "rate limited":
            self._route.limiter.rest(self._clock() + (min(delivery.after, LONGEST_AFTER) or FIRST_PAUSE))
        if not again:
            self.counts.given_up += 1
            log.error("receiver %s: %s was not told, and will not be: %s", self.name, entry.alert, delivery.detail)
        elif first:
            log.warning("receiver %s: %s is sent later: %s", self.name, entry.alert, delivery.detail)
