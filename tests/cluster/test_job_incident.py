"""Alerts about one problem of a node are one problem of the job."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.cluster.protocol.job_incident import CASES, DONE, ENDED_CASES, JobIncidents, Page
from sentinel.cluster.protocol.messages import NodeCase
from sentinel.diagnose.case import CaseMember
from tests.cluster.simulation import make_case
from tests.engine.test_cost import count_lines


def test_a_consequence_on_a_node_is_one_in_the_job() -> None:
    opener = msgspec.structs.replace(make_case(1, "LossSpike", 100), problem="training", problem_id="0.1")
    joined = msgspec.structs.replace(
        make_case(2, "Divergence", 130), problem="training", problem_id="0.1", parent="0.1"
    )
    incidents = JobIncidents()
    for case in (opener, joined):
        incidents.add(3, NodeCase(number=1, case=case))
    parent, consequence = incidents.take_changes()
    assert (parent.id, parent.parent, parent.problem_id) == ("n3-0.1", "", "n3-0.1")
    assert (consequence.id, consequence.parent, consequence.problem_id) == ("n3-0.2", "n3-0.1", "n3-0.1")


def test_a_problem_that_the_job_does_not_know_is_dropped_from_the_case() -> None:
    incidents = JobIncidents()
    incidents.add(3, NodeCase(number=1, case=msgspec.structs.replace(make_case(2, "Divergence", 130), parent="0.1")))
    (case,) = incidents.take_changes()
    assert (case.parent, case.problem_id) == ("", "")


def test_a_page_of_an_earlier_coordinator_that_a_new_fault_goes_on_with_is_not_closed() -> None:
    over, same_fault = (
        msgspec.structs.replace(make_case(number, "Hang", 40), state="resolved", resolved_step=60) for number in (1, 2)
    )
    incidents = JobIncidents([Page(msgspec.structs.replace(make_case(2, "Hang", 40), id="n1-0.2"), (1,))])
    incidents.add(0, NodeCase(number=1, case=over, incident="n0-0.1"))
    incidents.add(1, NodeCase(number=1, case=same_fault, incident="n1-0.2"))
    incidents.add(0, NodeCase(number=2, case=make_case(3, "Hang", 100)))
    told = {case.id: case.state for case in incidents.take_changes()}
    assert told == {"n0-0.1": "resolved", "n1-0.2": "firing"}
    assert {page.case.id for page in incidents.list_open()} == {"n1-0.2"}


@pytest.mark.parametrize(
    ("first", "told"),
    [(0, {"n0-0.1": "resolved", "n0-0.2": "firing"}), (3, {"n0-0.1": "firing"})],
    ids=["a case that it had not heard comes first", "a case that it had heard comes first"],
)
def test_a_fault_that_an_earlier_coordinator_put_into_a_former_incident_has_one_open_page(
    first: int, told: dict[str, str]
) -> None:
    over = msgspec.structs.replace(make_case(1, "Hang", 100), state="resolved", resolved_step=105)
    incidents = JobIncidents([Page(msgspec.structs.replace(make_case(1, "Hang", 100), id="n0-0.1"), (1, 3))])
    incidents.add(0, NodeCase(number=1, case=over))
    again = {0: NodeCase(number=2, case=make_case(2, "Hang", 115))}
    again[3] = NodeCase(number=1, case=make_case(3, "Hang", 115), incident="n0-0.1")
    for node in (first, 3 - first):
        incidents.add(node, again[node])
    assert {case.id: case.state for case in incidents.take_changes()} == told
    (page,) = incidents.list_open()
    assert set(page.nodes) == {0, 3}
    assert sum(len(incident.cases) for incident in incidents) == 3


def test_a_case_that_names_an_incident_that_is_over_joins_the_one_that_fires() -> None:
    incidents = JobIncidents([Page(msgspec.structs.replace(make_case(1, "Hang", 100), id="n0-0.1"), (1, 3))])
    for number, (first, last) in enumerate([(100, 105), (107, 110)], start=1):
        over = msgspec.structs.replace(make_case(number, "Hang", first), state="resolved", resolved_step=last)
        incidents.add(0, NodeCase(number=number, case=over))
    incidents.add(0, NodeCase(number=3, case=make_case(4, "Hang", 115)))
    incidents.add(3, NodeCase(number=1, case=make_case(3, "Hang", 108), incident="n0-0.1"))
    assert [page.case.id for page in incidents.list_open()] == ["n0-0.4"]


def test_a_consequence_keeps_the_problem_of_its_page_when_its_opener_is_forgotten() -> None:
    page = msgspec.structs.replace(make_case(2, "Divergence", 130), id="n1-0.2", problem_id="n1-0.1", parent="n1-0.1")
    incidents = JobIncidents([Page(page, (1,))])
    case = msgspec.structs.replace(make_case(2, "Divergence", 130), problem="training", problem_id="0.1")
    incidents.add(1, NodeCase(number=5, case=case, incident="n1-0.2"))
    (told,) = incidents.take_changes()
    assert (told.id, told.problem_id) == ("n1-0.2", "n1-0.1")


def test_a_rank_that_a_former_coordinator_and_the_next_one_name_is_one_member() -> None:
    incidents = JobIncidents()
    for node in (0, 1):
        member = CaseMember("rank", "5", 40 + node, {}, node="2")
        judged = msgspec.structs.replace(make_case(1, "Straggler", 40 + node), of_job=True, members=(member,))
        incidents.add(node, NodeCase(number=1, case=judged))
    (told,) = incidents.take_changes()
    assert [(member.name, member.node, member.first_step) for member in told.members] == [("5", "2", 40)]
    assert told.summary == "Straggler (node 2)"


def test_a_case_of_a_node_that_was_cut_off_joins_its_own_fault() -> None:
    """It does not join a newer fault, though it still fires in the first event that the node hands in."""
    first, late, second = make_case(1, "Spike", 190), make_case(1, "Spike", 190), make_case(2, "Spike", 205)
    over = msgspec.structs.replace(first, state="resolved", resolved_step=195)
    incidents = JobIncidents()
    for number, case in enumerate((first, over, second), 1):
        incidents.add(0, NodeCase(number=number, case=case))
    incidents.add(1, NodeCase(number=1, case=late))
    assert [(incident.id, incident.nodes) for incident in incidents] == [("n0-0.1", (0, 1)), ("n0-0.2", (0,))]


def test_an_incident_leaves_behind_what_the_case_that_ended_last_says() -> None:
    first, last = make_case(1, "MemoryCreep", 100), make_case(1, "MemoryCreep", 100)
    incidents, told = JobIncidents(), []
    for number, node, case in [(1, 0, first), (1, 1, last), (2, 0, first), (2, 1, last)]:
        if number == 2:
            end = {"resolved_step": 200 + node, "leaves": f"resident set {node + 1} MB"}
            case = msgspec.structs.replace(case, state="resolved", **end)
        incidents.add(node, NodeCase(number=number, case=case))
        told += [(case.state, case.resolved_step, case.leaves) for case in incidents.take_changes()]
    assert told[2:] == [("firing", None, ""), ("resolved", 201, "resident set 2 MB")]


def test_an_alert_that_always_fires_somewhere_takes_bounded_memory() -> None:
    incidents, before = JobIncidents(), None
    for number in range(1, 1000):
        case = msgspec.structs.replace(make_case(number, "GpuThrottled", 10 * number), done=(f"stacks {number}",))
        incidents.add(number % 64, NodeCase(number=2 * number, case=case))
        if before is not None:
            over = msgspec.structs.replace(before, state="resolved", resolved_step=10 * number + 1, resolved_time=1.0)
            incidents.add((number - 1) % 64, NodeCase(number=2 * number + 1, case=over))
        before = case
    (incident,) = incidents
    assert len(incident.cases) <= CASES + 2
    (told,) = incidents.take_changes()
    assert (told.state, told.first_step, len(told.done)) == ("firing", 10, DONE)
    assert told.done[-1] == "stacks 999"


@pytest.mark.parametrize("known", [False, True], ids=["the page is known first", "the case is known first"])
def test_a_page_keeps_its_severity_though_the_case_that_was_so_severe_is_not_handed_in_again(known: bool) -> None:
    """Another severity is another alert for a webhook, and the first one would never end."""
    one = msgspec.structs.replace(make_case(1, "LossSpike", 100), severity="warning")
    page = msgspec.structs.replace(one, id="n0-0.1", severity="critical")
    incidents = JobIncidents([] if known else [Page(page, (0, 1))])
    incidents.add(0, NodeCase(number=1, case=one))
    if known:
        incidents.add_page(page)
    (told,) = incidents.take_changes()
    assert (told.id, told.severity) == ("n0-0.1", "critical")


def test_an_alert_costs_no_more_where_those_before_it_were_on_many_nodes() -> None:
    def count_lines_of_an_alert(nodes: int) -> float:
        incidents = JobIncidents()
        for number in range(1, 31):
            add_ended(incidents, number, nodes)
        incidents.take_changes()
        return count_lines(lambda: add_ended(incidents, 31, 1))

    assert count_lines_of_an_alert(64) < 1.5 * count_lines_of_an_alert(4)


@pytest.mark.slow
def test_incidents_of_all_nodes_that_are_over_take_bounded_memory() -> None:
    incidents, nodes, number = JobIncidents(), 64, 0
    for number in range(1, ENDED_CASES // nodes + 10):
        add_ended(incidents, number, nodes)
        incidents.take_changes()
    assert sum(len(incident.cases) for incident in incidents) <= ENDED_CASES + nodes
    assert incidents.list_views()[-1].case.id == f"n0-0.{number}"


def add_ended(incidents: JobIncidents, number: int, nodes: int) -> None:
    """Add an incident that fired on each node, and is over."""
    case = msgspec.structs.replace(
        make_case(number, "LossSpike", 1000 * number), problem="training", problem_id=f"0.{number}"
    )
    over = msgspec.structs.replace(case, state="resolved", resolved_step=case.step + 5, resolved_time=case.time + 5.0)
    for node in range(nodes):
        incidents.add(node, NodeCase(number=number, case=over))
