"""Real node daemons on loopback: the coordinator's daemon is killed, and another node takes over with the same keys."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.job import HIGH, LOW, RUN, NodeDaemon, free_address, node_daemon
from tests.cluster.test_nodes import received
from tests.cluster.test_rollback_ranks import LIMIT_SECONDS, Job
from tests.notify.consumer import Consumer
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def coordinates(daemon: NodeDaemon) -> bool:
    return bool(daemon.job()["view"] == "coordinator")


def follows(daemon: NodeDaemon, address: str) -> bool:
    """Whether the daemon hears a coordinator that listens at the address and knows of the daemon."""
    job = daemon.job()
    return (job["view"], job["address"]) == ("joined", address) and daemon.states().get(daemon.node) == "alive"


def misses(daemon: NodeDaemon, node: int) -> bool:
    return daemon.states().get(node) == "silent"


@contextlib.contextmanager
def three_nodes(
    folder: Path, options: tuple[str, ...]
) -> Iterator[tuple[list[str], contextlib.ExitStack, list[NodeDaemon]]]:
    """Run daemons of three nodes, each of which may be the coordinator. The stack also cleans up killed ones."""
    addresses = [free_address() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(node_daemon(n, 3, ",".join(addresses), folder, *options)) for n in range(3)]
        until(functools.partial(coordinates, nodes[0]), "node 0 to be the coordinator")
        for node in nodes[1:]:
            until(functools.partial(follows, node, addresses[0]), f"node {node.node} to hear it")
        yield addresses, stack, nodes


def test_the_next_node_goes_on_under_the_same_key_and_the_old_one_comes_back_as_a_plain_node(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with three_nodes(tmp_path, options) as (addresses, stack, nodes):
        nodes[2].rank.steps(0, [LOW, HIGH])
        pages = [ops.next()]
        until(lambda: nodes[1].job()["incidents"], "node 1 to know the incident")
        nodes[0].process.kill()
        nodes[0].process.wait()

        until(functools.partial(coordinates, nodes[1]), "node 1 to take over")
        until(functools.partial(follows, nodes[2], addresses[1]), "node 2 to follow it")
        for node in nodes[1:]:
            until(functools.partial(misses, node, 0), f"node {node.node} to say that node 0 is silent")
        nodes[2].rank.steps(2, [LOW])
        while pages[-1]["status"] == "firing":  # the next one cannot know what of it was delivered
            pages.append(ops.next())
        alerts = [page["alerts"][0] for page in pages]
        assert len({alert["annotations"]["incident"] for alert in alerts}) == 1
        assert {alert["labels"]["run_id"] for alert in alerts} == {RUN}
        assert len({alert["fingerprint"] for alert in alerts}) == 1
        assert len({page["groupKey"] for page in pages}) == 1

        again = stack.enter_context(node_daemon(0, 3, ",".join(addresses), tmp_path, *options))
        until(functools.partial(follows, again, addresses[1]), "node 0 to follow node 1")
        assert coordinates(nodes[1])
        again.rank.steps(0, [LOW] * 9 + [HIGH])
        fired = ops.next()["alerts"][0]
        assert (fired["labels"]["run_id"], fired["annotations"]["summary"][-8:]) == (RUN, "(node 0)")
        assert again.job()["view"] == "joined"
        assert received(ops) == []


def train_apart(nodes: Sequence[NodeDaemon], first: int, count: int) -> None:
    """Have all ranks do `count` steps; the parameters of the last one differ from the others'."""
    for node in nodes:
        checksum = 7.0 if node is nodes[-1] else 5.0
        node.rank.steps(first, [LOW] * count, replica_checksum=[checksum] * count)


def test_what_an_earlier_coordinator_judged_goes_on_under_its_key_when_that_comes_back_as_a_plain_node(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with three_nodes(tmp_path, options) as (addresses, stack, nodes):
        train_apart(nodes, 0, 8)
        first = ops.next()["alerts"][0]
        assert first["labels"]["alertname"] == "ReplicaDivergence"
        until(lambda: nodes[1].job()["incidents"], "node 1 to know the incident")
        nodes[0].process.kill()
        nodes[0].process.wait()
        until(functools.partial(coordinates, nodes[1]), "node 1 to take over")

        again = stack.enter_context(node_daemon(0, 3, ",".join(addresses), tmp_path, *options))
        until(functools.partial(follows, again, addresses[1]), "node 0 to follow node 1")
        assert [case["state"] for case in again.cases()] == ["firing"]
        train_apart([again, *nodes[1:]], 8, 8)
        until(nodes[1].cases, "node 1 to find it, too")
        assert [incident["id"] for incident in nodes[1].job()["incidents"]] == [first["annotations"]["incident"]]
        alerts = [page["alerts"][0] for page in received(ops)]
        assert {alert["annotations"]["incident"] for alert in alerts} <= {first["annotations"]["incident"]}
        assert {alert["status"] for alert in alerts} <= {"firing"}


def test_one_node_of_three_takes_no_role_and_tells_of_itself_alone(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with three_nodes(tmp_path, options) as (_, _, nodes):
        for node in nodes[:2]:
            node.process.kill()
        nodes[2].rank.steps(0, [LOW, HIGH])
        page = ops.next()
        assert page["alerts"][0]["labels"]["run_id"] == f"{RUN}@node-2"
        assert nodes[2].job()["view"] == "alone"
        assert received(ops) == []


@pytest.mark.timeout(300)
def test_node_1_takes_over_where_the_nodes_found_each_other_by_the_store(
    ops: Consumer, private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ranks of torchrun on three nodes, which start their daemons themselves."""
    monkeypatch.setenv("OPS", ops.url)
    settings = "[grouping]\nwait = '0s'\n[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
    job = Job(private_places, nodes=3, settings=settings)

    def views(node: int) -> tuple[str, str]:
        known = job.status(node).get("job") or {}
        return known.get("view", ""), known.get("address", "")

    try:
        until(lambda: "rollback is armed on all ranks" in job.said(0), "the nodes to meet", LIMIT_SECONDS)
        found = re.search(
            r"meet at (\S+), found by the process group's store; node 1 takes over, at (\S+)", job.said(0)
        )
        assert found is not None

        def takes_over() -> bool:
            job.kill_daemon(0)  # and again those that its ranks start
            return views(1) == ("coordinator", found[2]) and views(2) == ("joined", found[2])

        until(takes_over, "node 1 to take over", LIMIT_SECONDS)
        (private_places / "break").touch()
        while (page := ops.next()["alerts"][0]["labels"])[
            "alertname"
        ] != "Broken":  # on a busy machine there are others
            pass
        assert page["run_id"] == "job-ddp"
        until(lambda: views(0) == ("joined", found[2]), "node 0 to come back as a plain node", LIMIT_SECONDS)
        assert "internal fault" not in "".join(job.said(node) for node in range(3))
    finally:
        job.close()
