"""Decides on a rollback and leads the ranks through it: all at the same step, or none.

    request -> Prepare(at, to) to every rank -> all Prepared -> Commit -> every rank RolledBack -> done
                                             -> one refuses  -> Abort, once more with a larger margin
                                             -> time-out     -> the same, twice at most

A rank that promised stops at the exit of step `at` until the verdict, so no rank can run past the others: applying
"at step N" without the promises would have separated two ranks 100 times in 180 tries. One process is the same, with
one rank.

The newest good snapshot is restored. A snapshot is good if every rank holds it, if it was not taken while another alert
that asks for a rollback was open, and if the run was healthy for `margin` steps after it: no first sign of any such
alert lies in them. If the same fault comes again soon after a rollback, an older snapshot is restored, if there is one.

The budget is for one stretch of trouble; when it is used up, the run is stopped, with the reason. A stretch ends with
`quiet` steps without a first sign after a rollback: ten margins, and long enough that each snapshot held was taken, and
became good, after it. A later fault is another one, and there is nothing older to restore. A rollback usually undoes
fewer steps than that: a run with a bad batch now and then makes progress, however many it meets.

A stop works in the same way: `to` is no snapshot, all ranks leave at the exit of step `at`, and they answer that all
agreed to. It waits for a rollback under way (`stop.py`).

Of several alerts, the ranks roll back for the first, and that ends the others. If it fails, each of the others that
still fires gets one try of its own, in turn: its first sign may lie elsewhere, and the ranks may agree by then.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping
from typing import Protocol

from sentinel import wire
from sentinel.actions import RollbackCases
from sentinel.actions.held_snapshots import HeldSnapshots, RollbackRanks
from sentinel.actions.rollback_state import Outcome, Phase, RollbackInProgress, SavedRollbacks
from sentinel.diagnose.case import Case
from sentinel.runs import RankLink
from sentinel.text import join_names, name_ranks

PREPARE_SECONDS = 5.0
RESTORE_SECONDS = 120.0
"""Seconds for the restore of a large state, and for the step in flight before it."""
TRIES = 8
FRUITLESS = 2
"""Most further tries of a rollback that not all ranks promised in time, or that was committed and no rank restored: a
starved machine may stand for seconds. Each try may cost the ranks a time-out."""
QUIET_MARGINS = 10
"""Healthy margins after a rollback that end a stretch of trouble. One margin makes a snapshot good."""
NO_SNAPSHOT = -1
SHOWN = 4
"""Most rollbacks that are named when the budget is used up."""
REACTION_SECONDS = 0.05
"""Seconds by which `at` is ahead at first: the time for a command to reach a rank whose next batch has not arrived."""

STOPS = "stopping all ranks"
"""Note in a case for which the ranks leave."""
WAITS = "a rollback or a stop is under way already"
"""Note in a case whose turn has not come."""


def quiet(terms: wire.RollbackTerms) -> int:
    """Return the number of healthy steps after a rollback that end a stretch of trouble."""
    return max(QUIET_MARGINS * terms.margin, terms.keep * terms.every + terms.margin)


def explain_stopped(reason: str) -> str:
    """Return the note in a case for which nothing can be done any more. `reason`: why all ranks left."""
    return f"nothing: all ranks have ended training, by {reason}"


class RollbackListener(Protocol):
    """Says what follows a rollback, and handles its end."""

    def will_stop(self, case: Case) -> bool:
        """Return whether the rule of a case has all ranks leave at one step if it is not rolled back."""

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        """Handle the end of the rollback for this case."""


class RollbackAction:
    """The action `rollback` of one attempt. It leads the ranks through a stop, too."""

    name = "rollback"

    def __init__(
        self, attempt: RollbackRanks, link: RankLink, incidents: RollbackCases, listener: RollbackListener
    ) -> None:
        self._attempt, self._link, self._incidents, self._listener = attempt, link, incidents, listener
        self._snapshots = HeldSnapshots(attempt, incidents)
        self._current: RollbackInProgress | None = None
        # Starts at a random number: an answer to a former daemon must not be taken for one to us.
        self._ids = itertools.count(1 + secrets.randbelow(1 << 30))
        self.agreed_stop_reason = ""
        """Why all ranks left the run; empty: they did not."""
        self._immediate_stop_reason = ""
        """Why the ranks were told to stop, each by itself. After that nothing else is asked of them."""
        self._done: list[Outcome] = []
        self._waiting: list[Case] = []

    @property
    def phase(self) -> Phase:
        """The phase of the rollback, or the stop, under way."""
        return self._current.phase if self._current else "idle"

    @property
    def terms(self) -> wire.RollbackTerms | None:
        """The terms of the armed rollback; None if not every rank armed it."""
        return self._snapshots.terms

    def list_good(self, closed: int) -> set[int]:
        """Return the snapshots that could be restored for a fault whose first sign comes after step `closed`."""
        return self._snapshots.list_good(closed)

    @property
    def case(self) -> Case | None:
        """The case for which a rollback is under way."""
        return self._current.case if self._current else None

    def handles(self, case: Case) -> bool:
        """Whether a rollback for this case is under way, or waits for its turn."""
        return self.case is case or any(one is case for one in self._waiting)

    @property
    def done(self) -> tuple[Outcome, ...]:
        """The rollbacks of this attempt so far, all of them successful."""
        return tuple(self._done)

    def act_on(self, case: Case, now: float) -> None:
        """Start a rollback, unless one is under way, none is armed, or no good snapshot is held."""
        terms = self.terms
        case.done = tuple(one for one in case.done if one != WAITS)
        if terms is None:
            return
        if self.agreed_stop_reason:
            case.done += (explain_stopped(self.agreed_stop_reason),)
            return
        if self._immediate_stop_reason:
            case.done += (f"the run is stopped: {self._immediate_stop_reason}",)
            return
        if self._current is not None:
            case.done += (WAITS,)
            self._waiting.append(case)
            return
        counted = self._list_counted(case.first_seq, terms)
        if len(counted) >= terms.budget:
            spent = self._explain_spent(case, counted, terms)
            if self._listener.will_stop(case):
                case.done += (f"not rolled back: {spent}",)
            else:
                self._order_immediate_stop(case, spent)
            return
        if absence := self._attempt.absence:
            case.done += (f"not rolled back: {absence}",)
            return
        to = self._target(case, terms)
        if to is None:
            held = ", ".join(str(seq + self._attempt.step_offset) for seq in sorted(self._attempt.held)) or "none"
            stage = self._attempt.stages[-1:]
            since = f"; none is gone back to from before stage {stage[0].name!r}" if stage else ""
            case.done += (
                f"not rolled back: no snapshot was followed by {terms.margin} healthy steps before the first sign "
                f"(held: {held}){since}",
            )
            return
        self._begin(case, to, now)

    def begin_agreed_stop(self, case: Case, now: float) -> None:
        """Have all ranks leave the run for this case. Nothing is under way."""
        if self.agreed_stop_reason:
            case.done += (explain_stopped(self.agreed_stop_reason),)
        elif self._immediate_stop_reason:
            case.done += (f"the run is stopped: {self._immediate_stop_reason}",)
        elif why := self._attempt.absence or self._find_unable():
            case.done += (f"not stopped: {why}",)
        else:
            self._begin(case, NO_SNAPSHOT, now, stops=True)

    def _find_unable(self) -> str:
        """Return which rank cannot leave at an agreed step, and why; empty: all can."""
        for rank in self._attempt.live:
            if not rank.hello.takes_stop:
                return (
                    f"rank {rank.identity.rank} cannot leave at an agreed step: its optimizer steps inside the "
                    f"backward pass, or its training-sentinel ({rank.hello.version}) is older than this action"
                )
        return ""

    def add_promise(self, rank: int, answer: wire.Prepared, now: float) -> None:
        """Take a rank's answer: it promised, or cannot."""
        current = self._current
        if current is None or current.phase != "preparing" or answer.id != current.id:
            return
        if not answer.ok:
            self._retry_after_refusal(answer, now)
            return
        current.promised.add(rank)
        if current.promised == current.ranks:
            current.phase, current.began = "restoring", now
            if current.stops:
                agreed = f"{STOPS} at step {current.at + self._attempt.step_offset}"
                current.case.done = (*current.case.done[:-1], agreed)
                self._incidents.record_change(current.case)
            self._incidents.preserve()  # a commit that is sent must be known to the next daemon
            self._broadcast(self._verdict(current))

    def add_restore_result(self, rank: int, answer: wire.RolledBack, now: float) -> None:
        """Take a rank's answer: it restored its snapshot, or could not."""
        current = self._current
        if current is None or answer.id != current.id:
            return
        current.restored[rank] = answer
        if not current.restored.keys() >= current.ranks:
            return
        failed = [(number, result.reason) for number, result in current.restored.items() if not result.ok]
        if not failed:
            alert, sign = current.case.alert, current.case.first_seq
            self._end(
                Outcome(True, alert, current.to, answer.at, answer.seconds, answer.reason, sign, current.stops), now
            )
        elif len(failed) == len(current.restored) and not any(r.touched for r in current.restored.values()):
            self._nobody_restored(current, now)
        else:
            case = current.case
            self._current = None
            self._order_immediate_stop(
                case, f"rank {failed[0][0]} is not in the state that was agreed on: {failed[0][1]}"
            )
            self._incidents.record_change(case)
            self._incidents.preserve()

    def _nobody_restored(self, current: RollbackInProgress, now: float) -> None:
        """Try an older snapshot, or the same once more: no rank restored, and none changed anything."""
        results = current.restored.items()
        flaw = next((f"rank {rank}: {result.reason}" for rank, result in results if result.flawed), "")
        why = flaw or next((result.reason for _, result in results), "")
        if flaw:
            self._snapshots.bad.add(current.to)
            self._try_older_snapshot(current.case, flaw if len(current.ranks) > 1 else flaw.partition(": ")[2], now)
        elif current.fruitless >= FRUITLESS:
            self._give_up(why, now)
        else:
            current.fruitless += 1
            current.phase = "preparing"
            at = max(result.at for _, result in results)
            current.restored.clear()
            self._retry_after_refusal(wire.Prepared(id=current.id, ok=False, seq=at), now)

    def save_state(self) -> SavedRollbacks:
        """Return the state for the run's next daemon. Promises without a verdict are left out, and requested again."""
        saved, current = SavedRollbacks(self.done, tuple(self._snapshots.bad)), self._current
        if current is not None and current.phase == "restoring":
            saved.case, saved.to, saved.at, saved.id = current.case.id, current.to, current.at, current.id
            saved.ranks, saved.stops = tuple(current.ranks), current.stops
        return saved

    def resume(self, saved: SavedRollbacks, cases: Mapping[str, Case], now: float) -> None:
        """Continue from a state that `save_state` returned."""
        self._done, self._snapshots.bad = list(saved.done), set(saved.bad)
        if (case := cases.get(saved.case)) is not None:
            ranks = frozenset(saved.ranks)
            self._current = RollbackInProgress(
                case, saved.to, saved.at, saved.id, began=now, ranks=ranks, stops=saved.stops, phase="restoring"
            )

    def rejoin_rank(self, rank: int, promise: int) -> None:
        """Send a rank that says hello again the verdict that it waits for, and may have missed."""
        current = self._current
        if current is not None and current.phase == "restoring" and promise == current.id:
            self._link.send(rank, self._verdict(current))
        elif promise and (current is None or promise != current.id):
            self._link.send(rank, wire.Abort(id=promise, reason="the daemon was restarted"))

    def begin_stage(self, now: float) -> None:
        """Abort a rollback to before the stage that was just announced, unless it is committed."""
        current = self._current
        if current is None or current.stops:
            return
        if current.phase == "preparing" and current.to < self._attempt.stage_seq:
            self._broadcast(wire.Abort(id=current.id, reason="another stage began"))
            self._give_up("another stage began in the middle of it", now)

    def drop_rank(self, rank: int, now: float) -> None:
        """Handle a rank that left: abort a rollback that is not committed, so that waiting ranks get a verdict.

        After the commit the ranks decide among themselves, and one whose connection broke comes back to say how.
        """
        current = self._current
        if current is None or rank not in current.ranks:
            return
        current.lost.append(rank)
        if current.phase == "preparing":
            self._rank_left(current, rank, now)
        else:
            self._end_if_over(current, now)

    def _end_if_over(self, current: RollbackInProgress, now: float) -> bool:
        """Abort the rollback if one of its ranks has ended; return whether one has.

        Of several the first that left is named: the others may have ended because of it. How it ended may be known only
        at the next tick.
        """
        for rank in (*current.lost, *sorted(current.ranks)):
            if rank in current.restored and current.stops:
                continue  # the rank answered before it left
            known = self._attempt.ranks.get(rank)
            if self._is_over(rank):
                self._rank_left(current, rank, now)
                return True
            if known is not None and known.state == "lost":
                return False
        return False

    def _is_over(self, rank: int) -> bool:
        known = self._attempt.ranks.get(rank)
        return known is None or known.state == "gone" or known.ending is not None

    def _rank_left(self, current: RollbackInProgress, rank: int, now: float) -> None:
        self._broadcast(wire.Abort(id=current.id, reason=f"rank {rank} is gone"))
        self._give_up(f"rank {rank} left in the middle of it", now)

    def tick(self, now: float) -> None:
        """Abort or give up what takes too long."""
        current = self._current
        if current is None:
            return
        limit, taken = PREPARE_SECONDS + 4 * self._attempt.step_seconds() * current.lead, now - current.began
        if current.phase == "preparing" and taken > limit:
            self._prepare_timed_out(current, limit, now)
        elif not self._end_if_over(current, now) and current.phase == "restoring" and taken > RESTORE_SECONDS + limit:
            missed = "no word of the restore"
            if current.stops:
                missed = f"not all ranks came to step {current.at + self._attempt.step_offset}, where they still leave,"
            self._give_up(f"{missed} in {RESTORE_SECONDS + limit:.0f} s", now)

    def _prepare_timed_out(self, current: RollbackInProgress, limit: float, now: float) -> None:
        """Try once more, or give up, as not all ranks promised in time."""
        self._broadcast(wire.Abort(id=current.id, reason="not all ranks answered"))
        silent = name_ranks(sorted(current.ranks - current.promised))
        if current.fruitless < FRUITLESS:
            current.fruitless += 1
            self._prepare_again(current, self._attempt.last_seq, now)
        else:
            self._give_up(f"no answer from {silent} in {limit:.0f} s", now)

    def _begin(self, case: Case, to: int, now: float, *, stops: bool = False) -> None:
        lead = 1 + math.ceil(REACTION_SECONDS / max(self._attempt.step_seconds(), 1e-4))
        ranks = frozenset(rank.identity.rank for rank in self._attempt.live)
        at = self._attempt.last_seq + lead
        self._current = RollbackInProgress(
            case=case, to=to, at=at, id=next(self._ids), began=now, ranks=ranks, stops=stops, lead=lead
        )
        case.done += (self._name_aim(self._current),)
        self._broadcast(wire.Prepare(id=self._current.id, at=at, to=to, stops=stops))

    def _name_aim(self, current: RollbackInProgress) -> str:
        if current.stops:
            return STOPS  # a step is named once all ranks promised it: it may not be the first that is tried
        return f"rolling back to step {current.to + self._attempt.step_offset}"

    def _verdict(self, current: RollbackInProgress) -> wire.Commit:
        if current.stops:
            return wire.Commit(id=current.id, reason=_name_reason(current.case))
        terms = self.terms
        assert terms is not None
        return wire.Commit(id=current.id, skip_batches=terms.skip_batches, lr_factor=terms.lr_factor)

    def _retry_after_refusal(self, refusal: wire.Prepared, now: float) -> None:
        """Abort this try, and aim further ahead of a rank that was past the step already, and said where it is."""
        current = self._current
        assert current is not None
        self._broadcast(wire.Abort(id=current.id, reason="a rank could not promise"))
        if refusal.reason or current.tries >= TRIES:
            self._give_up(refusal.reason or f"the ranks could not meet at one step in {TRIES} tries", now)
            return
        current.lead *= 2
        current.tries += 1
        self._prepare_again(current, max(refusal.seq, self._attempt.last_seq), now)

    def _prepare_again(self, current: RollbackInProgress, seq: int, now: float) -> None:
        """Ask for the promise once more, `lead` steps ahead of `seq`."""
        current.id, current.began, current.at = next(self._ids), now, seq + current.lead
        current.promised.clear()
        current.case.done = (*current.case.done[:-1], self._name_aim(current))
        self._broadcast(wire.Prepare(id=current.id, at=current.at, to=current.to, stops=current.stops))

    def _try_older_snapshot(self, case: Case, flaw: str, now: float) -> None:
        """Try the next older snapshot, or give up if there is none: this one could not be restored."""
        assert self._current is not None
        refused, terms = self._current.to, self.terms
        older = self._target(case, terms) if terms else None
        if older is None:
            self._give_up(f"snapshot {refused + self._attempt.step_offset} cannot be restored: {flaw}", now)
            return
        case.done = case.done[:-1]
        self._begin(case, older, now)

    def _target(self, case: Case, terms: wire.RollbackTerms) -> int | None:
        first_sign = case.first_seq
        held = self._snapshots.list_sound(terms, besides=case)
        good = [seq for seq in held if seq + terms.margin <= first_sign]
        last = self._done[-1] if self._done else None
        if last is not None and first_sign <= last.at + terms.margin:
            # The snapshot of the last rollback has had no healthy margin since: the steps after `to` are undone.
            older = [seq for seq in held if seq < last.to]
            good = older or [seq for seq in held if seq == last.to]
        return max(good, default=None)

    def _list_counted(self, sign: int, terms: wire.RollbackTerms) -> list[Outcome]:
        """Return the rollbacks of the stretch of trouble to which this first sign belongs, the first one first."""
        counted: list[Outcome] = []
        for outcome in reversed(self._done):
            if sign - outcome.at > quiet(terms):
                break
            counted.insert(0, outcome)
            sign = outcome.sign if outcome.sign >= 0 else outcome.at
        return counted

    def _explain_spent(self, case: Case, counted: list[Outcome], terms: wire.RollbackTerms) -> str:
        offset = self._attempt.step_offset
        names = [f"{one.alert} from step {one.at + offset} to {one.to + offset}" for one in counted]
        which = join_names(names, SHOWN)
        counts = f": {which}; a rollback counts until {quiet(terms)} healthy steps have followed" if counted else ""
        return f"{case.alert} again after {len(counted)} rollback(s), which is the budget{counts}"

    def _broadcast(self, message: wire.Message) -> None:
        for rank in self._attempt.live:
            self._link.send(rank.identity.rank, message)

    def _end(self, outcome: Outcome, now: float) -> None:
        assert self._current is not None
        case, self._current = self._current.case, None
        offset = self._attempt.step_offset
        if outcome.ok and outcome.stops:
            self.agreed_stop_reason = _name_reason(case)
            done = f"stopped: all ranks ended training at the exit of step {outcome.at + offset}"
        elif outcome.ok:
            self._done.append(outcome)
            done = f"rolled back to step {outcome.to + offset} at the exit of step {outcome.at + offset}"
            done += f" ({outcome.reason})" if outcome.reason else ""
        else:
            done = f"not {'stopped' if outcome.stops else 'rolled back'}: {outcome.reason}"
        case.done = (*case.done[:-1], done)
        waiting, self._waiting = self._waiting, []
        for other in waiting:
            if other.state == "firing" and not (outcome.ok and not outcome.stops):  # otherwise it ended with this one
                self.act_on(other, now)  # all but the first wait again
                self._incidents.record_change(other)
        self._listener.end_rollback(case, outcome)

    def _give_up(self, reason: str, now: float) -> None:
        assert self._current is not None
        current = self._current
        self._end(Outcome(False, current.case.alert, current.to, reason=reason, stops=current.stops), now)

    def _order_immediate_stop(self, case: Case, reason: str) -> None:
        self._immediate_stop_reason = reason
        case.done += (f"the run is stopped: {reason}",)
        self._broadcast(wire.Stop(reason=f"{reason}. What was seen: {case.summary}"))


def _name_reason(case: Case) -> str:
    """Return why the run was stopped for a case."""
    return f"{case.alert}: {case.summary}"
