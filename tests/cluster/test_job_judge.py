"""What a former coordinator does about the cases that it judged over the ranks of all nodes."""

from __future__ import annotations

import msgspec

from sentinel.daemon.job_judge import LEFT_SECONDS, LEFT_TO_COORDINATOR, NodeJudge
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
