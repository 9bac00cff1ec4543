"""What people hear of a short alert where the coordinator's role moves meanwhile: real pipelines, no network, no clock
but the one in the tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sentinel.cluster.lead import Lead, restore_pages
from sentinel.cluster.local_run import LocalRun
from sentinel.cluster.orders import NodeOrders
from sentinel.cluster.own_pages import OwnPages, own_name
from sentinel.cluster.protocol.coordinator import SETTLE_SECONDS, Coordinator
from sentinel.cluster.protocol.election import LEASE_SECONDS, next_epoch
from sentinel.cluster.protocol.job_incident import JobIncident, JobIncidents
from sentinel.cluster.protocol.messages import Events, NodeCase, Pulse
from sentinel.cluster.protocol.node import ALONE_SECONDS, Node
from sentinel.config.settings import SEVERITIES
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.notify import Message, Route
from sentinel.notify.limiter import Limiter
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.pagerduty import event
from sentinel.notify.receivers.terminal import Terminal
from sentinel.notify.receivers.webhook import alert
from sentinel.notify.silences import FILE, Silences
from sentinel.runs import Run
from tests.cluster.simulation import make_case
from tests.notify.test_pipeline import SLOW, Fake, pipeline, until

RUN = "r"


class LocalCases:
    """The run on a node, with these cases. Its ranks get the question for a cause, and do not answer by themselves."""

    def __init__(self, *cases: Case) -> None:
        self._cases = cases

    def list_cases(self) -> Sequence[Case]:
        return self._cases

    def find_cause(self, incidents: JobIncidents, incident: JobIncident) -> None:
        pass

    def record_job_incident(self, case: Case, own: Sequence[str]) -> None:
        pass


def make_local(*cases: Case) -> LocalRun:
    return cast("LocalRun", LocalCases(*cases))


class Job:
    """Three nodes; the test decides which is the coordinator and which are there. All have the same receiver, which
    gets nothing before `deliver`: messages wait for further changes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.now, self.ops = folder, 0.0, Fake()
        self.nodes = [Node(number, 1, 0.0, 3) for number in range(3)]
        self.told = list[Message]()
        """All messages that were delivered."""
        self.applied = set[str]()
        """Ids of the cases of which a node heard that the coordinator has them."""

    def make_pipeline(self) -> Pipeline:
        routes = [Route("ops", self.ops, lambda _: True, 5, SLOW, Limiter())]
        return Pipeline("train", RUN, routes, outbox=Outbox(None))

    def begin_lead(self, number: int, pipeline: Pipeline) -> Lead:
        """Let a node take the coordinator's role, with this pipeline; return the role."""
        beat = self.nodes[number].beat
        pages = restore_pages(beat.incidents, "train", RUN) if beat is not None else []
        epoch = next_epoch(self.nodes[number].election.epoch, number)
        terminal = Terminal(lambda _: None, frozenset(SEVERITIES))
        notifier = Notifier(terminal, pipeline, Silences(self._folder / FILE), lambda _: None)
        coordinator = Coordinator(number, 3, epoch, self.now, pages)
        return Lead(Run("train", RUN, 0.0), notifier, make_local(), cast("NodeOrders", None), coordinator, set())

    def play(self, lead: Lead, there: Sequence[int], seconds: float = LEASE_SECONDS + SETTLE_SECONDS + 2) -> None:
        """Let `seconds` pass with the coordinator `lead`, while only the nodes `there` are heard."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for node in [self.nodes[number] for number in there]:
                pulse = Pulse(
                    node=node.node, incarnation=1, hostname="h", attempt=0, step=0, last=node.last,
                    epoch=node.election.epoch, stamp=node.election.stamp,
                )  # fmt: skip
                lead.coordinator.take_pulse(pulse, self.now)
            for number, after in lead.coordinator.list_missing(self.now):
                lead.coordinator.take_events(self.nodes[number].list_events(after))
            lead.tell(self.now)
            beat = lead.make_beat(self.now)
            for number in there:
                self.applied.update(self.nodes[number].take_beat(beat, self.now))

    def deliver(self, pipeline: Pipeline) -> list[tuple[str, str, str]]:
        """Deliver all that waits in a pipeline; return (key of the message, id, state) of each case."""

        async def run() -> None:
            pipeline.start()
            await pipeline.close(60.0)

        asyncio.run(run())
        got, self.ops.got = self.ops.got, []
        self.told += got
        return [(one.group, case.id, case.state) for one in got for case in one.cases]


def fire(alert: str = "RankLost") -> Case:
    return msgspec.structs.replace(make_case(1, alert, 100), time=time.time())


def end(case: Case, seconds: float = 3.0) -> Case:
    times = {"resolved_step": case.step, "resolved_time": case.time + seconds}
    return msgspec.structs.replace(case, state="resolved", **times)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


BOTH = [(f"{RUN}/RankLost", "n1-0.1", "firing"), (f"{RUN}/RankLost", "n1-0.1", "resolved")]


def test_an_alert_that_ends_after_the_role_moved_is_told_as_firing_first(job: Job) -> None:
    """The former coordinator was killed before it sent anything."""
    former = job.begin_lead(0, job.make_pipeline())
    job.play(former, [0, 1, 2])
    job.nodes[1].record(fired := fire())
    job.play(former, [0, 1, 2], 2)
    assert [one.id for one in job.nodes[1].beat.incidents] == ["n1-0.1"]  # type: ignore[union-attr]
    job.nodes[1].record(end(fired))
    job.now += LEASE_SECONDS
    pipeline = job.make_pipeline()
    job.play(job.begin_lead(1, pipeline), [1, 2])
    assert job.deliver(pipeline) == BOTH


def test_an_alert_that_no_coordinator_heard_of_in_time_is_told_as_firing_first(job: Job) -> None:
    fired = fire()
    job.nodes[1].record(fired)
    job.nodes[1].record(end(fired))
    pipeline = job.make_pipeline()
    job.play(job.begin_lead(0, pipeline), [0, 1, 2])
    assert job.deliver(pipeline) == BOTH


def test_a_hang_that_is_over_before_its_cause_is_known_is_told_as_firing_first(job: Job) -> None:
    pipeline = job.make_pipeline()
    lead = job.begin_lead(0, pipeline)
    job.play(lead, [0, 1, 2])
    job.nodes[1].record(fired := fire("Hang"))
    job.play(lead, [0, 1, 2], 2)
    job.nodes[1].record(end(fired))
    job.play(lead, [0, 1, 2], 2)
    (incident,) = lead.coordinator.incidents
    lead.coordinator.incidents.explain(incident, None)
    job.play(lead, [0, 1, 2], 2)
    assert [state for _, _, state in job.deliver(pipeline)] == ["firing", "resolved"]


def test_an_alert_of_a_node_that_was_alone_meanwhile_is_told_as_firing_first(job: Job) -> None:
    fired, node, pipeline = fire(), job.nodes[1], job.make_pipeline()
    node.record(fired)
    node.record(over := end(fired))
    pages = OwnPages(pipeline, node, RUN, make_local(over))
    pages.tell_alone(ALONE_SECONDS + 1)
    key = f"{own_name(RUN, 1)}/RankLost"
    assert job.deliver(pipeline) == [(key, "0.1", "firing"), (key, "0.1", "resolved")]


def test_an_old_alert_that_a_restarted_daemon_hands_in_as_over_is_not_sent_again(job: Job) -> None:
    """An earlier coordinator told people of it, and another one has taken over since."""
    fired = fire()
    fired.time -= 300
    job.nodes[1].record(end(fired))
    pipeline = job.make_pipeline()
    job.play(job.begin_lead(0, pipeline), [0, 1, 2])
    assert job.deliver(pipeline) == BOTH[1:]


def test_a_former_coordinator_hands_in_the_end_of_what_it_had_not_sent(job: Job) -> None:
    """The case's node no longer has it, as its coordinator had the end."""
    pipeline = job.make_pipeline()
    former = job.begin_lead(0, pipeline)
    job.play(former, [0, 1, 2])
    job.nodes[1].record(fired := fire())
    job.play(former, [0, 1, 2], 2)
    job.nodes[1].record(end(fired))
    job.play(former, [0, 1, 2], 2)
    assert job.nodes[1].list_events(0).cases == ()
    OwnPages(pipeline, job.nodes[0], RUN, make_local()).withhold()
    job.now += LEASE_SECONDS
    following = job.make_pipeline()
    job.play(job.begin_lead(1, following), [0, 1, 2])
    assert job.deliver(following) == BOTH


def make_alert(message: Message) -> dict[str, Any]:
    """Return the alert that Alertmanager gets for a message."""
    return alert(message.cases[0], message)


def open_problem(number: int, step: int = 100) -> Case:
    """Return a case of that alert that opens a problem, so that it has a page of its own."""
    return msgspec.structs.replace(fire(), id=f"0.{number}", first_step=step, problem="death", problem_id=f"0.{number}")


def lose_an_id(job: Job, told: Pipeline) -> None:
    """Kill coordinator node 0 after it told people of node 2's alert, unheard by node 1, where the alert fires, too."""
    former = job.begin_lead(0, told)
    job.play(former, [0, 1, 2])
    job.nodes[2].record(open_problem(1))
    job.play(former, [0, 2], 2)
    job.nodes[1].record(open_problem(2))
    job.now += LEASE_SECONDS


def test_an_incident_that_people_do_not_know_yet_goes_on_under_the_id_that_they_know(job: Job) -> None:
    """A second page, under another key, would wake people for the same incident."""
    former, pipeline = job.make_pipeline(), job.make_pipeline()
    lose_an_id(job, former)
    assert job.deliver(former) == [("r/n2-0.1", "n2-0.1", "firing")]
    lead = job.begin_lead(1, pipeline)
    job.play(lead, [1, 2])
    assert job.deliver(pipeline) == [("r/n2-0.1", "n2-0.1", "firing")]
    (one,) = lead.coordinator.incidents
    assert (one.id, one.nodes) == ("n2-0.1", (1, 2))


def test_an_id_that_is_used_no_more_ends_under_the_keys_that_it_had(job: Job) -> None:
    """People know both ids: not all nodes had handed in what they know when the second one was sent."""
    former, pipeline = job.make_pipeline(), job.make_pipeline()
    lose_an_id(job, former)
    lead = job.begin_lead(1, pipeline)
    job.play(lead, [0, 1])
    job.play(lead, [0, 1, 2])
    assert job.deliver(former) == [("r/n2-0.1", "n2-0.1", "firing")]
    told = sorted(job.deliver(pipeline))
    assert told == [("r/n1-0.2", "n1-0.2", "firing"), ("r/n2-0.1", "n2-0.1", "resolved")]
    first, last = (one for one in job.told if one.cases[0].id == "n2-0.1")
    assert event(first, "")["dedup_key"] == event(last, "")["dedup_key"]
    assert [(one["status"], one["labels"]) for one in map(make_alert, (first, last))] == [
        ("firing", make_alert(first)["labels"]),
        ("resolved", make_alert(first)["labels"]),
    ]


def test_an_id_that_is_used_no_more_does_not_fire_once_more_where_it_waits(job: Job) -> None:
    """It waits on node 1, which was the coordinator before."""
    pipeline = job.make_pipeline()
    lose_an_id(job, job.make_pipeline())
    pipeline.put(msgspec.structs.replace(open_problem(1), id="n2-0.1", problem_id="n2-0.1"))
    lead = job.begin_lead(1, pipeline)
    job.play(lead, [0, 1])
    job.play(lead, [0, 1, 2])
    assert job.deliver(pipeline) == [("r/n1-0.2", "n1-0.2", "firing")]


def test_what_was_over_before_the_coordinator_was_heard_is_told_by_the_node_that_began_to(job: Job) -> None:
    """The node had not sent its page yet, and the coordinator leaves it to the node."""
    fired, node, own, pipeline = fire(), job.nodes[1], job.make_pipeline(), job.make_pipeline()
    node.record(fired)
    node.record(over := end(fired))
    pages = OwnPages(own, node, RUN, make_local(over))
    pages.tell_alone(ALONE_SECONDS + 1)
    job.play(job.begin_lead(0, pipeline), [0, 1, 2])
    assert job.applied == {"0.1"}
    pages.end(job.applied)
    assert job.deliver(pipeline) == []
    key = f"{own_name(RUN, 1)}/RankLost"
    assert job.deliver(own) == [(key, "0.1", "firing"), (key, "0.1", "resolved")]


def test_a_page_that_the_coordinator_has_before_it_is_sent_does_not_come_back_as_the_case_ends(job: Job) -> None:
    """The job tells people of both."""
    fired, own = fire(), job.make_pipeline()
    pages = OwnPages(own, job.nodes[1], RUN, make_local(fired))
    pages.put(fired)
    pages.end([fired.id])
    pages.put(end(fired))
    assert job.deliver(own) == []


@pytest.mark.parametrize("node", [0, 1], ids=["on the coordinator's node", "on another"])
def test_what_waited_when_the_nodes_found_each_other_goes_on_under_the_key_that_it_had(job: Job, node: int) -> None:
    """The incident fired before, under the node's own id."""
    own, fired = job.make_pipeline(), msgspec.structs.replace(open_problem(1), id="0.1")
    own.put(fired)
    pages = OwnPages(own, job.nodes[node], RUN, make_local(fired))
    pages.withhold()
    job.nodes[node].record(fired)
    pipeline = own if node == 0 else job.make_pipeline()
    lead = job.begin_lead(0, pipeline)
    if node == 0:
        pages.take_up()
    job.play(lead, [0, 1, 2])
    assert job.deliver(pipeline) == [("r/0.1", "0.1", "firing")]


def test_a_page_that_became_a_problem_of_its_own_is_handed_over_as_firing() -> None:
    """Its end in the former problem, which waits to be sent, is none of the page."""

    async def scenario() -> None:
        ops = Fake()
        made = pipeline(Outbox(None), SLOW, edits=True, ops=ops)
        opener, moved = (msgspec.structs.replace(make_case(n, "Spike", 100), problem_id="n0-0.9") for n in (9, 10))
        opener.id, moved.id = "n0-0.9", "n0-0.10"
        for one in (opener, moved):
            made.put(one)
        made.hurry()
        await until(lambda: not made.pending)
        made.put(msgspec.structs.replace(moved, problem_id="n0-0.10"))
        former = sorted(made.withdraw(), key=lambda entry: entry.key)  # as the outbox returns them
        assert [entry.problem_id for entry in former] == ["n0-0.10", "n0-0.9"]
        made.restore(former)
        node = Node(0, 1, 0.0, 3)
        OwnPages(made, node, RUN, make_local()).withhold()
        handed_in = {given.case.id: given.case.state for given in node.list_events(0).cases}
        assert handed_in == {"n0-0.9": "firing", "n0-0.10": "firing"}
        await made.close()

    asyncio.run(scenario())


def test_a_node_that_dies_as_the_coordinator_is_described_by_the_next_one() -> None:
    """Its ranks are those that all others wait for, and that a cause must name."""
    epoch, heard = next_epoch(0, 1), 100.0
    former = Coordinator(0, 3, next_epoch(0, 0), 0.0)
    for number in range(3):
        ranks = {str(number): 40}
        pulse = Pulse(node=number, incarnation=1, hostname=f"host{number}", attempt=0, step=40, ranks=ranks)
        former.take_pulse(pulse, heard)
    node = Node(1, 1, heard - LEASE_SECONDS)
    node.take_beat(former.make_beat(heard), heard)
    beat = node.recall_beat(heard + 9.0)
    assert beat is not None
    coordinator = Coordinator(1, 3, epoch, heard + 9.0, earlier=beat.nodes)
    now = heard + 12.0
    for number in (1, 2):
        pulse = Pulse(node=number, incarnation=1, hostname=f"host{number}", attempt=0, step=41, epoch=epoch, stamp=now)
        coordinator.take_pulse(pulse, now)
    states = coordinator.list_nodes(now)
    assert [(one.node, one.state, one.silent_seconds) for one in states] == [
        (0, "silent", 12.0), (1, "alive", 0.0), (2, "alive", 0.0),
    ]  # fmt: skip
    assert states[0].ranks == {"0": 40}
    assert coordinator.name_missing(now).startswith("node 0 (host0: silent for 12 s), ")
    hang = msgspec.structs.replace(make_case(1, "Hang", 40), diagnosis=Finding("rank 0 stands", "high", ranks=(0,)))
    for number in (1, 2):
        given = (NodeCase(number=1, case=hang),) if number == 1 else ()
        coordinator.take_events(Events(node=number, incarnation=1, after=0, upto=len(given), cases=given))
    coordinator.take_changes(now, leaving=True)
    assert coordinator.make_beat(now).blame == {"0": 1}
    coordinator.take_pulse(Pulse(node=0, incarnation=2, hostname="host0", attempt=0, step=42), now)
    assert [one.state for one in coordinator.list_nodes(now)] == ["alive"] * 3
