"""Real ranks on two nodes, each with its own daemon and `sentinel run`, leave together by a rule that fires on one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sentinel.errors import EXIT_BY_RULE
from sentinel.node import paths
from sentinel.store import History
from tests.cluster.job import free_address
from tests.cluster.test_rollback_ranks import LIMIT_SECONDS, NODES, Job
from tests.programs import stopping
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

RUN = (sys.executable, "-m", "sentinel", "run", "--restarts", "3", "--pause", "0.1", "--")


def meets(job: Job) -> bool:
    """Whether the nodes hear their coordinator."""
    views = [job.status(node).get("job", {}).get("view") for node in range(NODES)]
    return views == ["coordinator", "joined"]


def kept_done(job: Job, node: int) -> list[str]:
    """Return what was done about the alerts of a node, from its history."""
    os.environ["SENTINEL_STATE"] = str(job.root / f"state{node}")
    (path,) = paths.histories()
    with History(path) as history:
        return [text for case in history.incidents() for text in case["done"]]


def begin_job(root: Path, way: str) -> Job:
    """Return a job whose nodes have met, and judge steps."""
    job = Job(
        root, way=way, meeting=free_address(), within=[RUN] * NODES, program="stopping_nodes", text=stopping.RULES
    )  # fmt: skip
    try:
        until(lambda: meets(job), "the nodes to meet", LIMIT_SECONDS)
        until(lambda: "loss" in job.status(1).get("values", {}), "steps to be judged", LIMIT_SECONDS)
    except BaseException:
        job.close()
        raise
    return job


@pytest.mark.parametrize(("signal", "alert"), [("told", "Told"), ("bad", "Bad")])
def test_a_rule_of_one_node_ends_the_ranks_of_all_at_one_step(
    signal: str, alert: str, private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `stop_on`, with a collective in `on_stop`; by the rule's action, with functions that never return."""
    monkeypatch.setenv("SENTINEL_STATE", "")
    job = begin_job(private_places, signal)
    try:
        (job.root / "break").touch()
        statuses = [node.wait(LIMIT_SECONDS) for node in job.nodes]
    finally:
        job.close()
    said = [" ".join(job.said(node).split()) for node in range(NODES)]
    assert statuses == [EXIT_BY_RULE] * NODES, said
    for words in said:
        assert f", by {alert}: " in words.partition("not started again: stopped at step ")[2], words
        assert "internal fault" not in words
    if signal == "told":
        ranks = [json.loads((job.root / f"{rank}.json").read_text()) for rank in range(NODES)]
        assert ranks[0] == ranks[1]
        assert (ranks[0]["status"], ranks[0]["sum"], ranks[0]["step"]) == (EXIT_BY_RULE, 3, ranks[0]["steps"] - 1)
        done = f"stopped: all ranks ended training at the exit of step {ranks[0]['step']}"
        assert [kept_done(job, node) for node in range(NODES)] == [[], [done]]
    else:
        assert "on_stop took over 1 s on rank 0" in said[0]
        assert "on_stop took over 1 s on rank 1" in said[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", ["asked", "leaving"])
def test_a_daemon_that_is_killed_meanwhile_leaves_all_ranks_stopped_at_one_step(
    moment: str, private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed are the coordinator's daemon once the alert fired, or those of both nodes while `on_stop` runs."""
    monkeypatch.setenv("SENTINEL_STATE", "")
    job = begin_job(private_places, "told")
    try:
        (job.root / "hold").touch()
        (job.root / "break").touch()
        if moment == "asked":
            until(
                lambda: job.status(1).get("incidents") or (job.root / "leaving.1").exists(), "the alert", LIMIT_SECONDS
            )
            job.kill_daemon(0)
        until(lambda: all((job.root / f"leaving.{rank}").exists() for rank in range(NODES)), "the stop", LIMIT_SECONDS)
        if moment == "leaving":
            for node in range(NODES):
                job.kill_daemon(node)
        (job.root / "hold").unlink()
        statuses = [node.wait(LIMIT_SECONDS) for node in job.nodes]
    finally:
        job.close()
    said = [" ".join(job.said(node).split()) for node in range(NODES)]
    ranks = [json.loads((job.root / f"{rank}.json").read_text()) for rank in range(NODES)]
    assert ranks[0] == ranks[1], said
    assert (ranks[0]["status"], ranks[0]["sum"]) == (EXIT_BY_RULE, 3), said
    assert statuses == [EXIT_BY_RULE] * NODES, said
    assert "internal fault" not in "".join(said)
