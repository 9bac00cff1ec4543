"""A stall of a single rank in work that may end by itself does not end a job."""

from __future__ import annotations

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.restart import LEAST_SECONDS, SPARED, RestartAction, may_end
from sentinel.daemon.ranks.stalls import StallDetector
from sentinel.diagnose.case import Case, CaseMember
from sentinel.runs import Attempt
from sentinel.wire.heartbeat_page import Place
from tests.diagnose.test_evidence import case
from tests.hang.test_judged import beat
from tests.run_parts import FakeIncidents, SentMessages


class Supervisor:
    """Records the jobs that it is asked to end."""

    def __init__(self) -> None:
        self.ended: list[Case] = []

    def end_job(self, case: Case) -> bool:
        self.ended.append(case)
        return True


def stalled(place: Place, world: int = 1) -> tuple[Attempt, Case]:
    attempt = Attempt(0, 0.0)
    for number in range(world):
        identity = wire.Identity(run="r", run_id="r", rank=number, world_size=world, session=f"s{number}")
        rank = attempt.hello(wire.Hello(version="t", identity=identity), 0.0)
        rank.heartbeat = beat(place=place)
    hang = case("Hang", "0")
    return attempt, msgspec.structs.replace(hang, members=(CaseMember("rank", "0", 40, {"stalled_seconds": 4000.0}),))


@pytest.mark.parametrize("place", [Place.LONG, Place.AWAITS])
def test_a_single_rank_in_output_or_in_a_sleep_is_spared(place: Place) -> None:
    attempt, hang = stalled(place)
    link, incidents, supervisor = SentMessages(), FakeIncidents(), Supervisor()
    stacks = StallDetector(attempt, link, incidents).stacks
    action = RestartAction(attempt, incidents, stacks, supervisor)
    action.act_on(hang, 0.0)
    action.tick(LEAST_SECONDS)
    assert not supervisor.ended
    assert hang.done == (SPARED,)
    other = case("NonFiniteLoss")  # an alert that asks for a restart for another reason gets it
    action.act_on(other, 10.0)
    action.tick(10.0 + LEAST_SECONDS)
    assert supervisor.ended == [other]


def test_a_fault_that_fires_while_another_waits_for_its_evidence_ends_the_job_though_the_other_is_over() -> None:
    attempt, hang = stalled(Place.LONG)
    incidents, supervisor = FakeIncidents(), Supervisor()
    action = RestartAction(attempt, incidents, StallDetector(attempt, SentMessages(), incidents).stacks, supervisor)
    spike, last = case("LossSpike"), case("NonFiniteLoss")
    for fault in (spike, hang, last, last):
        action.act_on(fault, 0.0)
    spike.state = "resolved"
    action.tick(LEAST_SECONDS)
    assert supervisor.ended == [last]
    assert hang.done == (SPARED,)
    assert not action.waiting


@pytest.mark.parametrize(("place", "world"), [(Place.LOOP, 1), (Place.UNKNOWN, 1), (Place.LONG, 2), (Place.AWAITS, 2)])
def test_a_deadlock_is_not_spared_nor_a_stall_of_several_ranks(place: Place, world: int) -> None:
    assert not may_end(*stalled(place, world))
