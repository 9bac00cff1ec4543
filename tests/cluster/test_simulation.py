"""What holds of the protocol whatever is lost and whoever dies."""

from __future__ import annotations

import pytest

from sentinel.cluster.election import LEASE_SECONDS
from sentinel.cluster.messages import Beat, NodeState, OpenIncident
from sentinel.cluster.node import Node
from tests.cluster.simulation import Simulation, make_case

SEEDS = 100
"""Of each kind."""


def told(simulation: Simulation) -> set[tuple[int, str]]:
    """Cases that a page of the job's held, or one of their node's."""
    return simulation.told | {(node.number, identity) for node in simulation.nodes for identity in node.self_told}


def check_end(simulation: Simulation) -> None:
    """All is told, and nothing is open that is over, or open twice."""
    firing = {
        (node.number, case.id) for node in simulation.nodes for case in node.history.values() if case.state == "firing"
    }
    assert told(simulation) >= set(simulation.faults)
    assert not [node.pages for node in simulation.nodes if "firing" in node.pages.values()]
    lead = simulation.find_acting()
    assert lead is not None
    assert {node.daemon.election.leader for node in simulation.nodes if node.daemon} == {lead.coordinator.node}
    incidents = lead.coordinator.incidents
    held = {key for incident in incidents for key, c in incident.cases.items() if c.state == "firing"}
    assert held == firing
    still = [case for case in simulation.pages.values() if case.state == "firing"]
    assert {case.id for case in still} == {one.id for one in incidents if one.firing}
    assert len({case.alert for case in still}) == len(still)


def check_jobs(simulation: Simulation) -> None:
    """What every node began, it began after the same fault as the others; in the end all run the same start, or none
    runs."""
    longest = max((one.begun for one in simulation.supervisors), key=len)
    for one in simulation.supervisors:
        assert one.begun == longest[: len(one.begun)]
        assert len(one.begun) == one.start
    assert {one.runs for one in simulation.supervisors} == {not any(one.gone for one in simulation.supervisors)}


def check_steps(simulation: Simulation) -> None:
    """In the end every step of every rank is judged, for a minute after all is well."""
    lead = simulation.find_acting()
    assert lead is not None
    last = lead.judged[-100:]
    assert [step.seq for step in last] == list(range(last[0].seq, last[0].seq + 100))
    assert {len(step.ranks) for step in last} == {2 * simulation.expected}
    assert last[-1].seq > simulation.trained - 10


@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_a_net_that_loses_and_links_that_go_a_fault_has_one_id(seed: int) -> None:
    simulation = Simulation(seed, deaths=False)
    simulation.play()
    check_end(simulation)
    check_jobs(simulation)
    check_steps(simulation)
    moved = len(simulation.coordinators) > 1  # what the former told of at last, the next one may not know
    assert moved or [ids for ids in simulation.ids.values() if len(ids) > 1] == []


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_with_a_net_that_only_loses_every_fault_ends_in_the_next_start_of_all(seed: int) -> None:
    simulation = Simulation(seed, deaths=False, cuts=False)
    simulation.play()
    check_jobs(simulation)
    check_steps(simulation)
    lead = simulation.find_acting()
    assert lead is not None
    first = 0 if len(simulation.coordinators) == 1 else lead.judged[0].seq
    assert [step.seq for step in lead.judged] == list(range(first, first + len(lead.judged))), "a step was lost"
    assert not any(one.gone for one in simulation.supervisors)
    assert simulation.faults_of_jobs >= simulation.supervisors[0].start > 0


@pytest.mark.sampled(50)
@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_deaths_of_nodes_and_coordinator_all_is_told_in_the_end(seed: int, nodes: int) -> None:
    simulation = Simulation(seed, nodes=nodes)
    simulation.play()
    check_end(simulation)
    check_jobs(simulation)
    check_steps(simulation)


@pytest.mark.parametrize(("nodes", "seed"), [(3, 177), (3, 382), (3, 8088), (3, 8280), (4, 151), (4, 248)])
def test_in_jobs_that_once_ended_with_a_page_that_nothing_resolves_or_none_for_what_fires_all_is_told(
    nodes: int, seed: int
) -> None:
    simulation = Simulation(seed, nodes=nodes)
    simulation.play()
    check_end(simulation)


def test_a_former_coordinator_keeps_its_pages_until_the_next_one_knows_of_none_that_is_open() -> None:
    node, case = Node(0, 1, 0.0), make_case(1, "Hang", 10)
    node.record_page(case)
    state = NodeState(
        node=0, hostname="h", incarnation=1, applied=1, state="alive", silent_seconds=0.0, attempt=0, step=0
    )
    still_open = OpenIncident(id=case.id, attempt=0, alert="Hang", nodes=())
    for stamp, incidents in enumerate([(still_open,), ()], start=1):
        assert node.has_pages
        node.take_beat(
            Beat(node=1, epoch=1, stamp=stamp, acting=True, expected=3, nodes=(state,), incidents=incidents),
            LEASE_SECONDS + stamp,
        )
        assert [one.case.id for one in node.list_events(0).cases] == [case.id] * len(incidents)
    assert not node.has_pages
