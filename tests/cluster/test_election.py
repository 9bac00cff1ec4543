"""Which coordinator a node follows, and which nodes a coordinator relies on, so that no two act at the same time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.election import (
    COUNTED_SECONDS,
    LEASE_SECONDS,
    STAGGER_SECONDS,
    TRIAL_SECONDS,
    Election,
    check_epoch,
    check_incarnation,
    find_leader,
    next_epoch,
)
from sentinel.cluster.protocol.messages import Beat, NodeState, Pulse
from sentinel.cluster.protocol.node import AT_ONCE, KEPT, Node
from sentinel.errors import ProtocolError
from tests.cluster.simulation import Simulation, make_case

E1, E2 = next_epoch(0, 1, 100), next_epoch(0, 2, 200)
STARTED = 1000.0
FREE = STARTED + LEASE_SECONDS


def beat(epoch: int, stamp: float = 1.0, **more: Any) -> Beat:
    return Beat(node=find_leader(epoch), epoch=epoch, stamp=stamp, **{"expected": 3, "nodes": (), **more})


def pulse(node: int, epoch: int, stamp: float, incarnation: int = 1) -> Pulse:
    return Pulse(
        node=node, incarnation=incarnation, hostname="h", attempt=0, step=0, epoch=epoch, stamp=stamp
    )  # fmt: skip


def state(node: int) -> NodeState:
    return NodeState(
        node=node, hostname="h", incarnation=1, applied=0, state="alive", silent_seconds=0.0, attempt=0, step=0
    )


def test_a_new_daemon_follows_no_coordinator_until_earlier_promises_have_expired() -> None:
    election = Election(0, 3, STARTED)
    assert not election.follow(beat(E1), FREE - 0.1)
    assert election.follow(beat(E1), FREE)


def test_a_node_follows_one_coordinator_at_a_time_and_no_epoch_below_one_that_it_followed() -> None:
    election = Election(0, 3, STARTED)
    assert election.follow(beat(E1), FREE)
    assert not election.follow(beat(E2, acting=True), FREE + LEASE_SECONDS - 0.1), "a higher one, within the lease"
    assert not election.follow(beat(E1), FREE + 1.0), "the same beat again"
    assert election.follow(beat(next_epoch(E1, 1)), FREE + 1.0), "the same coordinator, with a higher epoch"
    assert election.follow(beat(E2), FREE + 1.0 + LEASE_SECONDS)
    assert not election.follow(beat(E1, 9.0, acting=True), FREE + 100.0)


def test_the_lowest_node_that_lives_comes_first_and_one_without_an_address_never() -> None:
    last = beat(E1, nodes=(state(0), state(1), state(2), state(3)))
    due = {}
    for node in (0, 2, 3):
        election = Election(node, 3, STARTED)
        assert election.follow(last, FREE)
        due[node] = [wait for wait in range(60) if election.is_due(FREE + wait)][:1]
    assert due == {0: [LEASE_SECONDS], 2: [LEASE_SECONDS + STAGGER_SECONDS], 3: []}
    election = Election(0, 3, STARTED)
    assert election.follow(beat(E1, leaving=True, nodes=(state(0), state(1))), FREE)
    assert election.is_due(FREE), "at once where the coordinator says that it leaves"


def test_a_coordinator_counts_from_when_it_sent_the_beat_that_a_node_names_and_needs_more_than_half() -> None:
    two_of_four = Coordinator(1, 4, E1, 0.0)
    for node in (1, 2):
        two_of_four.take_pulse(pulse(node, E1, 1.0), 2.0)
    assert not two_of_four.is_acting(2.0)
    two_of_four.take_pulse(pulse(3, E1, 1.5), 2.0)
    assert two_of_four.is_acting(1.0 + COUNTED_SECONDS - 0.1)
    assert not two_of_four.is_acting(1.0 + COUNTED_SECONDS)
    two_of_four.take_pulse(pulse(3, E1, 99.0), 5.0)
    two_of_four.take_pulse(pulse(2, E1 - 16, 5.0), 5.0)
    assert not two_of_four.is_acting(5.6), "a beat that it did not send, one of a former reign"
    assert two_of_four.has_failed(1.0 + COUNTED_SECONDS + TRIAL_SECONDS + 0.1)


def test_a_higher_epoch_that_a_node_followed_raises_its_own_and_ends_no_reign() -> None:
    coordinator = Coordinator(1, 3, E1, 0.0)
    for node in (1, 2):
        coordinator.take_pulse(pulse(node, E1, 1.0), 2.0)
    coordinator.take_pulse(pulse(0, E2, 1.0), 2.0)
    assert coordinator.epoch > E2
    assert find_leader(coordinator.epoch) == 1
    assert coordinator.is_acting(2.0)
    assert not coordinator.yields_to(beat(next_epoch(E2, 0)), 2.0)
    assert coordinator.yields_to(beat(E2, acting=True), 100.0)


def test_of_two_nodes_neither_acts_without_the_other() -> None:
    simulation = Simulation(1, nodes=2, candidates=2, deaths=False, cuts=False)
    simulation.loss, simulation.delay = 0.0, 0.05
    while simulation.find_acting() is None:
        simulation.turn()
    simulation.nodes[0].die()
    for _ in range(200):
        simulation.turn()
        assert simulation.find_acting() is None


def test_the_next_node_acts_in_seconds_and_the_old_one_comes_back_as_one_of_the_others() -> None:
    simulation = Simulation(1, deaths=False, cuts=False)
    simulation.loss, simulation.delay = 0.0, 0.05
    while simulation.find_acting() is None:
        simulation.turn()
    simulation.nodes[0].die()
    died = simulation.now
    while simulation.coordinators == [0]:
        simulation.turn()
        assert simulation.now - died < LEASE_SECONDS + 4.0
    simulation.nodes[0].start(simulation.now)
    for _ in range(100):
        simulation.turn()
        assert simulation.find_acting() is not None, "nobody is disturbed"
    daemon = simulation.nodes[0].daemon
    assert simulation.coordinators == [0, 1]
    assert daemon is not None
    assert (simulation.nodes[0].lead, daemon.election.leader) == (None, 1)
    assert daemon.find_view(simulation.nodes[0].clock(simulation.now)) == "joined"


def test_a_coordinator_goes_on_when_the_job_of_the_others_has_ended_and_not_when_they_are_lost() -> None:
    for leaves in (True, False):
        epoch = next_epoch(0, 0)
        coordinator = Coordinator(0, 2, epoch, 0.0)
        for node in (0, 1):
            coordinator.take_pulse(pulse(node, epoch, 1.0), 2.0)
        coordinator.take_pulse(msgspec.structs.replace(pulse(1, epoch, 1.0), leaving=leaves, ended=leaves), 3.0)
        coordinator.take_pulse(pulse(0, epoch, 60.0), 60.0)
        assert coordinator.is_acting(61.0) == leaves
        assert coordinator.has_failed(61.0) == (not leaves)


def test_no_former_coordinator_relies_on_a_daemon_that_was_restarted_in_order() -> None:
    """The next daemon of its node may follow another coordinator, five seconds after its start."""
    former, epoch = Coordinator(0, 4, next_epoch(0, 0), 0.0), next_epoch(0, 0)
    for node in range(4):
        former.take_pulse(pulse(node, epoch, 9.5), 10.0)
    assert former.is_acting(10.0)
    for node in (1, 2):
        former.take_pulse(msgspec.structs.replace(pulse(node, epoch, 10.0), leaving=True), 10.2)
    former.take_pulse(pulse(0, epoch, 19.9), 20.0)
    assert not former.is_acting(20.0)


def test_made_up_nodes_are_not_part_of_the_job() -> None:
    coordinator = Coordinator(0, 2, next_epoch(0, 0), 0.0)
    for node in range(64):
        coordinator.take_pulse(pulse(node, coordinator.epoch, 1.0), 2.0)
    assert [state.node for state in coordinator.list_nodes(2.0)] == [0, 1]


def test_a_node_that_its_coordinator_does_not_know_tells_people_by_itself() -> None:
    """This happens if the nodes of a job have different numbers of ranks."""
    node = Node(3, 1, STARTED)
    assert node.take_beat(beat(E1, acting=True, expected=3), FREE) == []
    assert node.find_view(FREE) == "local view"


def test_an_epoch_far_ahead_of_the_clock_is_refused() -> None:
    now = 1_800_000_000.0
    check_epoch(next_epoch(0, 1, int(1000 * now)), now)
    with pytest.raises(ProtocolError, match="set the nodes' clocks"):
        check_epoch(2**53, now)


def test_an_incarnation_far_ahead_of_the_clock_is_refused() -> None:
    now = 1_800_000_000.0
    check_incarnation(int(1000 * now), now)
    with pytest.raises(ProtocolError, match="set the nodes' clocks"):
        check_incarnation(2**53, now)


def test_a_stamp_that_a_coordinator_has_not_reached_keeps_no_node_from_following_it() -> None:
    coordinator, node = Coordinator(0, 2, next_epoch(0, 0), 0.0), Node(1, 1, -LEASE_SECONDS)
    node.take_beat(beat(coordinator.epoch, 1e15, acting=True), 1.0)
    for now in (1.0, 2.0, 3.0):
        for number in range(2):
            stamp = node.election.stamp if number else now
            epoch = node.election.epoch if number else coordinator.epoch
            coordinator.take_pulse(pulse(number, epoch, stamp), now)
        node.take_beat(coordinator.make_beat(now), now)
    assert node.election.stamp == 3.0
    assert coordinator.is_acting(3.0)
    raised = coordinator.epoch
    coordinator.take_pulse(pulse(1, next_epoch(0, 0), 1e15), 3.0)
    assert coordinator.epoch == raised, "a pulse that was delayed"


def test_a_node_that_hands_in_more_than_a_message_holds_is_asked_for_the_rest() -> None:
    coordinator, node = Coordinator(0, 2, next_epoch(0, 0), 0.0), Node(1, 1, 0.0)
    for number in range(1, 11):
        node.record(make_case(number, "Hang", number))
    for number in range(2):
        last = node.last if number else 0
        coordinator.take_pulse(msgspec.structs.replace(pulse(number, coordinator.epoch, 1.0), last=last), 2.0)
    missing, asked = coordinator.list_missing(2.0, [1]), []
    while missing:
        asked.append(missing[0][1])
        coordinator.take_events(node.list_events(missing[0][1]))
        missing = coordinator.list_missing(2.0, [1])
    assert asked == [0, AT_ONCE, 2 * AT_ONCE]
    assert sum(len(incident.cases) for incident in coordinator.incidents) == 10


def test_cases_that_are_too_many_to_wait_are_counted() -> None:
    node = Node(1, 1, 0.0)
    for number in range(KEPT + 3):
        node.record(make_case(number, "Hang", number))
    assert (node.unapplied, node.dropped) == (KEPT, 3)


def test_the_silence_of_a_node_lasts_on_for_a_new_coordinator_that_hears_none() -> None:
    node = Node(1, 1, STARTED)
    assert node.recall_beat(FREE) is None
    node.take_beat(beat(E1, nodes=(state(0), state(1)), acting=True), FREE)
    node.take_beat(beat(next_epoch(E1, 1), nodes=(state(1),)), FREE + 20.0)
    last = node.recall_beat(FREE + 21.0)
    assert last is not None
    assert [(one.node, one.silent_seconds) for one in last.nodes] == [(0, 21.0), (1, 1.0)]
