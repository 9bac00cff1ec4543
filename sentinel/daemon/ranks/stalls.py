"""Reads the ranks' heartbeats and asks stalled ones for stacks; also sees ranks whose collectives differ or that died.

What it sees goes to the rules as numbers of the clock: of each rank `stalled_seconds`, `stall_limit_seconds`,
`collectives_differ` and `rank_lost`.
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
"""Shorter stalls are steps. The rules are not troubled with them but every `ROUTINE_SECONDS`."""
ROUTINE_SECONDS = 10.0
DUMP_SECONDS = 5.0
DUMP_FACTOR = 3.0
"""A stall over `DUMP_SECONDS` and this many times the longest so far: the stacks are taken, once. A signal interrupts
what waits in C: it is not sent lightly."""
COMPARE_SECONDS = 10.0
"""Between two comparisons of the ranks' collectives while all is well: 0.2 to 2 ms of each sender. One of them comes
sooner, as soon as a rank stands still for longer than ever before."""
STANDSTILL_SECONDS = 60.0
STANDSTILL_FACTOR = 10.0
"""A rank that stands in one place for longer, and for so many times the longest gap that its loop has shown, is said to
stand still: long before a single process counts as hung, which may take half an hour."""
SURVEY_SECONDS = 5.0
"""How long the answers to `sentinel hang` are kept."""
ENDING_SECONDS = 1.5
"""After the last message of a rank whose process ended, to learn how it ended: its connection ends first."""
WANTED_SECONDS = 60.0
"""After a signal that ends the job, in which a process that ends is not lost, however it does: launchers and schedulers
kill after 30 s what has not gone by then."""
_REQUESTS = (-signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a process that ended by a signal which people and schedulers send on purpose. SIGHUP is none: the
kernel sends it to what a terminal or an ssh connection leaves behind when it breaks."""
_SLOW = (Kind.BUSY, Kind.STARTING)
"""Kinds of stalls that are granted longer; ranks that wait for such a rank are granted as much."""


class StallDetector:
    """Of one attempt's ranks: who stands still, where, and who is gone without a goodbye."""

    def __init__(self, attempt: Attempt, link: RankLink, incidents: CaseRecords) -> None:
        self._attempt, self._incidents = attempt, incidents
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._stalled: set[int] = set()
        self._undecided = False
        """A rank stands still, and what it does is not known yet."""
        self._routine_at = 0.0
        self.stacks = StacksAction(attempt, link, incidents, self)
        self.collectives = Collectives(attempt, link, self)
        self._provided = False
        self._survey_until = self._compare_at = 0.0
        self._comparing = self._stands = False
        self._records: dict[int, Flight] = {}
        """What ranks said since they were last asked to be compared."""
        self._progress: dict[int, int] = {}
        """How far each rank was when it was looked at last."""
        self._differing: frozenset[int] = frozenset()
        self._standing = False
        """A standstill was said, or an alert says it."""
        self._standstill: tuple[int, float] | None = None
        """The rank that stands longest, and since when, by the monotonic clock."""
        self._dead: set[int] = set()
        self._exit_statuses = ExitStatuses()
        self._wanted_at = -math.inf
        self._wanted: set[int] = set()
        """Ranks that ended as they were meant to."""
        self._excused: dict[int, float] = {}
        """When a rank last had another one to wait for."""
        self.worked, self.patience = -math.inf, 0.0
        """When one of these ranks was last seen at work; the limit of one that is granted longer."""
        self._worked_elsewhere, self._patience_elsewhere = -math.inf, 0.0
        """The same of the ranks of other nodes."""

    @property
    def restless(self) -> bool:
        """Whether a rank stands still, or stacks are waited for: the alert is to come within a second of its time."""
        return bool(self._stalled) or self._undecided or self.stacks.waiting

    def add_rank(self, rank: Rank, descriptors: list[int]) -> None:
        """A rank said hello, and handed these over. They are ours now."""
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
        """When a rank of another node was last seen at work, and the limit of one there that is granted longer."""
        self._worked_elsewhere, self._patience_elsewhere = moment, patience

    def drop_rank(self, rank: Rank) -> Observation | None:
        """A rank's connection ended. Of a rank that stood still, what the rules should know if it left by a goodbye
        other than an exception's: that it stands no more. Any other stood until its end."""
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
        """The attempt is over."""
        for heartbeat in self._heartbeats.values():
            heartbeat.close()
        self._heartbeats.clear()

    def tick(self, now: float) -> Observation | None:
        """What the rules should know of this moment, if anything."""
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
        """Ranks that began to issue other collectives than the rest, or do so no more. They are asked while all is
        well; once they stand, each new answer is looked at."""
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
        changed, self._differing = differing ^ self._differing, differing
        for rank in live if changed else ():  # the case is made of it, and they may have gone on
            rank.flight = self._records[rank.identity.rank]
        return [rank for rank in live if rank.identity.rank in changed]

    def read_flight(self, number: int) -> None:
        """A rank's collectives are others than before."""
        flight = self._attempt.ranks[number].flight
        assert flight is not None
        self._records[number], self._comparing = flight, True
        self._incidents.add_stacks()

    def _began_to_stand(self, live: list[Rank]) -> bool:
        stood, self._stands = self._stands, any(_unusual(rank, NOTICEABLE_SECONDS, 1.0) for rank in live)
        return self._stands and not stood

    def record_exit(self, process: int, status: int | None, now: float) -> list[Rank]:
        """A process has ended this very moment; its connection may last a little longer. Returns its ranks, but those
        that were detached before."""
        found = [rank for rank in self._attempt.ranks.values() if rank.process == process]
        for rank in found:
            if rank.state != "gone":
                rank.ending = self._exit_statuses.explain_ending(process, status, now)
        return [rank for rank in found if rank.goodbye is None or rank.goodbye.reason != "detach"]

    def take_deaths(self, now: float) -> Observation | None:
        """What the rules should know of ranks whose process has ended since the last time, and not by a goodbye."""
        known = self._dead | self._wanted
        lost = (rank for number, rank in self._attempt.ranks.items() if rank.state == "lost" and number not in known)
        found = [rank for rank in lost if rank.ending or (now - rank.heard > ENDING_SECONDS and _has_ended(rank))]
        self._wanted.update(rank.identity.rank for rank in found if self._was_wanted(rank))
        found = [rank for rank in found if rank.identity.rank not in self._wanted]
        self._dead.update(rank.identity.rank for rank in found)
        # No more than that: where one of them stood still, it never went on.
        return self._observe({rank.identity.rank: {"rank_lost": 1.0} for rank in found}) if found else None

    def want_end(self, now: float) -> None:
        """The job is about to be sent a signal that ends it."""
        self._wanted_at = now

    def _was_wanted(self, rank: Rank) -> bool:
        ending = rank.ending
        if ending is not None and is_ended_on_request(rank, ending.status):
            return True
        # Where no end was seen, it came at any time since the connection's.
        at = ending.time if ending is not None else max(rank.heard + ENDING_SECONDS, self._wanted_at)
        return 0.0 <= at - self._wanted_at < WANTED_SECONDS and not (ending is not None and ending.oom)

    def _judge_ranks(self, now: float) -> list[Rank]:
        """Ranks that can be judged. A rank that waits for a working rank does not hang: rank 0 may evaluate while the
        others are in the next collective."""
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
                    self._incidents.add_stacks()  # it computes, and a moment later it is known to hold the GIL
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
        """The rank to say it of, where the run has begun to stand still: once for each time that it does, and not where
        the alert is due. A rank that does something is preferred to those that may wait for it in a collective."""
        stands = any(rank.standing for rank in self._attempt.live)
        began, self._standing = stands and not self._standing, stands
        if not began:
            return None
        stopped = [rank for rank in self._attempt.live if rank.standing or rank.stall.seconds > NOTICEABLE_SECONDS]
        worst = max(stopped, key=lambda rank: (rank.stall.kind is not Kind.BLOCKED, rank.stall.seconds))
        return worst if not _is_late(worst) else None

    def take_past_standstill(self, now: float) -> tuple[int, float] | None:
        """(rank, seconds) of a standstill that has just ended: its ranks went on, or are gone."""
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
        """Have all ranks say where they are, for `sentinel hang`."""
        self._survey_until, self._provided = now + SURVEY_SECONDS, True
        for rank in self._attempt.live:
            if rank.stall.quiet < NOTICEABLE_SECONDS:  # what one that stands has said holds until it says more
                rank.dump = ""
            self.stacks.order(rank, now)
            self.ask_collectives(rank, now)

    @property
    def surveyed(self) -> bool:
        """Whether all live ranks have said where they are, or will not."""
        return not any(self.stacks.waits_for(one) or self.collectives.waits_for(one) for one in self._attempt.live)

    def ask_collectives(self, rank: Rank, now: float) -> None:
        """Ask a rank what it did in collectives, unless it has no others to meet there."""
        if rank.identity.world_size > 1:
            self.collectives.order(rank, now)

    def _forget(self, now: float) -> None:
        """What ranks said of a standstill from which they have gone on: it must not explain the next one."""
        for rank in self._attempt.live if now >= self._survey_until else ():
            number, progress = rank.identity.rank, rank.heartbeat.progress if rank.heartbeat is not None else 0
            if self._progress.get(number, 0) != progress:
                self._progress[number] = progress
                self.stacks.forget(rank)
                self.collectives.forget(rank)

    def _provide(self, now: float) -> None:
        """Have the stacks and collectives of all ranks at hand when an alert fires: a rank that is waited for may be
        at rest itself. Forget them when they all go on."""
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
        """The descriptor of the file that a rank's stacks are dumped into; -1 where there is none."""
        heartbeat = self._heartbeats.get(number)
        return heartbeat.stacks if heartbeat is not None else -1

    def _observation(self, ranks: list[Rank]) -> Observation:
        return self._observe(
            {
                rank.identity.rank: {
                    "stalled_seconds": rank.stall.seconds,
                    "stall_limit_seconds": rank.stall.limit,
                    "collectives_differ": float(rank.identity.rank in self._differing),
                    "rank_lost": float(rank.identity.rank in self._dead),
                }
                for rank in ranks
            }
        )

    def _observe(self, by_rank: dict[int, dict[str, float]]) -> Observation:
        values = {Entity("rank", str(number)): values for number, values in by_rank.items()}
        return Observation(seq=self._attempt.closed_to, time=time.time(), values=values)


def is_ended_on_request(rank: Rank, status: int | None) -> bool:
    """Whether this exit status is that of a run which was asked to end: of its only rank. One of several that ends
    leaves the others behind, and `sentinel run` announces the signals that it passes on."""
    return status in _REQUESTS and rank.identity.world_size == 1 and not rank.hello.supervisor


def _has_ended(rank: Rank) -> bool:
    return bool(rank.process) and has_ended(rank.process)


def _is_late(rank: Rank) -> bool:
    """Whether it stands for longer than rules allow."""
    return rank.stall.seconds > rank.stall.limit


def _find_last_work(rank: Rank, now: float) -> float:
    """When the rank last did what may take long, as far as it may still be doing it."""
    beat = rank.heartbeat
    if beat is None or not beat.progress or beat.place == Place.LEFT:
        return -math.inf
    if beat.paused or rank.stall.kind in (Kind.MOVING, Kind.LONG):
        return now
    return now - rank.stall.quiet if rank.stall.quiet < NOTICEABLE_SECONDS else -math.inf


def _unusual(rank: Rank, least: float = DUMP_SECONDS, factor: float = DUMP_FACTOR) -> bool:
    longest = rank.heartbeat.longest if rank.heartbeat else 0.0
    return rank.stall.seconds > max(least, factor * longest)
