"""One group as one receiver knows it: what it was told, what it is to be told, and when.

It holds the state that is wanted, not a list of messages: a receiver that was away for an hour gets one message with
what is true now. Changes within `wait` go out together, further ones not before `interval` after the last message. What
was delivered is remembered by a digest, so that nothing is told twice, over a restart neither.
"""

from __future__ import annotations

import hashlib
import math
import random

import msgspec

from sentinel.config import SEVERITIES, Grouping
from sentinel.diagnose.case import Case
from sentinel.notify import Delivery

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
"""Seconds between two attempts: doubled each time, with a jitter of up to a half, so that a receiver that comes back is
not met by everybody at once."""
LONGEST_AFTER = 3600.0
"""A receiver may ask to be left alone for so long; one that asks for more is asked again then."""
GIVE_UP_SECONDS = 24 * 3600.0
"""What could not be told for a day is news no more."""
CASES = 50
"""Cases in one message. A rule has one open incident; the others ended since the last message."""
TOLD = 200
"""Cases that are remembered as told: as many ended incidents as the engine keeps."""


class Entry(msgspec.Struct, kw_only=True):
    """What one receiver was told of the cases of one alert, and is to be told. Times are unix seconds."""

    receiver: str
    alert: str
    cases: dict[str, Case] = {}
    """Those that fire, and ended ones whose end was not told yet, by id."""
    told: dict[str, str] = {}
    """Id -> digest of the case as it was delivered."""
    due: float = math.inf
    """When to send."""
    since: float = 0.0
    """Since when something is to be told; 0: nothing is."""
    sent: float = 0.0
    """The last delivery."""
    attempts: int = 0
    """That failed since then."""
    trouble: str = ""
    """Why the last one failed."""
    lost: str = ""
    """Why the last of it was given up; empty once the receiver knows, by a message about anything."""
    held: bool = False
    """Whether what is due waits for a rate limit."""
    reference: str = ""
    """What the receiver calls its last message about the group; see `Delivery`."""

    @property
    def pending(self) -> bool:
        """Whether the receiver does not know all yet."""
        return self.since > 0

    def put(self, case: Case, now: float, grouping: Grouping) -> None:
        """The case as it is now."""
        fires = case.state == "firing"
        muted = bool(case.silenced) and fires and case.id in self.told
        if muted or self.told.get(case.id) == digest(case):
            self.cases.pop(case.id, None)
            if fires:
                self.cases[case.id] = msgspec.structs.replace(case)
            return
        self.cases[case.id] = msgspec.structs.replace(case)
        if len(self.cases) > CASES:
            del self.cases[next(known.id for known in self.cases.values() if known.state != "firing")]
        if not self.pending:
            self._change(now, max(now + grouping.wait, self.sent + grouping.interval))

    def spoken(self) -> list[Case]:
        """What is to be said now. Empty: all that fires is silenced, and was told before."""
        return [case for case in self.cases.values() if not (case.silenced and case.state == "firing")]

    def urgency(self) -> int:
        """By the most severe of what is to be said."""
        return max((SEVERITIES.index(c.severity) for c in self.spoken() if c.severity in SEVERITIES), default=0)

    def repeats(self) -> bool:
        """Whether all that is to be said was said before."""
        return all(self.told.get(case.id) == digest(case) for case in self.spoken())

    def hurry(self, now: float) -> None:
        """The run is over: what waits for more need not. What failed waits on."""
        if self.pending and not self.attempts:
            self.due = now

    def rest(self, now: float, grouping: Grouping) -> None:
        """Nothing to say: until the next time that it is said again."""
        self.since, self.attempts, self.held = 0.0, 0, False
        self.due = now + grouping.repeat if self.cases else math.inf

    def delivered(self, cases: list[Case], now: float, grouping: Grouping, reference: str = "") -> None:
        """These were delivered, as they were when the attempt began."""
        for case in cases:
            self.told[case.id] = digest(case)
            known = self.cases.get(case.id)
            if known is not None and known.state != "firing" and digest(known) == self.told[case.id]:
                del self.cases[case.id]
        while len(self.told) > TOLD:
            del self.told[next(iter(self.told))]
        self.sent, self.trouble, self.reference = now, "", reference
        self.rest(now, grouping)
        if not self.repeats():
            self._change(now, now + grouping.interval)

    def failed(self, delivery: Delivery, now: float, grouping: Grouping) -> bool:
        """It was not delivered. Whether it will be tried again; else it was given up."""
        self.trouble = delivery.detail
        self.attempts += 1
        self.since = self.since or now
        if delivery.retry and now - self.since <= GIVE_UP_SECONDS:
            self.due = now + max(pause(self.attempts), min(delivery.after, LONGEST_AFTER))
            return True
        self.lost = delivery.detail
        self.cases = {case.id: case for case in self.cases.values() if case.state == "firing"}
        self.rest(now, grouping)
        return False

    def resumed(self, now: float, grouping: Grouping) -> None:
        """Another daemon goes on with it, maybe with a clock that was set back: nothing lies further ahead than what
        could have been meant."""
        self.sent, self.since = min(self.sent, now), min(self.since, now)
        longest = LONGEST_PAUSE if self.pending else grouping.repeat
        self.due = min(self.due, now + longest) if self.cases or self.pending else math.inf

    def _change(self, now: float, due: float) -> None:
        self.since, self.due, self.attempts = now, due, 0


def digest(case: Case) -> str:
    """Equal for cases that say the same to people."""
    said = (case.state, sorted((member.scope, member.name) for member in case.members), case.done)
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=8).hexdigest()


def pause(attempts: int) -> float:
    """Seconds until the next attempt, after so many that failed."""
    longest = min(FIRST_PAUSE * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)
