"""Decides on a rollback and leads the ranks through it: all at the same step, or none.

    request -> Prepare(at, to) to every rank -> all Prepared -> Commit -> every rank RolledBack -> done
                                             -> one refuses  -> Abort, once more with a larger margin
                                             -> time-out     -> the same, twice at most

A rank that promised stops at the exit of step `at` until the verdict, so no rank can run past the others: applying
"at step N" without the promises would have parted two ranks 100 times in 180 tries. One process is the case of one.

Which snapshot: the newest one that every rank holds and whose `margin` steps were healthy before the first sign. The
same fault again soon after a rollback goes further back, where there is an older one.

The budget is for one stretch of trouble, and then the run is stopped, in words. A stretch ends with `quiet` steps
without a first sign after a rollback: ten margins, and until each snapshot that is held was taken, and became good,
after it. What comes later is another fault, and there is nothing to go further back to. A rollback takes back fewer
steps than that, as a rule: a run with a bad batch now and then gets on, however many it meets.

Of several alerts the first is rolled back for, and that ends the others. Where it fails, each of them that still fires
gets one attempt of its own, in turn: its first sign may lie elsewhere, and the ranks may come together by then.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt

PREPARE_SECONDS = 5.0
RESTORE_SECONDS = 120.0
"""A restore of a large state, and the step in flight before it."""
TRIES = 8
FRUITLESS = 2
"""Times more that a rollback is tried which not all ranks promised in time, or which was committed and not all came to:
a starved machine may stand for seconds. Each may cost the ranks a time-out."""
QUIET_MARGINS = 10
"""Healthy margins after a rollback that end a stretch of trouble: one makes a snapshot good."""
REACTION_SECONDS = 0.05
"""How far ahead `at` is set first: a command's way to a rank, with its next batch not yet here."""

WAITS = "a rollback is under way already"
"""What a case says whose turn has not come."""

Phase = Literal["idle", "preparing", "restoring"]


class Outcome(msgspec.Struct, frozen=True):
    """How a rollback ended."""

    ok: bool
    alert: str
    to: int = -1
    at: int = -1
    seconds: float = 0.0
    reason: str = ""
    """Why not; of one that is ok, what could not be done beside the restore."""
    sign: int = -1
    """The step that showed the fault first."""


class Saved(msgspec.Struct):
    """What a daemon that takes over has to know of the rollbacks of an attempt."""

    done: tuple[Outcome, ...] = ()
    bad: tuple[int, ...] = ()
    case: str = ""
    """Id of the case for which a restore was committed and is not over; empty: none."""
    to: int = -1
    at: int = -1
    id: int = 0
    ranks: tuple[int, ...] = ()


class _Course(msgspec.Struct):
    """One rollback under way."""

    case: Case
    to: int
    at: int
    id: int
    began: float
    ranks: frozenset[int]
    phase: Phase = "preparing"
    lead: int = 1
    tries: int = 1
    fruitless: int = 0
    """Times that not all promised in time, or that it was committed and nobody restored."""
    promised: set[int] = msgspec.field(default_factory=set)
    lost: list[int] = msgspec.field(default_factory=list)
    """Ranks whose connection ended, in that order."""
    restored: dict[int, wire.RolledBack] = msgspec.field(default_factory=dict)


def quiet(terms: wire.RollbackTerms) -> int:
    """Healthy steps after a rollback that end a stretch of trouble."""
    return max(QUIET_MARGINS * terms.margin, terms.keep * terms.every + terms.margin)


class RollbackAction:
    """The action `rollback` of one attempt."""

    name = "rollback"

    def __init__(
        self,
        attempt: Attempt,
        send: Callable[[int, wire.Message], None],
        ended: Callable[[Case, Outcome], None],
        preserve: Callable[[], None] = lambda: None,
        changed: Callable[[Case], None] = lambda case: None,
    ) -> None:
        """`preserve` makes what `saved` gives last: a commit that is sent must be known to whoever comes after us.
        `changed`: told of a case whose turn has come, or whose run was stopped."""
        self._attempt, self._send, self._ended, self._preserve = attempt, send, ended, preserve
        self._changed = changed
        self._course: _Course | None = None
        # From anywhere: an answer to a daemon that is no more must not be taken for one to us.
        self._ids = itertools.count(1 + secrets.randbelow(1 << 30))
        self._done: list[Outcome] = []
        self._bad: set[int] = set()
        self._waiting: list[Case] = []

    @property
    def phase(self) -> Phase:
        """Where the rollback under way is."""
        return self._course.phase if self._course else "idle"

    @property
    def done(self) -> tuple[Outcome, ...]:
        """The rollbacks of this attempt so far, all of them successful."""
        return tuple(self._done)

    def fired(self, case: Case, now: float) -> None:
        """Start a rollback, unless one is under way, none is armed, or nothing good is held."""
        terms = self.terms
        case.done = tuple(one for one in case.done if one != WAITS)
        if terms is None:
            return
        if self._course is not None:
            case.done += (WAITS,)
            self._waiting.append(case)
            return
        counted = self._counted(case.first_seq, terms)
        if len(counted) >= terms.budget:
            self._stop(case, self._spent(case, counted, terms))
            return
        if not self._attempt.complete:
            case.done += ("not rolled back: not every rank of the run is connected",)
            return
        to = self._target(case, terms)
        if to is None:
            held = ", ".join(str(seq + self._attempt.step_offset) for seq in sorted(self._attempt.held)) or "none"
            stage = self._attempt.stages[-1:]
            since = f"; none is gone back to from before stage {stage[0].name!r}" if stage else ""
            case.done += (
                f"not rolled back: no snapshot is {terms.margin} steps older than the first sign (held: {held}){since}",
            )
            return
        self._begin(case, to, now)

    def prepared(self, rank: int, answer: wire.Prepared, now: float) -> None:
        """A rank promised, or cannot."""
        course = self._course
        if course is None or course.phase != "preparing" or answer.id != course.id:
            return
        if not answer.ok:
            self._again(answer, now)
            return
        course.promised.add(rank)
        if course.promised == course.ranks:
            course.phase, course.began = "restoring", now
            self._preserve()
            self._all(self._verdict(course))

    def rolled_back(self, rank: int, answer: wire.RolledBack, now: float) -> None:
        """A rank restored its snapshot, or could not."""
        course = self._course
        if course is None or answer.id != course.id:
            return
        course.restored[rank] = answer
        if not course.restored.keys() >= course.ranks:
            return
        failed = [(number, result.reason) for number, result in course.restored.items() if not result.ok]
        if not failed:
            alert, sign = course.case.alert, course.case.first_seq
            self._finish(Outcome(True, alert, course.to, answer.at, answer.seconds, answer.reason, sign), now)
        elif len(failed) == len(course.restored) and not any(r.touched for r in course.restored.values()):
            self._nobody(course, now)
        else:
            case = course.case
            self._course = None
            self._stop(case, f"rank {failed[0][0]} is not in the state that was agreed on: {failed[0][1]}")
            self._changed(case)
            self._preserve()

    def _nobody(self, course: _Course, now: float) -> None:
        """Nobody restored, and nobody touched anything: an older snapshot, or the same once more."""
        results = course.restored.items()
        flaw = next((f"rank {rank}: {result.reason}" for rank, result in results if result.flawed), "")
        why = flaw or next((result.reason for _, result in results), "")
        if flaw:
            self._bad.add(course.to)
            self._older(course.case, flaw if len(course.ranks) > 1 else flaw.partition(": ")[2], now)
        elif course.fruitless >= FRUITLESS:
            self._give_up(why, now)
        else:
            course.fruitless += 1
            course.phase = "preparing"
            at = max(result.at for _, result in results)
            course.restored.clear()
            self._again(wire.Prepared(id=course.id, ok=False, seq=at), now)

    def saved(self) -> Saved:
        """For whoever comes after us. A promise without a verdict is not in it: it is aborted, and asked for again."""
        saved, course = Saved(self.done, tuple(self._bad)), self._course
        if course is not None and course.phase == "restoring":
            saved.case, saved.to, saved.at, saved.id = course.case.id, course.to, course.at, course.id
            saved.ranks = tuple(course.ranks)
        return saved

    def resume(self, saved: Saved, cases: Mapping[str, Case], now: float) -> None:
        """Go on from what `saved` gave."""
        self._done, self._bad = list(saved.done), set(saved.bad)
        if (case := cases.get(saved.case)) is not None:
            ranks = frozenset(saved.ranks)
            self._course = _Course(case, saved.to, saved.at, saved.id, began=now, ranks=ranks, phase="restoring")

    def returned(self, rank: int, promise: int) -> None:
        """A rank says hello again, and which verdict it waits for: it may have missed it."""
        course = self._course
        if course is not None and course.phase == "restoring" and promise == course.id:
            self._send(rank, self._verdict(course))
        elif promise and (course is None or promise != course.id):
            self._send(rank, wire.Abort(id=promise, reason="the daemon was restarted"))

    def staged(self, now: float) -> None:
        """Another stage was announced: what would go back across it and is not committed ends."""
        course = self._course
        if course is not None and course.phase == "preparing" and course.to < self._attempt.stage_seq:
            self._all(wire.Abort(id=course.id, reason="another stage began"))
            self._give_up("another stage began in the middle of it", now)

    def lost(self, rank: int, now: float) -> None:
        """A rank left: what is not committed ends, and ranks that wait for a verdict get one. After the commit they
        decide among themselves, and one whose connection broke comes back to say how."""
        course = self._course
        if course is None or rank not in course.ranks:
            return
        course.lost.append(rank)
        if course.phase == "preparing":
            self._left(course, rank, now)
        else:
            self._ended_by(course, now)

    def _ended_by(self, course: _Course, now: float) -> bool:
        """End it if a rank is over; answer whether one is. Of several the first that left is named: the others may have
        ended for want of it. How it ended may be known at the next tick alone."""
        for rank in (*course.lost, *sorted(course.ranks)):
            known = self._attempt.ranks.get(rank)
            if self._is_over(rank):
                self._left(course, rank, now)
                return True
            if known is not None and known.state == "lost":
                return False
        return False

    def _is_over(self, rank: int) -> bool:
        known = self._attempt.ranks.get(rank)
        return known is None or known.state == "gone" or known.ending is not None

    def _left(self, course: _Course, rank: int, now: float) -> None:
        self._all(wire.Abort(id=course.id, reason=f"rank {rank} is gone"))
        self._give_up(f"rank {rank} left in the middle of it", now)

    def tick(self, now: float) -> None:
        """End what takes too long."""
        course = self._course
        if course is None:
            return
        limit, taken = PREPARE_SECONDS + 4 * self._attempt.step_seconds() * course.lead, now - course.began
        if course.phase == "preparing" and taken > limit:
            self._silent(course, limit, now)
        elif not self._ended_by(course, now) and course.phase == "restoring" and taken > RESTORE_SECONDS + limit:
            self._give_up(f"no word of the restore in {RESTORE_SECONDS + limit:.0f} s", now)

    def _silent(self, course: _Course, limit: float, now: float) -> None:
        """Not all promised in time: once more, or it is given up."""
        self._all(wire.Abort(id=course.id, reason="not all ranks answered"))
        silent = ", ".join(str(rank) for rank in sorted(course.ranks - course.promised))
        if course.fruitless < FRUITLESS:
            course.fruitless += 1
            self._anew(course, self._attempt.last_seq, now)
        else:
            self._give_up(f"no answer from rank {silent} in {limit:.0f} s", now)

    def _begin(self, case: Case, to: int, now: float) -> None:
        lead = 1 + math.ceil(REACTION_SECONDS / max(self._attempt.step_seconds(), 1e-4))
        ranks = frozenset(rank.identity.rank for rank in self._attempt.live)
        at = self._attempt.last_seq + lead
        self._course = _Course(case=case, to=to, at=at, id=next(self._ids), began=now, ranks=ranks, lead=lead)
        case.done += (f"rolling back to step {to + self._attempt.step_offset}",)
        self._all(wire.Prepare(id=self._course.id, at=at, to=to))

    def _verdict(self, course: _Course) -> wire.Commit:
        terms = self.terms
        assert terms is not None
        return wire.Commit(id=course.id, skip_batches=terms.skip_batches, lr_factor=terms.lr_factor)

    def _again(self, refusal: wire.Prepared, now: float) -> None:
        """Abort this try. A rank that was past the step already says where it is: aim further ahead of it."""
        course = self._course
        assert course is not None
        self._all(wire.Abort(id=course.id, reason="a rank could not promise"))
        if refusal.reason or course.tries >= TRIES:
            self._give_up(refusal.reason or f"the ranks could not meet at one step in {TRIES} tries", now)
            return
        course.lead *= 2
        course.tries += 1
        self._anew(course, max(refusal.seq, self._attempt.last_seq), now)

    def _anew(self, course: _Course, seq: int, now: float) -> None:
        """Ask for the promise once more, `lead` steps ahead of `seq`."""
        course.id, course.began, course.at = next(self._ids), now, seq + course.lead
        course.promised.clear()
        self._all(wire.Prepare(id=course.id, at=course.at, to=course.to))

    def _older(self, case: Case, flaw: str, now: float) -> None:
        """The snapshot could not be restored: the next older one, or none."""
        assert self._course is not None
        refused, terms = self._course.to, self.terms
        older = self._target(case, terms) if terms else None
        if older is None:
            self._give_up(f"snapshot {refused + self._attempt.step_offset} cannot be restored: {flaw}", now)
            return
        case.done = case.done[:-1]
        self._begin(case, older, now)

    def _target(self, case: Case, terms: wire.RollbackTerms) -> int | None:
        first_sign = case.first_seq
        held = {seq for seq in self._attempt.held - self._bad if seq >= self._attempt.stage_seq}
        good = [seq for seq in held if seq + terms.margin <= first_sign]
        last = self._done[-1] if self._done else None
        if last is not None and first_sign <= last.at + terms.margin:
            # What it went back to has no healthy margin behind it since: the steps after `to` are undone.
            older = [seq for seq in held if seq < last.to]
            good = older or [seq for seq in held if seq == last.to]
        return max(good, default=None)

    def _counted(self, sign: int, terms: wire.RollbackTerms) -> list[Outcome]:
        """The rollbacks of the stretch of trouble that goes on with this first sign, the first one first."""
        counted: list[Outcome] = []
        for outcome in reversed(self._done):
            if sign - outcome.at > quiet(terms):
                break
            counted.insert(0, outcome)
            sign = outcome.sign if outcome.sign >= 0 else outcome.at
        return counted

    def _spent(self, case: Case, counted: list[Outcome], terms: wire.RollbackTerms) -> str:
        offset = self._attempt.step_offset
        which = ", ".join(f"{one.alert} from step {one.at + offset} to {one.to + offset}" for one in counted)
        counts = f": {which}; a rollback counts until {quiet(terms)} healthy steps have followed" if counted else ""
        return f"{case.alert} again after {len(counted)} rollback(s), which is the budget{counts}"

    @property
    def terms(self) -> wire.RollbackTerms | None:
        """What the user armed; None where not every rank did."""
        armed = [rank.hello.rollback for rank in self._attempt.live]
        return armed[0] if armed and all(terms is not None for terms in armed) else None

    def _all(self, message: wire.Message) -> None:
        for rank in self._attempt.live:
            self._send(rank.identity.rank, message)

    def _finish(self, outcome: Outcome, now: float) -> None:
        assert self._course is not None
        case, self._course = self._course.case, None
        offset = self._attempt.step_offset
        if outcome.ok:
            self._done.append(outcome)
            done = f"rolled back to step {outcome.to + offset} at the exit of step {outcome.at + offset}"
            done += f" ({outcome.reason})" if outcome.reason else ""
        else:
            done = f"not rolled back: {outcome.reason}"
        case.done = (*case.done[:-1], done)
        waiting, self._waiting = self._waiting, []
        for other in waiting:
            if other.state == "firing" and not outcome.ok:
                self.fired(other, now)  # who is not the first waits again
                self._changed(other)
        self._ended(case, outcome)

    def _give_up(self, reason: str, now: float) -> None:
        assert self._course is not None
        self._finish(Outcome(False, self._course.case.alert, self._course.to, reason=reason), now)

    def _stop(self, case: Case, reason: str) -> None:
        case.done += (f"the run is stopped: {reason}",)
        self._all(wire.Stop(reason=f"{reason}. What was seen: {case.summary}"))
