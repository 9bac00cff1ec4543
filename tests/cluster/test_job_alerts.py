"""Real node daemons of one job on loopback: rules over the ranks of all nodes are judged once, by the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.node.question import ask_daemon
from tests.cluster.job import NodeDaemon, free_address, node_daemon
from tests.daemon.simulated import ended
from tests.notify.consumer import Consumer
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = pytest.mark.processes

TIMES = {"step_seconds": 0.5, "forward_seconds": 0.1, "data_seconds": 0.01}


@pytest.fixture
def options(ops: Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of a daemon with stock rules, one of the user's over the run, and one receiver."""
    monkeypatch.setenv("OPS", ops.url)
    (tmp_path / "rules.yaml").write_text(
        "group: mine\nrules:\n  - alert: MeanTooHigh\n    expr: across(loss, 'mean') > 100\n    severity: warning\n"
    )
    settings = tmp_path / "sentinel.toml"
    settings.write_text(
        "[daemon]\nhttp = 'off'\n[grouping]\nwait = '0s'\ninterval = '0s'\n"
        "[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
    )
    return ("--config", str(settings), "--rules", str(tmp_path / "rules.yaml"))


@contextlib.contextmanager
def two_nodes(folder: Path, options: tuple[str, ...]) -> Iterator[tuple[NodeDaemon, NodeDaemon]]:
    address = free_address()
    with node_daemon(0, 2, address, folder, *options) as first, node_daemon(1, 2, address, folder, *options) as second:
        until(lambda: len(second.states()) == 2, "the nodes to hear each other")
        yield first, second


def train(daemon: NodeDaemon, first: int, count: int, loss: float = 2.0, **columns: float) -> None:
    """Have the daemon's rank send `count` equal steps, from `first` on."""
    columns = {**TIMES, "backward_seconds": 0.2, **columns}
    daemon.rank.steps(first, [loss] * count, **{name: [value] * count for name, value in columns.items()})


def list_incidents(daemon: NodeDaemon) -> list[dict[str, Any]]:
    """Return the incidents of the node's own daemon."""
    found: list[dict[str, Any]] = ask_daemon(daemon.path, "incidents")
    return found


@pytest.mark.slow
def test_the_slow_rank_of_another_node_is_one_incident_that_names_it(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with two_nodes(tmp_path, options) as (coordinator, node):
        train(coordinator, 0, 200)
        train(node, 0, 200, backward_seconds=0.01)  # the others wait in their backward pass: it does not
        page = ops.next()
        (alert,) = page["alerts"]
        assert alert["labels"]["alertname"] == "Straggler"
        assert alert["annotations"]["members"] == "rank 1"
        assert alert["annotations"]["summary"].endswith("(node 1)")
        assert "rank 1, on host1" in str(alert)
        (case,) = list_incidents(coordinator)
        assert [(member["name"], member["node"]) for member in case["members"]] == [("1", "1")]
        assert list_incidents(node) == []
        assert coordinator.job()["incidents"][0]["nodes"] == [1]


@pytest.mark.slow
def test_what_differs_between_nodes_is_found_and_what_is_judged_over_the_mean_is_not_judged_twice(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with two_nodes(tmp_path, options) as (coordinator, node):
        for daemon in (coordinator, node):
            train(daemon, 0, 8, loader_batches=100.0 - daemon.node, replica_checksum=5.0)
        pages = [ops.next()]
        train(coordinator, 8, 2, loss=150.0, loader_batches=100.0, replica_checksum=5.0)  # the mean is 76
        train(node, 8, 2, loader_batches=99.0, replica_checksum=7.0)
        pages.append(ops.next())
        train(coordinator, 10, 1, loss=150.0)
        train(node, 10, 1, loss=150.0)
        pages.append(ops.next())
        alerts = {page["alerts"][0]["labels"]["alertname"]: page["alerts"][0]["annotations"] for page in pages}
        assert list(alerts) == ["UnevenBatches", "ReplicaDivergence", "MeanTooHigh"]
        assert alerts["UnevenBatches"]["members"] == "rank 1"
        assert alerts["UnevenBatches"]["summary"].endswith("(node 1)")
        assert "ranks 0, 1 hold different parameters, after step 7" in str(alerts["ReplicaDivergence"])
        assert alerts["MeanTooHigh"]["summary"].endswith("(all nodes)")
        assert len(list_incidents(coordinator)) == 3
        assert list_incidents(node) == []


@pytest.mark.slow
def test_the_last_line_of_a_node_names_what_is_open_on_others(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with two_nodes(tmp_path, options) as (coordinator, node):
        train(coordinator, 0, 8)
        train(node, 0, 8)
        train(node, 8, 1, loss=float("nan"))
        assert ops.next()["alerts"][0]["labels"]["alertname"] == "NonFiniteLoss"
        until(coordinator.judges, "its own steps to be judged")
        rank = coordinator.rank
        rank.say(wire.Hello(version="test", identity=rank.identity, takes_closing=True))
        rank.say(wire.Goodbye(next_seq=8, reason="exception"))
        summary = rank.expect(wire.Closing).summary
        assert summary is not None
        assert summary.text.startswith(
            "no incidents on this node; open on others: critical NonFiniteLoss at step 8 (node 1)"
        )


@pytest.mark.slow
def test_a_node_that_is_cut_off_judges_for_itself_and_leaves_it_to_the_next_coordinator(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    address = free_address()
    with node_daemon(1, 2, address, tmp_path, *options) as node:
        with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
            until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
            train(node, 0, 4, loss=150.0)
            train(coordinator, 0, 4)
            coordinator.process.terminate()
            assert ended(coordinator.process) == 0
        own = ops.next()["alerts"][0]
        assert (own["labels"]["alertname"], own["labels"]["run_id"]) == ("MeanTooHigh", "job1@node-1")
        with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
            over = ops.next()["alerts"][0]
            assert (over["labels"]["run_id"], over["status"]) == ("job1@node-1", "resolved")
            assert [case["state"] for case in list_incidents(node)] == ["resolved"]
            coordinator.rank.say(wire.Goodbye())
            node.rank.say(wire.Goodbye())
