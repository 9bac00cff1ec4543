"""One group as one receiver knows it: what it got, what must be sent to it, and when.

It holds the state to be reached, not a list of messages: a receiver that was away for an hour gets one message with
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
from sentinel.notify import Delivery, Outgrown

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
"""Seconds of the longest pause between two attempts. The pause doubles from `FIRST_PAUSE` on, less a jitter of up to a
half, so that not all daemons send at once to a receiver that comes back."""
LONGEST_AFTER = 3600.0
"""Longest pause in seconds that a receiver may ask for; after that it is tried again."""
UNHEARD_SECONDS = 30.0
"""Seconds: a critical case that ended so soon, or before its message was due, is sent as firing first, if nothing of it
was sent yet."""
HANDED_OVER_SECONDS = 120.0
"""Seconds since it fired, by the clocks of two nodes: such a case that came here only with its end is sent as firing
first, too, as the node that should have sent it is gone, or heard only of its end. People may know an older one."""
LATE_SECONDS = 600.0
"""Seconds without a delivery after which a receiver gets such a case only in its present state."""
GIVE_UP_SECONDS = 24 * 3600.0
"""Seconds after which an undelivered message is given up: after a day it is no news."""
CASES = 50
"""The most cases in one message. A rule has one open incident; the others ended."""
TOLD = 200
"""The most cases remembered as delivered: as many as the engine keeps ended incidents."""


class Entry(msgspec.Struct, kw_only=True):
    """What one receiver got, and must get, about one problem, or about the cases of one alert that is never part of a
    problem. Times are unix seconds."""

    receiver: str
    alert: str
    """Alert of the first case."""
    problem_id: str = ""
    """See `Case`."""
    run_id: str = ""
    """The run id in its messages; empty: the run's own."""
    cases: dict[str, Case] = {}
    """By id: firing cases, and ended ones whose end was not sent yet; of a problem, all cases until it is over."""
    ends: dict[str, Case] = {}
    """By id: critical cases that ended before the receiver got them as firing. Both states are sent: otherwise a pager
    would never show a job that hung and was ended within seconds."""
    quiet: list[str] = []
    """Ids of consequences that came when the receiver had, or was to get, a case of the problem at least as severe."""
    outgrown: dict[str, Outgrown] = {}
    """See `Message`."""
    edits: bool = True
    """See `Route`."""
    tracks: bool = False
    """See `ReceiverKind`."""
    escalated: bool = False
    """Whether a case must be sent that is more severe than anything sent before, or no longer silenced."""
    told: dict[str, str] = {}
    """Id -> digest of the case as it was delivered."""
    sending: list[str] = []
    """Ids of the cases in the message that is on its way."""
    due: float = math.inf
    """When the next message must be sent; infinite: no message is due."""
    since: float = 0.0
    """Since when there is something to send; 0: there is nothing."""
    sent: float = 0.0
    """Time of the last delivery; 0: there was none."""
    attempts: int = 0
    """Number of failed attempts since the last change."""
    trouble: str = ""
    """Why the last attempt failed; empty: it did not."""
    lost: str = ""
    """Why the last message was given up; empty once another message, about anything, has said so to the receiver."""
    held: bool = False
    """Whether the due message waits for a rate limit."""
    reference: str = ""
    """The receiver's own id of its last message about the group; see `Delivery`."""

    @property
    def pending(self) -> bool:
        """Whether the receiver does not have everything yet."""
        return self.since > 0

    @property
    def key(self) -> str:
        """Unique key among a receiver's entries."""
        name = self.problem_id or self.alert
        return f"{self.run_id}/{name}" if self.run_id else name

    @property
    def firing(self) -> bool:
        """Whether any of its cases fires, as far as the receiver knows or is to know."""
        firing = [case for case in self.cases.values() if case.state == "firing"]
        return any(not case.silenced or self.may_be_told(case.id) for case in firing)

    @property
    def muted(self) -> bool:
        """Whether it fires by silenced cases alone. An end that was sent now would be taken for that of all."""
        return self.firing and not any(case.state == "firing" for case in self._list_heard())

    def fires(self, identity: str) -> bool:
        """Whether a case fires, as far as the receiver knows or is to know."""
        return identity in self.cases and self.cases[identity].state == "firing"

    def may_be_told(self, identity: str) -> bool:
        """Whether the receiver got a case, or it is being sent."""
        return identity in self.told or identity in self.sending

    def knows(self, case: Case) -> bool:
        """Whether the case is or was one of its cases; by now it may belong to another problem."""
        return bool(self.problem_id or self.alert == case.alert) and (case.id in self.cases or case.id in self.told)

    @property
    def finished(self) -> bool:
        """Whether it is about a problem that is over and the receiver knows it: nothing more will be sent."""
        return bool(self.problem_id) and not (self.cases or self.pending or self.lost)

    def is_over(self, now: float) -> bool:
        """Whether it has been finished for so long that it need not be kept for an end that comes again."""
        return self.finished and now - self.sent >= HANDED_OVER_SECONDS

    def put(self, case: Case, now: float, grouping: Grouping) -> None:
        """Take the case as it is now, to be sent."""
        if handed_over := self._is_handed_over(case, now):
            fired = msgspec.structs.replace(case, state="firing", resolved_step=None, resolved_time=None, leaves="")
            self._take(fired, now, grouping)
        waits = not self.attempts and now <= self.due  # up to `interval`, if a message was sent a short time before
        soon = handed_over or case.id in self.ends or waits or now <= self.since + UNHEARD_SECONDS
        if self.pending and soon and self._fired_unheard(case):
            self.ends[case.id] = msgspec.structs.replace(case)
        else:
            self._take(case, now, grouping)

    def _take(self, case: Case, now: float, grouping: Grouping) -> None:
        """Take the case to be sent in just this state."""
        fires = case.state == "firing"
        self.ends.pop(case.id, None)
        if case.silenced and not fires and case.id in self.cases and not self.may_be_told(case.id):
            self._drop_untold(case.id, now, grouping)
            return
        known = self.cases.get(case.id)
        if case.silenced and fires and case.id in self.told:  # until its silence ends it stays as the receiver got it
            self.cases[case.id] = msgspec.structs.replace(known or case, silenced=case.silenced)
            return
        if known is not None and known.level > case.level:  # a new coordinator may lack the node's case that was worse
            case = msgspec.structs.replace(case, severity=known.severity)
        rises = known is not None and known.level < case.level
        is_heard_again = known is not None and fires and bool(known.silenced) and not case.silenced
        is_new = known is None and case.id not in self.told
        was_quiet = case.id in self.quiet
        escalates = (is_new or is_heard_again or (rises and fires)) and self._weigh(case)
        if known is not None and rises and self.may_be_told(case.id):
            self.outgrown[case.id] = Outgrown(known.severity, was_quiet, now)
        if self.told.get(case.id) == digest(case) and (not is_heard_again or case.id in self.quiet):
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
        """Whether a critical case is over before the receiver got it as firing. A case that a rollback undid is sent
        only as that, and wakes no one."""
        known = self.cases.get(case.id)
        waits = known is not None and known.state == "firing" and not known.silenced and case.id not in self.told
        return waits and case.state == "resolved" and case.severity == "critical"

    def _is_handed_over(self, case: Case, now: float) -> bool:
        """Whether a critical case fired a short time ago, ended soon after, and nothing of it came here before."""
        is_new = case.id not in self.cases and case.id not in self.told and not case.silenced
        if not is_new or case.state != "resolved" or case.severity != "critical" or case.resolved_time is None:
            return False
        return case.resolved_time - case.time <= UNHEARD_SECONDS and abs(now - case.time) <= HANDED_OVER_SECONDS

    def _weigh(self, case: Case) -> bool:
        """Return whether a receiver that knows the problem must get this case, which is new, more severe than before or
        no longer silenced, as something new: what it knows is less severe, or silenced by now. Another new case is
        noted as quiet."""
        own = [known for known in self.cases.values() if known.problem_id == self.problem_id]
        told = [] if self.muted else [known.level for known in own if known.id not in self.quiet and not known.silenced]
        rises = case.id in self.cases
        if not rises and not (self.problem_id and self.cases):
            return False
        if told and max(told) >= case.level:
            self.quiet = self.quiet if rises else [*self.quiet, case.id][-TOLD:]
            return False
        self.quiet = [identity for identity in self.quiet if identity != case.id]
        return self.sent > 0

    def _is_louder(self, case: Case, level: int) -> bool:
        """Whether a case is more severe than what was sent; `level`: the most severe of that."""
        is_new = bool(self.problem_id) and case.id not in self.told
        return case.state == "firing" and case.id not in self.quiet and (is_new or case.level > level)

    def _is_news(self, case: Case) -> bool:
        """Whether a change of this case is worth a message. A consequence's is if the message edits the former one, so
        that no second notification results, or if the whole problem has ended."""
        if self.muted:
            return False
        return self.edits or not self.firing or (case.state == "firing" and case.id not in self.quiet)

    def _has_news(self) -> bool:
        return any(self._is_news(case) for case in self.list_news() if self.told.get(case.id) != digest(case))

    def move(self, case: Case, now: float, grouping: Grouping) -> None:
        """Take the case as it is now; from now on the receiver gets it from elsewhere. It is dropped if nothing of it
        was sent from here."""
        if self.may_be_told(case.id) or case.id not in self.cases:
            self._take(case, now, grouping)
            return
        self._drop_untold(case.id, now, grouping)

    def separate(self, case: Case, now: float, grouping: Grouping) -> None:
        """End a case here that turned out to belong to another problem: what was sent of it must end."""
        if self.fires(case.id):
            known = self.cases[case.id]
            done = (*known.done, f"over here: it belongs to problem {case.problem_id}")
            over = {"state": "resolved", "problem_id": case.problem_id, "resolved_time": now, "done": done}
            self.move(msgspec.structs.replace(known, **over), now, grouping)

    def _drop_untold(self, identity: str, now: float, grouping: Grouping) -> None:
        self.cases.pop(identity, None)
        self.ends.pop(identity, None)
        if self.pending and not self._has_news():
            self.escalated = False
            self.rest(now, grouping)

    def list_news(self) -> list[Case]:
        """Return the cases to send now. Empty: all that fire are silenced."""
        return [] if self.muted else self._list_heard()

    def _list_heard(self) -> list[Case]:
        silenced = (case for case in self.cases.values() if case.silenced and case.state == "firing")
        muted = {case.id for case in silenced if not (self.tracks and self.may_be_told(case.id))}
        return [case for case in self.cases.values() if case.id not in muted]

    def urgency(self) -> int:
        """Return the level of the most severe case to send; 0: there is none."""
        return max((case.level for case in self.list_news()), default=0)

    def list_unchanged(self) -> list[str]:
        """Return the ids of the cases to send that were sent before in the same state."""
        return [case.id for case in self.list_news() if self.told.get(case.id) == digest(case)]

    def repeats(self) -> bool:
        """Whether all cases to send were sent before in the same state."""
        return len(self.list_unchanged()) == len(self.list_news())

    def hurry(self, now: float) -> None:
        """Send at once what waits for further changes, as the run is over. What failed keeps its pause."""
        if self.pending and not self.attempts:
            self.due = now

    def rest(self, now: float, grouping: Grouping) -> None:
        """Note that there is nothing to send until the next repetition."""
        self.since, self.attempts, self.held = 0.0, 0, False
        self.due = now + grouping.repeat if self.cases else math.inf

    def record_delivery(self, cases: list[Case], now: float, grouping: Grouping, reference: str = "") -> None:
        """Note the delivery of these cases, in their state when the attempt began."""
        self.sending = []
        for case in cases:
            self.told.pop(case.id, None)  # so that those that go on are the last to be forgotten
            self.told[case.id] = digest(case)
            known = self.cases.get(case.id)
            ended = known is not None and known.state != "firing" and digest(known) == self.told[case.id]
            if ended and not (self.problem_id and self.firing):
                del self.cases[case.id]
        while len(self.told) > TOLD:
            del self.told[next(iter(self.told))]
        self.sent, self.trouble, self.reference = now, "", reference
        self.rest(now, grouping)
        self.outgrown = {identity: one for identity, one in self.outgrown.items() if identity in self.cases}
        level = max((case.level for case in cases), default=0)
        self.escalated = any(self._is_louder(case, level) for case in self.list_news())
        if self.escalated:
            self._change(now, now + grouping.wait)
        elif self._has_news():
            self._change(now, now + grouping.interval)
        for identity in [one for one in self.ends if one in self.told or not self.pending]:
            self.put(self.ends.pop(identity), now, grouping)

    def record_failure(self, delivery: Delivery, now: float, grouping: Grouping) -> bool:
        """Note a failed attempt. Returns whether there will be another; otherwise the message was given up."""
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
        """Correct the times as another daemon goes on with it, maybe with a clock that was set back: no time lies
        further ahead than intended."""
        self.sent, self.since = min(self.sent, now), min(self.since, now)
        longest = LONGEST_PAUSE if self.pending else grouping.repeat
        self.due = min(self.due, now + longest) if self.cases or self.pending else math.inf

    def add_former(self, former: Entry) -> None:
        """Add what an earlier daemon had sent, or still had to send. Of a case that both know, this entry is right."""
        gone = self.told.keys() - self.cases.keys()  # what ended here: the former one may have it as firing
        self.cases = {one: case for one, case in former.cases.items() if one not in gone} | self.cases
        self.ends = {one: case for one, case in former.ends.items() if one not in self.told} | self.ends
        self.told = former.told | self.told
        self.sending = [*former.sending, *self.sending]
        self.quiet = [*former.quiet, *self.quiet][-TOLD:]
        self.outgrown = former.outgrown | self.outgrown
        self.escalated = self.escalated or former.escalated
        self.due = min(self.due, former.due)
        self.since = min(self.since or math.inf, former.since or math.inf) if self.pending or former.pending else 0.0
        self.sent = max(self.sent, former.sent)
        self.lost = self.lost or former.lost
        self.reference = self.reference or former.reference

    def _change(self, now: float, due: float) -> None:
        self.since, self.due, self.attempts = now, due, 0


def digest(case: Case) -> str:
    """Return a hash that is equal for cases that say the same to people: by state, severity, members, actions and
    parent."""
    members = sorted((member.scope, member.name) for member in case.members)
    said: tuple[object, ...] = (case.state, case.severity, members, case.done)
    said += (case.parent,) if case.parent else ()
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=8).hexdigest()


def pause(attempts: int) -> float:
    """Return the seconds until the next attempt after so many failed ones, with the jitter."""
    longest = min(FIRST_PAUSE * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)
