"""Checks what must hold at the end of a simulated job over nodes, whatever was lost and whichever daemon died."""

from __future__ import annotations

from tests.cluster.shrink_simulation import ShrinkSimulation
from tests.cluster.simulation import Simulation
from tests.cluster.stop_simulation import StopSimulation

JUDGED = 100
"""Number of last steps that must all be judged once all is well: most of a minute."""
LATE = 10
"""Number of newest steps that may still be on their way."""


def check_all(simulation: Simulation) -> None:
    """Check what must hold of every simulation, and more if no daemon died."""
    check_incidents(simulation)
    check_jobs(simulation)
    check_steps(simulation)
    if not simulation.deaths:
        check_ids(simulation)
    if not simulation.deaths and not simulation.cuts:
        check_restarts(simulation)
        check_all_steps(simulation)


def check_shrink(simulation: ShrinkSimulation) -> None:
    """Check that the nodes that are left are one group, at one start."""
    there = [machine for machine in simulation.machines if not machine.gone]
    groups = {(machine.start, machine.nodes.members.nodes) for machine in there}
    assert len(groups) <= 1, f"two groups are there: {groups}"
    for _, members in groups:
        assert {machine.number for machine in there} <= set(members), "a node runs that is not of the group"


def check_incidents(simulation: Simulation) -> None:
    """Check that each incident was sent, and that none is open that is over, or open twice."""
    by_nodes = {(node.number, identity) for node in simulation.nodes for identity in node.self_told}
    firing = {
        (node.number, case.id) for node in simulation.nodes for case in node.history.values() if case.state == "firing"
    }
    assert simulation.told | by_nodes >= set(simulation.faults), "a case was told by no page"
    assert not [node.pages for node in simulation.nodes if "firing" in node.pages.values()]
    lead = simulation.find_acting()
    assert lead is not None, "no coordinator acts"
    assert {node.daemon.election.leader for node in simulation.nodes if node.daemon} == {lead.coordinator.node}
    incidents = lead.coordinator.incidents
    held = {key for incident in incidents for key, c in incident.cases.items() if c.state == "firing"}
    assert held == firing
    still = [case for case in simulation.pages.values() if case.state == "firing"]
    assert {case.id for case in still} == {one.id for one in incidents if one.firing}
    assert len({case.alert for case in still}) == len(still), "two pages of one alert"


def check_jobs(simulation: Simulation) -> None:
    """Check that all nodes began each start after the same fault; in the end all run the same start, or none runs."""
    longest = max((one.begun for one in simulation.supervisors), key=len)
    for one in simulation.supervisors:
        assert one.begun == longest[: len(one.begun)], "begun after different faults"
        assert len(one.begun) == one.start
    assert {one.runs for one in simulation.supervisors} == {not any(one.gone for one in simulation.supervisors)}


def check_steps(simulation: Simulation) -> None:
    """Check that in the end every step of every rank is judged."""
    lead = simulation.find_acting()
    assert lead is not None
    last = lead.judged[-JUDGED:]
    assert [step.seq for step in last] == list(range(last[0].seq, last[0].seq + JUDGED)), "a step was not judged"
    assert {len(step.ranks) for step in last} == {2 * simulation.expected}
    assert last[-1].seq > simulation.trained - LATE


def check_ids(simulation: Simulation) -> None:
    """Check that a fault has one id. If the role moved, the next coordinator may not know the last pages before it."""
    moved = len(simulation.coordinators) > 1
    assert moved or [ids for ids in simulation.ids.values() if len(ids) > 1] == []


def check_restarts(simulation: Simulation) -> None:
    """Check that every fault leads to the next start of all nodes."""
    assert not any(one.gone for one in simulation.supervisors)
    assert min(simulation.faults_of_jobs, 1) <= simulation.supervisors[0].start <= simulation.faults_of_jobs


def check_all_steps(simulation: Simulation) -> None:
    """Check that no step was left out."""
    lead = simulation.find_acting()
    assert lead is not None
    first = 0 if len(simulation.coordinators) == 1 else lead.judged[0].seq
    assert [step.seq for step in lead.judged] == list(range(first, first + len(lead.judged))), "a step was lost"


def check_stop(simulation: StopSimulation) -> None:
    """Check that all ranks left at one step, none waits, and each case says how its stop ended."""
    check_incidents(simulation)
    assert len({rank.left for rank in simulation.ranks}) == 1, "some ranks are left"
    assert all(rank.left is not None for rank in simulation.ranks), "no rank left"
    assert not any(rank.bound or rank.voting for rank in simulation.ranks), "a rank stands and waits"
    over = ("stopped: ", "not stopped: ", "nothing: all ranks have ended training")
    for node in simulation.stops:
        for case in node.cases:
            assert case.done, f"nothing is said of {case}"
            assert case.done[-1].startswith(over), case.done
