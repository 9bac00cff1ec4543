"""What must hold of the protocol whatever is lost and whichever node dies."""

from __future__ import annotations

import pytest

from sentinel.cluster.protocol.election import LEASE_SECONDS
from sentinel.cluster.protocol.messages import Beat, NodeState, OpenIncident
from sentinel.cluster.protocol.node import Node
from tests.cluster.invariants import check_all, check_stop
from tests.cluster.simulation import Simulation, make_case
from tests.cluster.stop_simulation import StopSimulation

SEEDS = 100
"""Number of simulations of each kind."""


@pytest.mark.slow
@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_a_net_that_loses_and_links_that_go_a_fault_has_one_id(seed: int) -> None:
    simulation = Simulation(seed, deaths=False)
    simulation.play()
    check_all(simulation)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_with_a_net_that_only_loses_every_fault_ends_in_the_next_start_of_all(seed: int) -> None:
    simulation = Simulation(seed, deaths=False, cuts=False)
    simulation.play()
    check_all(simulation)


@pytest.mark.slow
@pytest.mark.sampled(50)
@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_deaths_of_nodes_and_coordinator_all_is_told_in_the_end(seed: int, nodes: int) -> None:
    simulation = Simulation(seed, nodes=nodes)
    simulation.play()
    check_all(simulation)


@pytest.mark.slow
@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_with_daemons_that_are_restarted_in_order_never_two_coordinators_act(seed: int) -> None:
    simulation = Simulation(seed, nodes=3 + seed % 3, leaves=True)
    simulation.play()
    check_all(simulation)


@pytest.mark.slow
@pytest.mark.sampled(25)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_alerts_that_stop_the_run_end_all_ranks_at_one_step_or_none(seed: int) -> None:
    simulation = StopSimulation(seed, nodes=3 + seed % 2)
    simulation.play()
    check_stop(simulation)


@pytest.mark.parametrize(("nodes", "seed"), [(3, 177), (3, 382), (3, 8088), (3, 8280), (4, 151), (4, 248), (4, 8226)])
def test_all_is_told_in_jobs_that_once_ended_with_wrong_pages(nodes: int, seed: int) -> None:
    simulation = Simulation(seed, nodes=nodes)
    simulation.play()
    check_all(simulation)


def test_a_stop_that_is_asked_for_when_another_one_failed_is_one_of_its_own() -> None:
    simulation = StopSimulation(5090, nodes=4)
    simulation.play()
    check_stop(simulation)


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
