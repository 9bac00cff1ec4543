"""Causes of alerts that ranks of other nodes decide: made-up positions, and real daemons with ranks that answer."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.cli import job_status
from sentinel.cluster.protocol.coordinator import SETTLE_SECONDS, Coordinator
from sentinel.cluster.protocol.election import next_epoch
from sentinel.cluster.protocol.job_incident import JobIncidents, Page
from sentinel.cluster.protocol.messages import Events, NodeCase, NodeState, Pulse, WorkReport
from sentinel.cluster.protocol.work import find_work_elsewhere
from sentinel.config.receivers import Grouping
from sentinel.daemon.job.standstill import JobCauses, Positions, explain_over_nodes
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.notify.entry import Entry
from sentinel.runs import Rank
from sentinel.wire.flight_recorder import Flight
from sentinel.wire.heartbeat_page import PAGE, Kind, Stall, pack_heartbeat
from tests.cluster.simulation import make_case
from tests.cluster.test_views import WAITING, answering, issued, job
from tests.daemon.test_stalls import BEAT
from tests.diagnose.test_collectives import entry, upto
from tests.hang.processes import SOON
from tests.notify.consumer import Consumer
from tests.waiting import until

EPOCH = next_epoch(0, 0)
IN_USER_CODE = """\
Current thread 0x0000000000000001 (most recent call first):
  File "/home/me/data.py", line 7 in load
  File "/home/me/train.py", line 9 in main
"""
WAITS = upto(8, entry(9, done=False))
FOUND = Finding("rank 3 never came", "high")


def stand(number: int, flight: Flight | None, dump: str = "") -> Rank:
    """Return a standing rank, one of four, with two on each node."""
    identity = wire.Identity(
        run="r", run_id="r-1", rank=number, world_size=4, pid=1, session="s", node=number // 2,
        hostname=f"host{number // 2}",
    )  # fmt: skip
    rank = Rank(wire.Hello(version="1", identity=identity, next_seq=8), 0.0)
    rank.stall, rank.flight, rank.dump = Stall(70.0, 60.0, Kind.BLOCKED, 70.0), flight, dump
    return rank


def explain(*ranks: Rank, alert: str = "Hang", unasked: dict[int, str] | None = None) -> Finding:
    positions = Positions({rank.identity.rank: rank for rank in ranks}, unasked or {}, [])
    found = explain_over_nodes(alert, [0, 1], positions)
    assert found is not None
    return found


def world(flight: Flight) -> Flight:
    """Return the flight record with groups of all four ranks."""
    groups = {name: msgspec.structs.replace(group, ranks=(0, 1, 2, 3)) for name, group in flight.groups.items()}
    return msgspec.structs.replace(flight, groups=groups)


def test_the_rank_of_another_node_that_never_came_is_named_with_its_place() -> None:
    found = explain(*(stand(n, world(WAITS)) for n in range(3)), stand(3, world(upto(8)), IN_USER_CODE))
    assert found.cause == (
        "rank 3 never came to all_reduce of 5, number 9, in which ranks 0 to 2 wait: rank 3 waits, and uses no "
        "processor at /home/me/data.py:7 in load; rank 3 is on node 1 (host1)"
    )
    assert found.confidence == "high"


def test_a_rank_that_died_on_another_node_is_the_cause() -> None:
    dead = stand(3, world(upto(8)))
    dead.state = "lost"
    found = explain(*(stand(n, world(WAITS)) for n in range(3)), dead)
    assert "rank 3 never came to all_reduce of 5, number 9" in found.cause
    assert found.cause.endswith("rank 3 has died without a word; rank 3 is on node 1 (host1)")
    assert found.confidence == "high"


def test_the_cause_names_a_silent_node_whose_ranks_the_others_wait_for() -> None:
    silence = "node 1 (host1): silent for 12 s"
    found = explain(*(stand(n, world(WAITS)) for n in range(2)), unasked=dict.fromkeys((2, 3), silence))
    assert found.cause == f"ranks 0, 1 wait in all_reduce of 5, number 9, for ranks 2, 3: rank 2 is on {silence}"
    assert found.confidence == "low"
    assert f"what ranks 2, 3 did: {silence}" in found.missing


def test_which_rank_issued_another_collective_is_judged_by_the_majority_of_all_nodes() -> None:
    """On its own node rank 2 would be one of two, and the first."""
    other = upto(8, entry(9, "broadcast"))
    same = upto(8, entry(9))
    ranks = [stand(n, world(other if n == 2 else same)) for n in range(4)]
    found = explain(*ranks, alert="CollectiveDesync")
    assert found.cause.endswith(
        "ranks 0, 1, 3 issued all_reduce of 5, rank 2 broadcast of 5; rank 2 is on node 1 (host1)"
    )


def test_no_cause_is_given_where_ranks_have_gone_on() -> None:
    positions = Positions({n: stand(n, None) for n in range(4)}, {}, [])
    assert explain_over_nodes("CollectiveDesync", [], positions) is None


def hang(number: int, step: int = 100) -> Case:
    """Return a firing Hang of a node, which opens a problem."""
    identity = f"0.{number}"
    case = msgspec.structs.replace(make_case(number, "Hang", step), problem="progress", problem_id=identity)
    return msgspec.structs.replace(case, diagnosis=Finding("rank 0 waits", "medium", remedy="look"))


def lost(number: int) -> Case:
    return msgspec.structs.replace(hang(number), alert="RankLost", summary="RankLost")


def test_an_incident_waits_for_its_cause_and_no_longer_than_allowed() -> None:
    incidents = JobIncidents()
    incidents.add(0, NodeCase(number=0, case=hang(1)))
    (incident,) = incidents.take_unexplained()
    incidents.add(1, NodeCase(number=1, case=hang(1)))
    incidents.add(1, NodeCase(number=2, case=make_case(2, "LossSpike", 100)))
    assert [case.alert for case in incidents.take_changes()] == ["LossSpike"]
    assert incidents.take_unexplained() == [], "asked once"
    incidents.explain(incident, FOUND)
    (case,) = incidents.take_changes()
    assert (case.diagnosis.cause, case.diagnosis.remedy) == ("rank 3 never came", "look")
    assert case.summary.endswith("(node 0; the same on node 1)")

    incidents.add(0, NodeCase(number=0, case=msgspec.structs.replace(hang(3), alert="CollectiveDesync")))
    (late,) = incidents.take_unexplained()
    assert incidents.take_changes() == []
    assert [case.diagnosis.cause for case in incidents.take_changes(leaving=True)] == ["rank 0 waits"]
    late.awaits_verdict = False
    incidents.explain(late, FOUND)
    assert [case.diagnosis.cause for case in incidents.take_changes()] == ["rank 3 never came"]


def pulse(node: int, last: int) -> Pulse:
    """Return the pulse of a node that followed the beat of node 0 with stamp 0 s."""
    return Pulse(node=node, incarnation=1, hostname="h", attempt=0, step=0, last=last, epoch=EPOCH, stamp=0.0)


def test_what_waits_for_its_cause_is_not_acknowledged() -> None:
    """If the coordinator dies meanwhile, the node hands the case in again."""
    coordinator = Coordinator(0, 2, EPOCH, 0.0)
    for node in (0, 1):
        coordinator.take_pulse(pulse(node, node), 0.0)
        cases = (NodeCase(number=1, case=hang(1)),) if node else ()
        coordinator.take_events(Events(node=node, incarnation=1, after=0, upto=node, cases=cases))
    (incident,) = coordinator.take_unexplained(1.0)
    assert coordinator.take_changes(1.0) == []
    assert [state.applied for state in coordinator.list_nodes(1.0)] == [0, 0]
    coordinator.incidents.explain(incident, None)
    assert [case.diagnosis.cause for case in coordinator.take_changes(2.0)] == ["rank 0 waits"]
    assert [state.applied for state in coordinator.list_nodes(2.0)] == [0, 1]


def test_a_coordinator_that_is_new_asks_once_the_nodes_have_handed_in_what_they_know() -> None:
    coordinator = Coordinator(0, 3, EPOCH, 0.0)
    for node in (0, 1):
        coordinator.take_pulse(pulse(node, 1 - node), 0.0)
    coordinator.take_events(Events(node=0, incarnation=1, after=0, upto=1, cases=(NodeCase(number=1, case=hang(1)),)))
    assert coordinator.take_unexplained(1.0) == []
    for node in (0, 1):
        later = msgspec.structs.replace(pulse(node, 1 - node), stamp=SETTLE_SECONDS)
        coordinator.take_pulse(later, SETTLE_SECONDS)
    assert len(coordinator.take_unexplained(SETTLE_SECONDS + 1.0)) == 1


def test_a_cause_that_comes_after_the_page_is_in_the_next_one_and_sends_none() -> None:
    entry, case = Entry(receiver="ops", alert="Hang"), hang(1)
    entry.put(case, 0.0, Grouping())
    entry.record_delivery([case], 1.0, Grouping())
    entry.put(msgspec.structs.replace(case, diagnosis=FOUND), 2.0, Grouping())
    assert not entry.pending
    assert entry.cases[case.id].diagnosis == FOUND


def test_ranks_are_not_asked_of_an_incident_of_an_earlier_attempt() -> None:
    incidents = JobIncidents()
    incidents.add(0, NodeCase(number=0, case=hang(1)))
    (incident,) = incidents.take_unexplained()
    watch: Any = SimpleNamespace(run=SimpleNamespace(attempt=SimpleNamespace(number=3)))
    membership: Any = None
    JobCauses(watch, membership).begin(incidents, incident)
    assert [case.diagnosis.cause for case in incidents.take_changes()] == ["rank 0 waits"]


def test_63_hangs_and_a_lost_rank_are_one_problem_that_the_lost_rank_opened() -> None:
    incidents = JobIncidents()
    incidents.add(5, NodeCase(number=1, case=lost(1)))
    for node in range(63):
        incidents.add(node, NodeCase(number=2, case=hang(2)))
    opener, consequence = incidents.take_changes()
    assert (opener.alert, opener.id, opener.parent, opener.problem_id) == ("RankLost", "n5-0.1", "", "n5-0.1")
    assert (consequence.alert, consequence.parent, consequence.problem_id) == ("Hang", "n5-0.1", "n5-0.1")
    views = incidents.list_views()
    again = JobIncidents(Page(view.case, ()) for view in views)
    again.add(0, NodeCase(number=1, case=hang(2)))  # a coordinator that is new: in another order
    again.add(5, NodeCase(number=1, case=lost(1)))
    assert {(case.id, case.problem_id) for case in again.take_changes()} == {
        (opener.id, opener.problem_id),
        (consequence.id, consequence.problem_id),
    }


def test_what_comes_long_after_on_another_node_is_a_problem_of_its_own() -> None:
    incidents = JobIncidents()
    over = msgspec.structs.replace(lost(1), state="resolved", resolved_step=120, resolved_time=120.0)
    incidents.add(1, NodeCase(number=1, case=over))
    incidents.add(0, NodeCase(number=1, case=hang(1, 900)))
    assert [case.problem_id for case in incidents.take_changes()] == ["n1-0.1", "n0-0.1"]


def test_work_on_other_nodes_of_the_same_attempt_is_known() -> None:
    def state(node: int, seconds: float | None, silent: float = 0.0, attempt: int = 2) -> NodeState:
        return NodeState(
            node=node, hostname="h", incarnation=1, applied=0, state="silent" if silent else "alive",
            silent_seconds=silent, attempt=attempt, step=0, work=WorkReport(seconds=seconds, patience=100.0 + node),
        )  # fmt: skip

    states = [state(0, 0.0), state(1, None), state(2, 3.0), state(3, 0.0, silent=20.0), state(4, 0.0, attempt=1)]
    assert find_work_elsewhere(states, 0, 2, 50.0) == (47.0, 102.0)
    assert find_work_elsewhere(states, 2, 2, 50.0) == (50.0, 101.0)
    assert find_work_elsewhere(states[1:2], 0, 2, 50.0) == (-math.inf, 101.0)


@pytest.fixture
def options(ops: Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of a daemon with a Hang rule that fires after 3 s, and a receiver that gets it at once, once."""
    monkeypatch.setenv("OPS", ops.url)
    rules, settings = tmp_path / "rules.yaml", tmp_path / "sentinel.toml"
    rules.write_text(SOON)
    settings.write_text(
        "[daemon]\nhttp = 'off'\n[grouping]\nwait = '0s'\n"
        "[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
    )
    return ("--config", str(settings), "--rules", str(rules))


@pytest.fixture
def pages() -> Iterator[list[int]]:
    """Heartbeat pages of three ranks, which do not stand still yet."""
    found = [os.memfd_create(PAGE) for _ in range(3)]
    beat(found, progressed=time.monotonic() + 600.0)
    yield found
    for page in found:
        os.close(page)


def beat(pages: list[int], *, progressed: float, paused: int = 0) -> None:
    for page in pages:
        found = BEAT._replace(beat=time.monotonic() + 600.0, progressed=progressed, paused=paused)
        os.pwrite(page, pack_heartbeat(found), 0)


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_of_a_hang_names_the_rank_of_another_node(
    ops: Consumer, options: tuple[str, ...], pages: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    flights = {node: issued(2 if node == 2 else 3) for node in range(3)}
    with job(tmp_path, options, 3, pages) as nodes, answering(*nodes, flights=flights):
        beat(pages, progressed=time.monotonic() - 8.0)
        (alert,) = ops.next()["alerts"]
        assert alert["labels"]["alertname"] == "Hang"
        assert WAITING in str(alert)
        assert "rank 2 is on node 2 (host2)" in str(alert)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_wait_for_one_of_another_node_in_a_phase_do_not_hang_until_that_stands_too(
    ops: Consumer, options: tuple[str, ...], pages: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    (tmp_path / "rules.yaml").write_text(SOON.replace("> 3", "> 15"))  # nodes hear of each other once a second or two
    with job(tmp_path, options, 2, pages[:2]) as nodes, answering(*nodes):
        beat(pages[:1], progressed=time.monotonic(), paused=1)
        beat(pages[1:], progressed=time.monotonic() + 10.0)  # by when node 1 knows what rank 0 does

        def find_stall() -> dict[str, float]:
            (rank,) = nodes[1].run()["ranks"]
            stall: dict[str, float] = rank["stall"]
            return stall

        until(lambda: find_stall()["quiet_seconds"] > 20.0, "rank 1 to be quiet for longer than the rule allows")
        assert find_stall()["seconds"] < 15.0
        assert [(case["alert"], case["summary"], case["state"]) for case in nodes[1].cases()] == []
        beat(pages[:1], progressed=time.monotonic())
        assert ops.next()["alerts"][0]["labels"]["alertname"] == "Hang"


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_of_a_hang_says_which_node_is_silent(
    ops: Consumer, options: tuple[str, ...], pages: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    flights = {node: issued(3) for node in range(3)}
    with job(tmp_path, options, 3, pages) as nodes, answering(*nodes, flights=flights):
        nodes[2].process.send_signal(signal.SIGSTOP)
        beat(pages, progressed=time.monotonic() - 8.0)
        (alert,) = ops.next()["alerts"]
        waits = "in all_reduce of 4, number 3, for"
        assert f"ranks 0, 1 wait {waits} rank 2: rank 2 is on node 2 (host2)" in str(alert)
        (case,) = nodes[0].cases()
        assert case["diagnosis"]["cause"].endswith(
            f"rank 0 waits {waits} ranks 1, 2: rank 1 is on another node, which was not asked"
        )
        nodes[2].process.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("alone", [0, 1], ids=["coordinator", "node"])
def test_the_page_of_a_node_that_is_cut_off_says_for_how_long_the_others_are_not_heard(
    ops: Consumer, options: tuple[str, ...], pages: list[int], tmp_path: Path, alone: int
) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    with job(tmp_path, options, 3, pages) as nodes, answering(nodes[alone], flights={alone: issued(3)}):
        others = [daemon for daemon in nodes if daemon.node != alone]
        for daemon in others:
            daemon.process.send_signal(signal.SIGSTOP)
        until(lambda: nodes[alone].job()["view"] == "alone", "the node to know that it is alone")
        beat(pages, progressed=time.monotonic() - 8.0)
        (alert,) = ops.next()["alerts"]
        first = others[0].node
        said = rf"rank {first} is on node {first} \(host{first}\): (silent|not heard of) for (\d+) s"
        found = re.search(said, alert["annotations"]["description"])
        assert found is not None, alert
        assert int(found[2]) > 25, "it is alone after 30 s"
        (line,) = (line for line in job_status.lines(nodes[alone].job()) if f"host{first}, " in line)
        assert re.search(r"(silent|not heard of) for \d+ s", line)
        for daemon in others:
            daemon.process.send_signal(signal.SIGCONT)
