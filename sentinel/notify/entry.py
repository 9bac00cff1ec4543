"""One group as one receiver knows it: what it was told, what it is to be told, and when.

It holds the state that is wanted, not a list of messages: a receiver that was away for an hour gets one message with
what is true now. Changes within `wait` go out together, further ones not before `interval` after the last message. What
was delivered is remembered by a digest, so that nothing is sent twice, even across a restart.
"""

from __future__ import annotations

import hashlib
import math
import random

import msgspec

from sentinel.config.settings import Grouping
from sentinel.diagnose.case import Case
from sentinel.notify import Delivery

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
"""Seconds between two attempts: doubled each time, with a jitter of up to a half, so that a receiver that comes back is
not met by everybody at once."""
LONGEST_AFTER = 3600.0
"""Longest pause that a receiver may ask for; after that it is tried again."""
UNHEARD_SECONDS = 30.0
"""A critical case that was over so soon after it fired is sent as firing first, where nothing of it was sent yet."""
HANDED_OVER_SECONDS = 120.0
"""Since it fired, by the clocks of two nodes: such a case of which nothing came here before its end is sent as firing
first, too, as the node that was to send it is gone, or heard only of its end. People may have known an older one."""
LATE_SECONDS = 600.0
"""After so long without an answer a receiver gets such a case as it is then."""
GIVE_UP_SECONDS = 24 * 3600.0
"""What could not be told for a day is news no more."""
CASES = 50
"""Cases in one message. A rule has one open incident; the others ended."""
TOLD = 200
"""Cases that are remembered as told: as many ended incidents as the engine keeps."""


class Entry(msgspec.Struct, kw_only=True):
    """What one receiver was told of one problem, or of the cases of one alert that is never a part of one, and is to be
    told. Times are unix seconds."""

    receiver: str
    alert: str
    """Of the first case."""
    problem_id: str = ""
    """See `Case`."""
    run_id: str = ""
    """Under which people are told of it; empty: the run's."""
    cases: dict[str, Case] = {}
    """By id: cases that fire, and ended ones whose end was not sent yet; all cases of a problem until it is over."""
    ends: dict[str, Case] = {}
    """By id: critical cases that were over before the receiver was told that they fired: both are sent, as a pager
    would not hear of a job that hung and was ended within seconds."""
    quiet: list[str] = []
    """Ids of consequences that came when the receiver was to be told of the problem in any case, by one as severe."""
    edits: bool = True
    """See `Route`."""
    escalated: bool = False
    """Whether a case more severe than anything sent is to be sent."""
    told: dict[str, str] = {}
    """Id -> digest of the case as it was delivered."""
    sending: list[str] = []
    """Ids of the cases in the message that is on its way."""
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

    @property
    def key(self) -> str:
        """What makes it this one among those of a receiver."""
        name = self.problem_id or self.alert
        return f"{self.run_id}/{name}" if self.run_id else name

    @property
    def firing(self) -> bool:
        """Whether any of it fires."""
        return any(case.state == "firing" for case in self.cases.values())

    def may_be_told(self, identity: str) -> bool:
        """Whether the receiver was told of a case, or is just now."""
        return identity in self.told or identity in self.sending

    def knows(self, case: Case) -> bool:
        """Whether the case is one of these; it may belong to another problem by now."""
        return bool(self.problem_id or self.alert == case.alert) and (case.id in self.cases or case.id in self.told)

    @property
    def finished(self) -> bool:
        """Whether it is about a problem that is over, as the receiver knows: there will be no more of it."""
        return bool(self.problem_id) and not (self.cases or self.pending or self.lost)

    def put(self, case: Case, now: float, grouping: Grouping) -> None:
        """The case as it is now."""
        if handed_over := self._is_handed_over(case, now):
            fired = msgspec.structs.replace(case, state="firing", resolved_step=None, resolved_time=None, leaves="")
            self._take(fired, now, grouping)
        soon = handed_over or case.id in self.ends or now <= self.since + UNHEARD_SECONDS
        if soon and self._fired_unheard(case):
            self.ends[case.id] = msgspec.structs.replace(case)
        else:
            self._take(case, now, grouping)

    def _take(self, case: Case, now: float, grouping: Grouping) -> None:
        """To be told as it is."""
        fires = case.state == "firing"
        self.ends.pop(case.id, None)
        if case.silenced and not fires and case.id in self.cases and not self.may_be_told(case.id):
            self._drop_untold(case.id, now, grouping)
            return
        escalates = case.id not in self.cases and case.id not in self.told and self._weigh(case)
        muted = bool(case.silenced) and fires and case.id in self.told
        if muted or self.told.get(case.id) == digest(case):
            if fires or not self.problem_id:
                self.cases.pop(case.id, None)
            if fires:
                self.cases[case.id] = msgspec.structs.replace(case)
            return
        self.cases[case.id] = msgspec.structs.replace(case)
        if len(self.cases) > CASES:
            del self.cases[next((known.id for known in self.cases.values() if known.state != "firing"), case.id)]
        if escalates:
            self.escalated = True
            self._change(now, min(self.due if self.pending else math.inf, now + grouping.wait))
        elif not self.pending and self._is_news(case):
            self._change(now, max(now + grouping.wait, self.sent + grouping.interval))

    def _fired_unheard(self, case: Case) -> bool:
        """Whether a critical case is over before the receiver was told that it fired. One that a rollback undid is told
        as that alone, and wakes no one."""
        known = self.cases.get(case.id)
        waits = known is not None and known.state == "firing" and not known.silenced and case.id not in self.told
        return waits and case.state == "resolved" and case.severity == "critical"

    def _is_handed_over(self, case: Case, now: float) -> bool:
        """Whether a critical case was over soon after it fired, a moment ago, and nothing of it came here before."""
        is_new = case.id not in self.cases and case.id not in self.told and not case.silenced
        if not is_new or case.state != "resolved" or case.severity != "critical" or case.resolved_time is None:
            return False
        return case.resolved_time - case.time <= UNHEARD_SECONDS and abs(now - case.time) <= HANDED_OVER_SECONDS

    def _weigh(self, case: Case) -> bool:
        """A case that is new here. Whether a receiver that was told of the problem has to be told of this one as of
        something new: what it was told of is less severe, or silenced by now."""
        told = [known.level for known in self.cases.values() if known.id not in self.quiet and not known.silenced]
        if not self.problem_id or not self.cases:
            return False
        if told and max(told) >= case.level:
            self.quiet = [*self.quiet, case.id][-TOLD:]
            return False
        return self.sent > 0

    def _is_news(self, case: Case) -> bool:
        """Whether a change of this case is worth a message. For a consequence: if it causes no second notification, or
        the whole problem has ended."""
        return self.edits or not self.firing or (case.state == "firing" and case.id not in self.quiet)

    def move(self, case: Case, now: float, grouping: Grouping) -> None:
        """The case as it is now, of which the receiver is told elsewhere from now on. Where it was not told of it here,
        it will not be."""
        if self.may_be_told(case.id) or case.id not in self.cases:
            self._take(case, now, grouping)
            return
        self._drop_untold(case.id, now, grouping)

    def _drop_untold(self, identity: str, now: float, grouping: Grouping) -> None:
        self.drop(identity)
        if not self.cases:
            self.rest(now, grouping)

    def drop(self, identity: str) -> None:
        """A case belongs elsewhere."""
        self.cases.pop(identity, None)
        self.ends.pop(identity, None)
        self.told.pop(identity, None)

    def list_news(self) -> list[Case]:
        """What is to be said now. Empty: all that fires is silenced, and was told before."""
        return [case for case in self.cases.values() if not (case.silenced and case.state == "firing")]

    def urgency(self) -> int:
        """By the most severe of what is to be said."""
        return max((case.level for case in self.list_news()), default=0)

    def list_unchanged(self) -> list[str]:
        """Ids of what is to be said and was said before."""
        return [case.id for case in self.list_news() if self.told.get(case.id) == digest(case)]

    def repeats(self) -> bool:
        """Whether all that is to be said was said before."""
        return len(self.list_unchanged()) == len(self.list_news())

    def hurry(self, now: float) -> None:
        """The run is over: what waits for more need not. What failed waits on."""
        if self.pending and not self.attempts:
            self.due = now

    def rest(self, now: float, grouping: Grouping) -> None:
        """Nothing to say: until the next time that it is said again."""
        self.since, self.attempts, self.held = 0.0, 0, False
        self.due = now + grouping.repeat if self.cases else math.inf

    def record_delivery(self, cases: list[Case], now: float, grouping: Grouping, reference: str = "") -> None:
        """These were delivered, as they were when the attempt began."""
        self.sending = []
        for case in cases:
            self.told[case.id] = digest(case)
            known = self.cases.get(case.id)
            ended = known is not None and known.state != "firing" and digest(known) == self.told[case.id]
            if ended and not (self.problem_id and self.firing):
                del self.cases[case.id]
        while len(self.told) > TOLD:
            del self.told[next(iter(self.told))]
        self.sent, self.trouble, self.reference, self.escalated = now, "", reference, False
        self.rest(now, grouping)
        if any(self._is_news(case) for case in self.list_news() if self.told.get(case.id) != digest(case)):
            self._change(now, now + grouping.interval)
        for identity in self.told.keys() & self.ends.keys():
            self.put(self.ends.pop(identity), now, grouping)

    def record_failure(self, delivery: Delivery, now: float, grouping: Grouping) -> bool:
        """It was not delivered. Whether it will be tried again; else it was given up."""
        self.sending = []
        self.trouble = delivery.detail
        self.attempts += 1
        self.since = self.since or now
        if now - self.since > LATE_SECONDS:
            self.cases |= self.ends
            self.ends.clear()
        if delivery.retry and now - self.since <= GIVE_UP_SECONDS:
            self.due = now + max(pause(self.attempts), min(delivery.after, LONGEST_AFTER))
            return True
        self.lost = delivery.detail
        over = self.ends.keys()
        self.cases = {case.id: case for case in self.cases.values() if case.state == "firing" and case.id not in over}
        self.ends.clear()
        self.rest(now, grouping)
        return False

    def resume_after(self, now: float, grouping: Grouping) -> None:
        """Another daemon goes on with it, maybe with a clock that was set back: nothing lies further ahead than what
        could have been meant."""
        self.sent, self.since = min(self.sent, now), min(self.since, now)
        longest = LONGEST_PAUSE if self.pending else grouping.repeat
        self.due = min(self.due, now + longest) if self.cases or self.pending else math.inf

    def _change(self, now: float, due: float) -> None:
        self.since, self.due, self.attempts = now, due, 0


def digest(case: Case) -> str:
    """Equal for cases that say the same to people."""
    said: tuple[object, ...] = (case.state, sorted((m.scope, m.name) for m in case.members), case.done)
    said += (case.parent,) if case.parent else ()
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=8).hexdigest()


def pause(attempts: int) -> float:
    """Seconds until the next attempt, after so many that failed."""
    longest = min(FIRST_PAUSE * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)
