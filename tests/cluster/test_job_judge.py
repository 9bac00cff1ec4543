"""What a former coordinator does about the cases that it judged for the ranks of all nodes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.rollback_state import Outcome
from sentinel.cluster.membership import Membership
from sentinel.daemon.job.judge import LEFT_SECONDS, LEFT_TO_COORDINATOR, CoordinatorJudge, NodeJudge
from sentinel.daemon.run.incidents import JobJudgement
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine import load_rules
from sentinel.runs import Run
from tests.diagnose.test_evidence import case
from tests.run_parts import watch_run


def test_what_this_node_opened_as_the_coordinator_stays_open_until_the_next_one_had_the_time_to_find_it() -> None:
    watch = watch_run(Run("train", "r1", 0.0))
    opened = msgspec.structs.replace(case("ReplicaDivergence"), id="job-0.1", of_job=True)
    own = msgspec.structs.replace(case("LossSpike"), id="0.1")
    watch.incidents.log.add([opened, own])
    judge = NodeJudge(watch.context, watch.incidents, 0)
    for moment in (1000.0, 1000.0 + LEFT_SECONDS):
        judge.confirm(-1, moment)
        assert [opened.state, own.state] == ["firing", "firing"]
    judge.confirm(-1, 1001.0 + LEFT_SECONDS)
    assert [opened.state, own.state] == ["resolved", "firing"]
    assert opened.done[-1] == LEFT_TO_COORDINATOR


RULES = load_rules(
    "group: mine\nsignals: {tokens: how many}\nrules:\n"
    "  - {alert: Behind, scope: rank, severity: critical, expr: 'across(tokens, \"max\") > 2 * tokens',"
    " actions: [rollback], annotations: {summary: s}}\n"
    "  - {alert: Slow, scope: rank, expr: 'step_seconds > 2 * across(step_seconds, \"mean\")',"
    " annotations: {summary: s}}\n",
    "rules.yaml",
).rules
IDENTITY = wire.Identity(
    run="r", run_id="r1", rank=0, world_size=2, local_world_size=1, node=0, pid=1, session="s"
)  # fmt: skip


def be_a_node(watch: WatchedRun) -> JobJudgement:
    return NodeJudge(watch.context, watch.incidents, 0)


def be_the_coordinator(watch: WatchedRun) -> JobJudgement:
    return CoordinatorJudge(
        watch.context, watch.incidents, IDENTITY, cast("Membership", SimpleNamespace(list_nodes=list))
    )


@pytest.mark.parametrize("become", [be_a_node, be_the_coordinator])
def test_a_rollback_ends_what_an_earlier_coordinator_opened_here(become: Callable[[WatchedRun], JobJudgement]) -> None:
    """An open one would count as trouble: no snapshot after its first sign could be used for a rollback, or written."""
    watch = watch_run(Run("train", "r1", 0.0), RULES)
    behind, asked, slow = (
        msgspec.structs.replace(case(alert), id=f"job-0.{number}", of_job=True)
        for number, alert in enumerate(["Behind", "Behind", "Slow"], start=1)
    )
    watch.incidents.log.add([behind, asked, slow])
    watch.incidents.job = become(watch)
    done = "rolled back to step 5 at the exit of step 9"
    asked.done = (done,)
    watch.incidents.rewind([asked], Outcome(True, "Behind", to=5, at=9), done)
    assert [one.state for one in (behind, asked, slow)] == ["rolled_back", "rolled_back", "firing"]
    assert behind.done == asked.done == (done,)
    assert {one.state for one in watch.incidents.list_asking("rollback")} == {"rolled_back"}
