"""Ranks are compared while all is well: they are asked for their collectives from time to time."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon.ranks.stalls import COMPARE_SECONDS, StallDetector
from sentinel.engine import Entity
from sentinel.rulebook.loader import stock_rules
from sentinel.runs import Attempt, Rank, Run
from sentinel.wire.flight_recorder import flight_of
from sentinel.wire.heartbeat_page import PAGE, Heartbeat, Kind, Place, pack_heartbeat
from tests.diagnose.test_collectives import entry
from tests.run_parts import FakeIncidents, watch_run


def hello(rank: int, world: int = 2) -> wire.Hello:
    identity = wire.Identity(
        run="r", run_id="r-1", attempt=0, rank=rank, world_size=world, local_rank=rank, pid=1, hostname="h", session="s"
    )
    return wire.Hello(version="1", identity=identity)


BEAT = Heartbeat(
    beat=0.0, progress=400, progressed=100.0, steps=100, work=1, place=Place.LOOP, paused=0, longest=0.1,
    cpu=0.0, thread=1 << 30, ident=1, moved=0.0, signal=0,
)  # fmt: skip
"""A heartbeat in the loop, with its last progress at 100.0 s."""


class Node:
    """Two ranks, and what the detector asks of them."""

    def __init__(self) -> None:
        self.attempt = Attempt(0, 0.0)
        self.asked: list[tuple[int, wire.Ask]] = []
        self.stalls = StallDetector(self.attempt, self, FakeIncidents())
        self._pages = [os.memfd_create(PAGE) for _ in (0, 1)]
        for rank, page in enumerate(self._pages):
            self.stalls.add_rank(self.attempt.hello(hello(rank), 0.0), [page])

    def beat(self, **more: Any) -> None:
        """Write the heartbeat of both ranks."""
        for rank in (0, 1):
            self.beat_one(rank, **more)

    def beat_one(self, rank: int, **more: Any) -> None:
        os.pwrite(self._pages[rank], pack_heartbeat(BEAT._replace(**more)), 0)

    def send(self, rank: int, message: wire.Message) -> None:
        assert isinstance(message, wire.Ask)
        self.asked.append((rank, message))

    def interrupt(self, process: int, signal: int) -> bool:
        return False

    def answer(self, *dumps: list[dict[str, Any]]) -> None:
        """Answer what was asked last with a dump for each rank."""
        for rank, ask in self.asked:
            content = msgspec.to_builtins(flight_of({"entries": dumps[rank]}))
            self.stalls.collectives.add_reply(rank, wire.Reply(id=ask.id, ok=True, content=content))
        self.asked.clear()

    def differing(self, now: float) -> dict[str, float]:
        """Return what the rules see of each rank's collectives at this tick, by rank."""
        observed = self.stalls.tick(now)
        found: dict[str, float] = {}
        for entity, values in observed.values.items() if observed is not None else ():
            assert isinstance(entity, Entity)
            if "collectives_differ" in values:
                found[entity.name] = values["collectives_differ"]
        return found


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.stalls.close()


def test_a_rank_that_issues_another_collective_is_reported_and_its_end_too(node: Node) -> None:
    node.stalls.tick(100.0)
    assert [(rank, ask.what) for rank, ask in node.asked] == [(0, "collectives"), (1, "collectives")]
    same = [entry(seq) for seq in range(1, 5)]
    node.answer(same, same)
    assert node.differing(101.0) == {}
    assert node.asked == [], "not before its time"
    node.stalls.tick(100.0 + COMPARE_SECONDS)
    node.answer(same, [*same[:3], entry(4, "broadcast")])
    assert node.differing(111.0) == {"1": 1.0}
    node.stalls.tick(100.0 + 2 * COMPARE_SECONDS)
    node.answer(same, same)
    assert node.differing(121.0) == {"1": 0.0}


def test_nothing_is_said_of_collectives_before_they_are_compared(node: Node) -> None:
    """Otherwise the alert of a former daemon would end with the first look, and come back with the first comparison."""
    node.beat(beat=100.0)
    assert node.differing(100.0) == {}
    same = [entry(seq) for seq in range(1, 5)]
    node.answer(same, [*same[:3], entry(4, "broadcast")])
    node.beat(beat=101.0)
    assert node.differing(101.0)["1"] == 1.0


def test_no_rank_is_accused_while_an_answer_is_missing(node: Node) -> None:
    node.stalls.tick(100.0)
    del node.asked[1]
    node.answer([entry(1)], [])
    assert node.differing(101.0) == {}


def test_a_rank_that_issues_another_collective_while_others_stand_is_reported(node: Node) -> None:
    """Answers from a moment at which all was well do not decide: the ranks are asked again while they stand still.

    One of them may take long to answer.
    """

    def differing(now: float, last: str) -> float:
        node.beat(beat=now)
        found = node.differing(now).get("1", 0.0)
        node.asked = [(rank, ask) for rank, ask in node.asked if ask.what == "collectives"]
        node.answer([entry(1), entry(2, done=False)], [entry(1), *([entry(2, last, done=False)] if last else [])])
        return found

    assert [differing(now, "") for now in range(100, 108)] == [0.0] * 8, "by now all is asked that the alert will want"
    assert [differing(now, "broadcast") for now in range(108, 115)][-1] == 1.0


def test_what_was_said_of_one_standstill_does_not_explain_the_next(node: Node) -> None:
    for now in (101.5, 102.6):
        node.beat(beat=now)
        node.stalls.tick(now)
    ranks = list(node.attempt.ranks.values())
    node.stalls.stacks.act_on(None, 103.0)  # type: ignore[arg-type]  # sooner than they would be taken by themselves
    asked, node.asked = node.asked, [(rank, ask) for rank, ask in node.asked if ask.what == "collectives"]
    node.answer([entry(1)], [entry(1)])
    (first, _) = (ask for _, ask in asked if ask.what == "stacks")
    dumped = wire.Reply(id=first.id, ok=True, content={"text": "Thread 0x01 (most recent call first):"})
    node.stalls.stacks.add_reply(0, dumped)
    assert ranks[0].dump
    assert all(rank.flight for rank in ranks)
    node.beat(beat=104.0, progressed=103.9, progress=401)
    node.stalls.tick(104.0)
    late = next(ask for rank, ask in asked if rank == 1 and ask.what == "stacks")
    node.stalls.stacks.add_reply(1, wire.Reply(id=late.id, ok=True, content=dumped.content))
    assert [(rank.dump, rank.flight) for rank in ranks] == [("", None)] * 2


def test_a_rank_that_issued_another_collective_and_went_on_is_reported_with_it(node: Node) -> None:
    for second in range(3):
        node.beat(beat=100.0 + second, progressed=100.0 + second, progress=400 + second)
        told = node.differing(100.0 + second)
        node.answer([entry(1), entry(2)], [entry(1), entry(2, "broadcast")])
        if any(told.values()):
            break
    flight = node.attempt.ranks[1].flight
    assert told["1"] == 1.0
    assert flight is not None
    assert str(flight.find_issued("0", 2)) == "broadcast of 5"


def test_an_answer_that_is_no_record_is_left_out(node: Node) -> None:
    node.stalls.tick(100.0)
    rank, ask = node.asked[0]
    node.stalls.collectives.add_reply(rank, wire.Reply(id=ask.id, ok=True, content={"groups": 3}))
    assert node.attempt.ranks[0].flight is None


def test_the_wait_for_a_rank_that_left_the_loop_counts_from_that_ranks_progress(node: Node) -> None:
    beats = [BEAT._replace(progressed=progressed) for progressed in (100.0, 100.2)]
    pages = [os.memfd_create(PAGE) for _ in beats]
    for rank, page in enumerate(pages):
        node.stalls.add_rank(node.attempt.ranks[rank], [page])
    for now in (100.9, 101.1, 102.3):
        for rank, page in enumerate(pages):
            place = Place.LEFT if rank == 1 and now > 101.5 else Place.LOOP
            os.pwrite(page, pack_heartbeat(beats[rank]._replace(beat=now, place=place)), 0)
        node.stalls.tick(now)
    assert node.attempt.ranks[0].stall.seconds == pytest.approx(102.3 - 100.2)


def test_a_rank_that_waits_for_a_working_rank_elsewhere_does_not_stand_still(node: Node) -> None:
    for now in range(101, 120):
        node.beat(beat=float(now))
        node.stalls.note_work_elsewhere(now - 0.5, 0.0)
        node.stalls.tick(float(now))
    stall = node.attempt.ranks[0].stall
    assert (stall.quiet, stall.seconds) == (19.0, 0.5)
    node.stalls.note_work_elsewhere(-math.inf, 900.0)
    node.beat(beat=130.0)
    node.stalls.tick(130.0)
    stall = node.attempt.ranks[0].stall
    assert (stall.seconds, stall.limit) == (11.5, 900.0)


def test_work_of_a_nodes_own_ranks_is_known_to_other_nodes(node: Node) -> None:
    node.beat(beat=100.4)
    node.stalls.tick(100.4)
    assert node.stalls.worked == pytest.approx(100.0)
    for now in range(102, 107):  # a moment passes before it is known what its thread does
        node.beat(beat=float(now))
        node.stalls.tick(float(now))
    assert node.attempt.ranks[0].stall.seconds == 6.0
    assert node.stalls.worked == -math.inf
    for working in (0, 1):
        node.beat_one(working, beat=107.0 + working, paused=1)
        node.beat_one(1 - working, beat=107.0 + working)
        node.stalls.tick(107.0 + working)
        assert node.stalls.worked == 107.0 + working, "a rank that works is enough"


def test_a_survey_keeps_what_a_rank_that_stands_has_said_until_it_says_more(node: Node) -> None:
    """On a busy machine a rank may not answer again in time, and the place at which it stands would be lost."""
    for now in (101.5, 102.6, 104.0):
        node.beat(beat=now)
        node.stalls.tick(now)
    rank, other = node.attempt.ranks.values()
    rank.dump = other.dump = "Thread 0x01 (most recent call first):"
    other.stall = other.stall._replace(quiet=0.1)
    node.stalls.survey(104.1)
    assert (bool(rank.dump), other.dump) == (True, "")
    assert not node.stalls.surveyed


def test_a_standstill_is_reported_of_the_rank_that_works_while_others_wait(node: Node) -> None:
    """Rank 0 came to the collective before rank 1 stood still, so it has stood for longer."""
    said = []
    for second in range(80):
        now = 100.0 + second
        node.beat_one(0, beat=now, progressed=99.0)
        node.beat_one(1, beat=now, progressed=100.5, cpu=float(second))
        node.stalls.tick(now)
        if (rank := node.stalls.take_standstill()) is not None:
            said.append((rank.identity.rank, rank.stall.kind))
    assert said == [(1, Kind.BUSY)]


@pytest.mark.parametrize(
    ("goodbye", "resolves"), [(None, False), ("exception", False), ("exit", True)], ids=["killed", "raised", "left"]
)
def test_a_rank_that_stood_until_its_end_is_not_reported_to_have_gone_on(
    node: Node, goodbye: str | None, resolves: bool
) -> None:
    for now in (101.5, 103.0):
        node.beat(beat=now)
        node.stalls.tick(now)
    rank = node.attempt.ranks[1]
    assert rank.stall.seconds > 1
    rank.goodbye = wire.Goodbye(reason=goodbye) if goodbye else None
    node.attempt.lose(1, rank.goodbye)
    told = node.stalls.drop_rank(rank)
    node.stalls.record_exit(rank.process, -9, 104.0)
    died = node.stalls.take_deaths(104.0)
    gone_on = told.values[Entity("rank", "1")]["stalled_seconds"] if told is not None else None
    assert gone_on == (0.0 if resolves else None)
    assert (died.values if died is not None else None) == (
        None if goodbye else {Entity("rank", "1"): {"rank_lost": 1.0}}
    )


@pytest.mark.parametrize(
    ("status", "supervisor", "lost"),
    [
        (-15, "", False),
        (-2, "", False),
        (-1, "", True),
        (-9, "", True),
        (-11, "", True),
        (-7, "", True),
        (-6, "", True),
        (15, "", True),
        (None, "", True),
        (-15, "a mark", True),
    ],
)
def test_a_run_of_one_process_that_is_asked_to_end_has_lost_no_rank(
    status: int | None, supervisor: str, lost: bool
) -> None:
    """`sentinel run` itself reports which signals it passes on."""
    attempt = Attempt(0, 0.0)
    stalls = StallDetector(attempt, Node(), FakeIncidents())
    rank = attempt.hello(msgspec.structs.replace(hello(0, 1), supervisor=supervisor), 0.0)
    rank.process = 7
    attempt.lose(0, None)
    assert stalls.record_exit(7, status, 1.0) == [rank]
    assert (stalls.take_deaths(1.0) is not None) == lost
    assert stalls.take_request() == (0 if lost or status is None else -status)


class DyingJob:
    """A job of three ranks on this node, and which of them are reported as lost."""

    def __init__(self, supervisor: str = "", known: int = 3) -> None:
        self.attempt = Attempt(0, 0.0)
        self.stalls = StallDetector(self.attempt, Node(), FakeIncidents())
        for number in range(known):
            rank = self.attempt.hello(msgspec.structs.replace(hello(number, 3), supervisor=supervisor), 0.0)
            rank.process = 100 + number

    def die(self, number: int, status: int | None, now: float = 1.0) -> None:
        self.stalls.record_exit(100 + number, status, now)
        self.attempt.lose(number, None)

    def leave(self, number: int, now: float = 1.0, **goodbye: Any) -> None:
        rank = self.attempt.ranks[number]
        rank.goodbye, rank.heard = wire.Goodbye(**goodbye), now
        self.attempt.lose(number, rank.goodbye)

    def lost(self, now: float = 1.0) -> list[str]:
        observed = self.stalls.take_deaths(now)
        return sorted(str(entity) for entity in observed.values) if observed is not None else []


ALL = ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_whose_ranks_are_all_asked_to_end_has_lost_none(number: int) -> None:
    """A scheduler's time limit used to cause a page: torchrun passes the signal on to all its ranks."""
    job = DyingJob()
    for rank in (0, 2):
        job.die(rank, -number)
        assert job.lost() == [], "the others may follow"
    job.die(1, -number, 29.0)
    assert (job.lost(29.0), job.stalls.take_request(), job.stalls.take_request()) == ([], number, 0)


INTERRUPTED = {"reason": "exception", "detail": "KeyboardInterrupt"}


@pytest.mark.parametrize(
    ("said", "left"), [({"reason": "exit"}, 98.0), ({"reason": "exit"}, 103.0), (INTERRUPTED, 80.0), (INTERRUPTED, 120)]
)
def test_a_rank_that_says_goodbye_when_it_is_asked_to_end_is_one_of_the_job(said: dict[str, Any], left: float) -> None:
    """A goodbye does not say whether the rank was asked to end; only an interruption does."""
    job = DyingJob()
    if left < 100.0:
        job.leave(2, left, **said)
    job.die(0, -15, 100.0)
    assert job.lost(100.0) == []
    job.die(1, -15, 101.0)
    if left > 100.0:
        assert job.lost(101.0) == []
        job.leave(2, left, **said)
    assert (job.lost(max(left, 101.0)), job.stalls.take_request()) == ([], 15)


@pytest.mark.parametrize("said", [{"reason": "exit"}, INTERRUPTED])
def test_a_rank_that_is_killed_after_the_others_have_finished_is_lost(said: dict[str, Any]) -> None:
    """Two ranks had finished an hour before, and their goodbyes made this look like an ordinary end of the job."""
    job = DyingJob()
    job.leave(0, **said)
    job.leave(1, **said)
    job.die(2, -15, 3600.0)
    assert (job.lost(3600.0), job.stalls.take_request()) == (["rank 2"], 0)


def test_a_rank_that_is_killed_is_lost_when_the_others_finish_later() -> None:
    job = DyingJob()
    job.die(0, -15)
    assert job.lost() == []
    job.leave(1, 21.0, reason="exit")
    assert (job.lost(21.0), job.stalls.take_request()) == (["rank 0"], 0)


def test_a_rank_whose_goodbye_another_daemon_took_is_not_one_of_the_job() -> None:
    job = DyingJob()
    for number in (0, 1):
        job.attempt.ranks[number].state = "gone"
    job.die(2, -15)
    assert (job.lost(), job.stalls.take_request()) == (["rank 2"], 0)


def test_ranks_that_end_too_far_apart_are_lost_though_no_tick_came_between() -> None:
    job = DyingJob()
    job.die(0, -15)
    job.die(1, -15)
    job.die(2, -15, 40.0)
    assert (job.lost(40.0), job.stalls.take_request()) == (ALL, 0)


def test_one_rank_of_several_that_alone_ends_by_a_signal_is_lost() -> None:
    job = DyingJob()
    job.die(1, -15)
    assert (job.lost(), job.lost(30.0), job.lost(31.0)) == ([], [], ["rank 1"])
    job.die(0, -15, 40.0)
    assert (job.lost(40.0), job.stalls.take_request()) == (["rank 0"], 0), "its launcher ended that one"


@pytest.mark.parametrize("status", [-9, -11, 1, None])
def test_ranks_that_a_launcher_ends_after_another_one_died_are_lost_with_it(status: int | None) -> None:
    job = DyingJob()
    job.die(0, -15)
    assert job.lost() == []
    job.die(1, status)
    job.die(2, -15)
    assert (job.lost(), job.stalls.take_request()) == (ALL, 0)


def test_ranks_that_a_launcher_ends_after_an_exception_are_lost() -> None:
    job = DyingJob()
    job.leave(1, reason="exception", detail="ValueError: bad")
    job.die(0, -15)
    assert job.lost() == ["rank 0"]


@pytest.mark.parametrize(("supervisor", "known"), [("a mark", 3), ("", 2)], ids=["supervised", "part of it"])
def test_ranks_whose_end_is_explained_elsewhere_are_lost_at_once(supervisor: str, known: int) -> None:
    """`sentinel run` announces the signals that it passes on; ranks of other nodes are not seen."""
    job = DyingJob(supervisor, known)
    for number in range(known):
        job.die(number, -15)
    assert job.lost() == ALL[:known]


@pytest.mark.parametrize("first", [0, 1])
def test_a_death_that_waits_for_others_is_reported_when_a_new_attempt_begins(first: int) -> None:
    """A launcher that started the job again within 30 s used to leave the rank's death unreported."""
    ingest = (watch := watch_run(Run("train", "r1", 0.0), stock_rules())).ingest

    def greet(number: int, name: str, attempt: int = 0) -> Rank:
        identity = wire.Identity(
            run="train", run_id="r1", rank=number, world_size=2, session=f"{name}{number}", attempt=attempt
        )
        return ingest.hello(wire.Hello(version="t", identity=identity), 1.0, 100 + number)

    greet(0, "a")
    dead = greet(1, "a")
    ingest.record_exit(101, -15, 1.0)
    ingest.drop_rank(dead, 1.0)
    ingest.observe_deaths(1.0)
    assert not watch.incidents.log.cases
    greet(first, "b", 1)
    (case,) = watch.incidents.log.cases.values()
    assert (case.alert, case.attempt, [member.name for member in case.members]) == ("RankLost", 0, ["1"])
    assert ingest.stalls.take_request() == 0
