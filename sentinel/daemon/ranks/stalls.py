"""Reads the ranks' heartbeats and asks stalled ones for stacks; also sees ranks whose collectives differ or that died.

The rules get what it sees as signals of each rank, sampled by the daemon's clock: `stalled_seconds`,
`stall_limit_seconds`, `collectives_differ` and `rank_lost`.
"""

from __future__ import annotations

import math
import signal
import time

from sentinel.actions import CaseRecords
from sentinel.actions.collectives import Collectives
from sentinel.actions.stacks import StacksAction
from sentinel.daemon.ranks.exit_status import ExitStatuses, has_ended
from sentinel.daemon.ranks.heartbeats import RankHeartbeat
from sentinel.diagnose.standstill.collectives import find_desync
from sentinel.engine import Entity, Observation
from sentinel.runs import Attempt, Rank, RankLink
from sentinel.wire.flight_recorder import Flight
from sentinel.wire.heartbeat_page import Kind, Place, Stall

NOTICEABLE_SECONDS = 1.0
"""Longest stall that may be an ordinary step, in seconds. The rules get such stalls only every `ROUTINE_SECONDS`."""
ROUTINE_SECONDS = 10.0
DUMP_SECONDS = 5.0
DUMP_FACTOR = 3.0
"""The stacks are taken, once, in a stall that exceeds `DUMP_SECONDS` and this many times the longest gap so far. A
signal interrupts calls that wait in C, so it is not sent lightly."""
COMPARE_SECONDS = 10.0
"""Seconds between two comparisons of the ranks' collectives while all is well; one takes 0.2 to 2 ms of each sender. It
comes sooner if a rank stands still for longer than ever before."""
STANDSTILL_SECONDS = 60.0
STANDSTILL_FACTOR = 10.0
"""A rank that stands in one place for longer than both `STANDSTILL_SECONDS` and this many times the longest gap of its
loop is reported as standing still: long before a single process counts as hung, which may take half an hour."""
SURVEY_SECONDS = 5.0
"""Seconds for which the answers to `sentinel hang` are kept."""
ENDING_SECONDS = 1.5
"""Seconds after the last message of an ended process to learn how it ended: its connection ends first."""
WANTED_SECONDS = 60.0
"""Seconds after a signal that ends the job in which a process that ends, in any way, is not lost: launchers and
schedulers kill after 30 s the processes that are still there."""
REQUEST_SECONDS = 30.0
"""Most seconds from the first to the last rank's end in a job asked to end: launchers kill those still there."""
RELAY_SECONDS = 5.0
"""Most seconds between a rank's goodbye and the first death by a signal in a job asked to end. Launchers signal all
ranks at once, torchrun within 0.1 s; a script's handler ends the step and says goodbye. A goodbye does not say whether
the rank was asked to end, and a rank that saves for longer looks like one that has finished its work."""
_REQUESTS = (-signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a process ended by a signal that people and schedulers send on purpose. SIGHUP is not one: the
kernel sends it to the processes of a terminal or an ssh connection that breaks."""
_SLOW = (Kind.BUSY, Kind.STARTING)
"""Kinds of stalls with a longer limit; ranks that wait for such a rank get the same limit."""


class StallDetector:
    """Finds which ranks of an attempt stand still, where, and which ended without a goodbye."""

    def __init__(self, attempt: Attempt, link: RankLink, incidents: CaseRecords) -> None:
        self._attempt, self._incidents = attempt, incidents
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._stalled: set[int] = set()
        self._undecided = False
        """Whether a rank stands still, and what it does is not known yet."""
        self._routine_at = 0.0
        self.stacks = StacksAction(attempt, link, incidents, self)
        self.collectives = Collectives(attempt, link, self)
        self._provided = False
        self._survey_until = self._compare_at = 0.0
        self._comparing = self._stands = False
        self._records: dict[int, Flight] = {}
        """Flight records that ranks sent since they were last asked for the comparison."""
        self._progress: dict[int, int] = {}
        """Progress of each rank at the last look."""
        self._differing: frozenset[int] | None = None
        """Ranks whose collectives differ; None: they have not been compared yet."""
        self._standing = False
        """Whether a standstill was reported, by a line or by an alert."""
        self._standstill: tuple[int, float] | None = None
        """The rank that stands longest, and since when, in monotonic seconds."""
        self._dead: set[int] = set()
        self._exit_statuses = ExitStatuses()
        self._wanted_at = -math.inf
        self._wanted: set[int] = set()
        """Ranks that ended as they were meant to."""
        self._request = 0
        """The signal by which the job ended, if it was asked to, until `take_request` returns it; 0: there is none."""
        self._excused: dict[int, float] = {}
        """When a rank last had a working rank to wait for, in monotonic seconds."""
        self.worked, self.patience = -math.inf, 0.0
        """When one of these ranks was last seen at work, in monotonic seconds; the longest limit of a slow one."""
        self._worked_elsewhere, self._patience_elsewhere = -math.inf, 0.0
        """`worked` and `patience` of the ranks of other nodes."""

    @property
    def restless(self) -> bool:
        """Whether a rank stands still, or stacks are awaited: the alert must come within a second of its time."""
        return bool(self._stalled) or self._undecided or self.stacks.waiting

    def add_rank(self, rank: Rank, descriptors: list[int]) -> None:
        """Watch a rank that said hello and handed over these descriptors, which are ours now."""
        self.drop_rank(rank)
        identity = rank.identity
        self._dead.discard(identity.rank)
        self._exit_statuses.watch_process(rank.process)
        timeout = rank.hello.facts.get("collective_timeout_seconds", 0.0)
        self._heartbeats[identity.rank] = RankHeartbeat(
            descriptors,
            rank.process,
            alone=identity.world_size == 1,
            timeout=timeout if isinstance(timeout, int | float) else 0.0,
        )

    def note_work_elsewhere(self, moment: float, patience: float) -> None:
        """Take note of when a rank of another node was last seen at work, and of the longest limit of a slow one."""
        self._worked_elsewhere, self._patience_elsewhere = moment, patience

    def drop_rank(self, rank: Rank) -> Observation | None:
        """Forget a rank whose connection ended, and return an observation for the rules, if any.

        It says that a rank which stood still no longer stands, if it left by a goodbye other than an exception's. Any
        other rank that stood did so until its end.
        """
        number = rank.identity.rank
        self._records.pop(number, None)
        heartbeat = self._heartbeats.pop(number, None)
        rank.stall, rank.heartbeat, rank.standing = Stall(), None, False
        if heartbeat is not None:
            heartbeat.close()
        if number not in self._stalled:
            return None
        self._stalled.discard(number)
        has_gone_on = rank.goodbye is not None and rank.goodbye.reason != "exception"
        return self._observation([rank]) if has_gone_on else None

    def close(self) -> None:
        """Close all heartbeats: the attempt is over."""
        for heartbeat in self._heartbeats.values():
            heartbeat.close()
        self._heartbeats.clear()

    def tick(self, now: float) -> Observation | None:
        """Look at all ranks, and return an observation for the rules, if any."""
        told = []
        for rank in self._judge_ranks(now):
            number, stall = rank.identity.rank, rank.stall
            if stall.seconds > NOTICEABLE_SECONDS or number in self._stalled or now >= self._routine_at:
                told.append(rank)
            if stall.seconds > NOTICEABLE_SECONDS:
                self._stalled.add(number)
            else:
                self._stalled.discard(number)
        self._forget(now)
        self._provide(now)
        told += [rank for rank in self._compare_collectives(now) if rank not in told]
        if now >= self._routine_at:
            self._routine_at = now + ROUTINE_SECONDS
        return self._observation(told) if told else None

    def _compare_collectives(self, now: float) -> list[Rank]:
        """Return ranks that began to issue other collectives than the rest, or stopped doing so.

        Ranks are asked while all is well; once they stand, each new answer is compared.
        """
        live = [rank for rank in self._attempt.live if rank.identity.world_size > 1]
        if not live:
            return []
        if not self._provided and (now >= self._compare_at or self._began_to_stand(live)):
            self._compare_at = now + COMPARE_SECONDS
            self._records.clear()
            for rank in live:
                self.collectives.forget(rank)
                self.collectives.order(rank, now)
        if not self._comparing or len(self._records) < len(live):
            return []
        self._comparing = False
        found = find_desync(self._records, len(live))
        differing = frozenset(found.differing if found is not None else ())
        changed, self._differing = differing ^ (self._differing or frozenset()), differing
        for rank in live if changed else ():  # the case is made from these records, and the ranks may have gone on
            rank.flight = self._records[rank.identity.rank]
        return [rank for rank in live if rank.identity.rank in changed]

    def read_flight(self, number: int) -> None:
        """Take a rank's new flight record."""
        flight = self._attempt.ranks[number].flight
        assert flight is not None
        self._records[number], self._comparing = flight, True
        self._incidents.add_stacks()

    def _began_to_stand(self, live: list[Rank]) -> bool:
        stood, self._stands = self._stands, any(_unusual(rank, NOTICEABLE_SECONDS, 1.0) for rank in live)
        return self._stands and not stood

    def record_exit(self, process: int, status: int | None, now: float) -> list[Rank]:
        """Take note of a process that has just ended; its connection may last a little longer.

        Returns its ranks, except those that were detached before.
        """
        found = [rank for rank in self._attempt.ranks.values() if rank.process == process]
        for rank in found:
            if rank.state != "gone":
                rank.ending = self._exit_statuses.explain_ending(process, status, now)
        return [rank for rank in found if rank.goodbye is None or rank.goodbye.reason != "detach"]

    def take_deaths(self, now: float, *, last: bool = False) -> Observation | None:
        """Return an observation of ranks whose process has ended without a goodbye since the last call, if any.

        `last`: there is no further call, so that no death waits for others.
        """
        known = self._dead | self._wanted
        lost = (rank for number, rank in self._attempt.ranks.items() if rank.state == "lost" and number not in known)
        found = [rank for rank in lost if rank.ending or (now - rank.heard > ENDING_SECONDS and _has_ended(rank))]
        self._wanted.update(rank.identity.rank for rank in found if self._was_wanted(rank))
        found = [rank for rank in found if rank.identity.rank not in self._wanted]
        is_end = self._is_end_of_job(found, now)
        if is_end is None and not last:
            return None
        if is_end:
            self._request = _find_request(found[0])
            self._wanted.update(rank.identity.rank for rank in found)
            return None
        self._dead.update(rank.identity.rank for rank in found)
        # Only `rank_lost` is reported: a rank that stood still never went on.
        return self._observe({rank.identity.rank: {"rank_lost": 1.0} for rank in found}) if found else None

    def take_request(self) -> int:
        """Return the signal by which the whole job ended, once; 0: by none."""
        number, self._request = self._request, 0
        return number

    def _is_end_of_job(self, found: list[Rank], now: float) -> bool | None:
        """Whether these dead ranks are all that was left of a job that was asked to end; None: others may follow. A
        single rank that ends so leaves the others behind, and is lost."""
        if not found or self._dead or not all(map(_find_request, found)):
            return False
        ranks = self._attempt.ranks.values()
        ends = [rank.ending.time for rank in found if rank.ending is not None]
        rest = [rank for rank in ranks if rank not in found and not _left_with(rank, min(ends))]
        # Of a rank that left while another daemon served the run, the goodbye is not known, nor when it came.
        if len(ranks) < found[0].identity.world_size or any(rank.goodbye or rank.state == "gone" for rank in rest):
            return False
        if (now if rest else max(ends)) - min(ends) >= REQUEST_SECONDS:
            return False
        return None if rest else True

    def want_end(self, now: float) -> None:
        """Take note that a signal which ends the job is about to be sent."""
        self._wanted_at = now

    def _was_wanted(self, rank: Rank) -> bool:
        ending = rank.ending
        # If the end was not seen, it came at any time after the end of the connection.
        at = ending.time if ending is not None else max(rank.heard + ENDING_SECONDS, self._wanted_at)
        return 0.0 <= at - self._wanted_at < WANTED_SECONDS and not (ending is not None and ending.oom)

    def _judge_ranks(self, now: float) -> list[Rank]:
        """Judge the ranks, and return those that could be judged.

        A rank that waits for a working rank does not hang: rank 0 may evaluate while the others are in the next
        collective.
        """
        found = []
        self._undecided = False
        for number, heartbeat in self._heartbeats.items():
            rank = self._attempt.ranks[number]
            if (stall := heartbeat.look(now)) is None:
                self._undecided |= heartbeat.heartbeat is not None
            else:
                other = stall.kind != rank.stall.kind
                rank.stall, rank.heartbeat = stall, heartbeat.heartbeat
                found.append(rank)
                if other and stall.seconds > NOTICEABLE_SECONDS:
                    self._incidents.add_stacks()  # it seemed to compute, and is now known to hold the GIL
        working = sorted(((_find_last_work(rank, now), rank.identity.rank) for rank in found), reverse=True)[:2]
        self.worked = working[0][0] if working else -math.inf
        self.patience = max((rank.stall.limit for rank in found if rank.stall.kind in _SLOW), default=0.0)
        patience = max(self.patience, self._patience_elsewhere)
        for rank in found:
            number = rank.identity.rank
            excused = next((moment for moment, worker in working if worker != number), -math.inf)
            excused = max(excused, self._worked_elsewhere)
            self._excused[number] = max(self._excused.get(number, -math.inf), excused)
            seconds = min(rank.stall.seconds, now - self._excused[number])
            rank.stall = rank.stall._replace(seconds=seconds, limit=max(rank.stall.limit, patience))
            rank.standing = _unusual(rank, STANDSTILL_SECONDS, STANDSTILL_FACTOR)
        return found

    def take_standstill(self) -> Rank | None:
        """Return the rank to report if the run has begun to stand still, once per standstill; None if the alert is due.

        A rank that does something is preferred to those that may wait for it in a collective.
        """
        stands = any(rank.standing for rank in self._attempt.live)
        began, self._standing = stands and not self._standing, stands
        if not began:
            return None
        stopped = [rank for rank in self._attempt.live if rank.standing or rank.stall.seconds > NOTICEABLE_SECONDS]
        worst = max(stopped, key=lambda rank: (rank.stall.kind is not Kind.BLOCKED, rank.stall.seconds))
        return worst if not _is_late(worst) else None

    def take_past_standstill(self, now: float) -> tuple[int, float] | None:
        """Return (rank, seconds) of a standstill that has just ended: its ranks went on, or are gone."""
        stalls = {rank.identity.rank: rank.stall for rank in self._attempt.live if rank.standing or _is_late(rank)}
        if stalls:
            number = max(stalls, key=lambda number: stalls[number].seconds)
            began = now - stalls[number].seconds
            if self._standstill is None or began < self._standstill[1]:
                self._standstill = number, began
            return None
        past, self._standstill = self._standstill, None
        return (past[0], now - past[1]) if past is not None else None

    def survey(self, now: float) -> None:
        """Ask all ranks where they are, for `sentinel hang`."""
        self._survey_until, self._provided = now + SURVEY_SECONDS, True
        for rank in self._attempt.live:
            if rank.stall.quiet < NOTICEABLE_SECONDS:  # the dump of a rank that stands holds until a new one arrives
                rank.dump = ""
            self.stacks.order(rank, now)
            self.ask_collectives(rank, now)

    @property
    def surveyed(self) -> bool:
        """Whether all live ranks have said where they are, or will not answer."""
        return not any(self.stacks.waits_for(one) or self.collectives.waits_for(one) for one in self._attempt.live)

    def ask_collectives(self, rank: Rank, now: float) -> None:
        """Ask a rank for its collectives, unless it is the only rank."""
        if rank.identity.world_size > 1:
            self.collectives.order(rank, now)

    def _forget(self, now: float) -> None:
        """Forget what ranks said of a standstill from which they have gone on: it must not explain the next one."""
        for rank in self._attempt.live if now >= self._survey_until else ():
            number, progress = rank.identity.rank, rank.heartbeat.progress if rank.heartbeat is not None else 0
            if self._progress.get(number, 0) != progress:
                self._progress[number] = progress
                self.stacks.forget(rank)
                self.collectives.forget(rank)

    def _provide(self, now: float) -> None:
        """Fetch the stacks and collectives of all ranks before an alert fires: a rank that the others wait for may be
        at rest itself. Forget them when all go on."""
        unusual = any(map(_unusual, self._attempt.live))
        if now < self._survey_until and not unusual:
            return
        for rank in self._attempt.live if unusual or self._provided else ():
            if rank.stall.seconds < NOTICEABLE_SECONDS and (rank.stall.quiet < NOTICEABLE_SECONDS or not unusual):
                self.stacks.forget(rank)  # it has gone on, or to another place
                self.collectives.forget(rank)
            elif unusual:
                if not rank.dump:
                    self.stacks.order(rank, now)
                self.ask_collectives(rank, now)
        self._provided = unusual

    def find_dump_file(self, number: int) -> int:
        """Return the descriptor of the file that a rank's stacks are dumped into; -1 if there is none."""
        heartbeat = self._heartbeats.get(number)
        return heartbeat.stacks if heartbeat is not None else -1

    def _observation(self, ranks: list[Rank]) -> Observation:
        by_rank = {}
        for rank in ranks:
            number = rank.identity.rank
            by_rank[number] = {
                "stalled_seconds": rank.stall.seconds,
                "stall_limit_seconds": rank.stall.limit,
                "rank_lost": float(number in self._dead),
            }
            # Before the first comparison, an incident of a former daemon must not end for want of it.
            if self._differing is not None or rank.identity.world_size == 1:
                by_rank[number]["collectives_differ"] = float(number in (self._differing or ()))
        return self._observe(by_rank)

    def _observe(self, by_rank: dict[int, dict[str, float]]) -> Observation:
        values = {Entity("rank", str(number)): values for number, values in by_rank.items()}
        return Observation(seq=self._attempt.closed_to, time=time.time(), values=values)


def _find_request(rank: Rank) -> int:
    """Return the signal by which a dead rank was asked to end; 0: by none. Always 0 under `sentinel run`, which
    announces the signals that it passes on."""
    status = rank.ending.status if rank.ending is not None else None
    return -status if status in _REQUESTS and status is not None and not rank.hello.supervisor else 0


def _left_with(rank: Rank, first: float) -> bool:
    """Whether the rank said goodbye as others were asked to end, like a script that handles SIGTERM. `first`: when the
    first of them died, in monotonic seconds."""
    if rank.goodbye is None:
        return False
    apart = abs(rank.heard - first)  # its goodbye is what was heard of it last
    if rank.goodbye.detail == "KeyboardInterrupt":  # this says that it was asked
        return apart < REQUEST_SECONDS
    return rank.goodbye.reason in ("exit", "stopped") and apart < RELAY_SECONDS


def _has_ended(rank: Rank) -> bool:
    return bool(rank.process) and has_ended(rank.process)


def _is_late(rank: Rank) -> bool:
    """Whether the rank stands for longer than its limit."""
    return rank.stall.seconds > rank.stall.limit


def _find_last_work(rank: Rank, now: float) -> float:
    """Return when the rank was last at work that the others wait for, in monotonic seconds; -inf: it is not."""
    beat = rank.heartbeat
    if beat is None or not beat.progress or beat.place == Place.LEFT:
        return -math.inf
    if beat.paused or rank.stall.kind in (Kind.MOVING, Kind.LONG):
        return now
    return now - rank.stall.quiet if rank.stall.quiet < NOTICEABLE_SECONDS else -math.inf


def _unusual(rank: Rank, least: float = DUMP_SECONDS, factor: float = DUMP_FACTOR) -> bool:
    longest = rank.heartbeat.longest if rank.heartbeat else 0.0
    return rank.stall.seconds > max(least, factor * longest)
