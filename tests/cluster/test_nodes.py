"""Real node daemons of one job on loopback, with real Zenoh: one page for an alert of several nodes."""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.node.question import ask_daemon
from tests.cluster.job import HIGH, LOW, RUN, NodeDaemon, free_address, node_daemon
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.notify.consumer import Consumer, check, consumer
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = pytest.mark.processes


@contextlib.contextmanager
def job(folder: Path, options: tuple[str, ...], nodes: int = 3) -> Iterator[list[NodeDaemon]]:
    """Run the daemons of all nodes, which hear each other."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(node_daemon(n, nodes, address, folder, *options)) for n in range(nodes)]
        for daemon in found:
            until(functools.partial(_knows, daemon, nodes), f"node {daemon.node} to know all")
        yield found


def _knows(daemon: NodeDaemon, nodes: int) -> bool:
    return len(daemon.states()) == nodes


def received(ops: Consumer) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(ops.received.get_nowait())
    return found


def test_an_incident_on_two_nodes_is_one_page_and_a_killed_daemon_is_reported(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with job(tmp_path, options) as (coordinator, first, second):
        assert coordinator.job()["view"] == "coordinator"
        assert any("all 3 nodes of the job have met" in notice for notice in _notices(coordinator))
        for daemon in (coordinator, first, second):
            daemon.rank.steps(0, [LOW])
        first.rank.steps(1, [HIGH])
        fired = ops.next()
        second.rank.steps(1, [HIGH])
        joined = ops.next()
        for payload in (fired, joined):
            check(payload)
        assert [page["status"] for page in (fired, joined)] == ["firing", "firing"]
        assert len({page["alerts"][0]["annotations"]["incident"] for page in (fired, joined)}) == 1
        assert {page["alerts"][0]["labels"]["run_id"] for page in (fired, joined)} == {RUN}
        assert "(node 1; the same on node 2)" in joined["alerts"][0]["annotations"]["summary"]
        until(lambda: [one["nodes"] for one in second.job()["incidents"]] == [[1, 2]], "node 2 to see the incident")

        second.process.kill()
        until(lambda: coordinator.states()[2] == "silent", "the coordinator to miss node 2")
        until(lambda: first.states()[2] == "silent", "node 1 to know it")
        shown = sentinel("status").stdout
        assert "host2, silent for" in shown
        assert any("node 2 (host2) is silent" in notice for notice in _notices(coordinator))
        first.rank.steps(2, [LOW])
        for daemon in (coordinator, first):
            daemon.rank.say(wire.Goodbye())
            assert ended(daemon.process) == 0
    assert received(ops) == []  # the killed node's case still fires: it is not said to be over


def _notices(daemon: NodeDaemon) -> Iterator[str]:
    while True:
        yield daemon.rank.expect(wire.Notice).text


@pytest.mark.slow
def test_a_coordinator_that_is_killed_and_started_again_gives_no_second_id(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    address = free_address()
    with node_daemon(1, 2, address, tmp_path, *options) as node:
        with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
            until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
            node.rank.steps(0, [LOW, HIGH])
            fired = ops.next()
            until(lambda: node.job()["incidents"], "node 1 to know the incident")
            coordinator.process.kill()
            coordinator.process.wait()
        with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
            until(lambda: coordinator.job()["incidents"], "the coordinator to know the incident again")
            node.rank.steps(2, [LOW])
            pages = [fired, ops.next()]
            if pages[-1]["status"] == "firing":  # killed before its outbox had it as delivered: sent twice
                pages.append(ops.next())
    assert [page["status"] for page in pages] == ["firing"] * (len(pages) - 1) + ["resolved"]
    assert len({page["alerts"][0]["annotations"]["incident"] for page in pages}) == 1
    assert received(ops) == []


@pytest.mark.slow
def test_a_node_with_another_secret_says_that_it_hears_no_other(options: tuple[str, ...], tmp_path: Path) -> None:
    address = free_address()
    with (
        node_daemon(0, 2, address, tmp_path, *options) as coordinator,
        node_daemon(1, 2, address, tmp_path, *options, secret="one that was mistyped") as node,
    ):
        first, second = (
            next(line for line in _notices(one) if "sends its own alerts" in line) for one in (coordinator, node)
        )
        assert first.startswith("[sentinel] this node would be the coordinator, but is in touch with only 1 of 2")
        assert second.startswith(f"[sentinel] the coordinator at {address} is not heard (for ")
        shown = sentinel("status").stdout
        assert "this node would be the coordinator" in shown


def add_slack(options: tuple[str, ...], team: Consumer, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the options with a second receiver, which gets the command that shows an incident."""
    monkeypatch.setenv("TEAM", team.url)
    settings = Path(options[1])
    told = settings.with_name("told.toml")
    told.write_text(settings.read_text() + "[[receivers]]\nname = 'team'\ntype = 'slack'\nurl_env = 'TEAM'\n")
    return (options[0], str(told), *options[2:])


@pytest.mark.slow
def test_a_node_whose_coordinator_leaves_sends_pages_of_its_own(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    with consumer() as team, node_daemon(1, 2, address, tmp_path, *add_slack(options, team, monkeypatch)) as node:
        with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
            until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
            coordinator.process.terminate()
            assert ended(coordinator.process) == 0
        until(lambda: node.job()["view"] == "alone", "node 1 to know that it is alone")
        assert "local view only" in sentinel("status").stdout
        node.rank.steps(0, [LOW, HIGH])
        own = ops.next()
        (command,) = re.findall(r"sentinel (incidents show \S+ --run [\w@-]+)", str(team.next()["blocks"]))
        assert sentinel(*command.split()).stdout.startswith("TooHigh")
        with node_daemon(0, 2, address, tmp_path, *options):
            pages = [ops.next(), ops.next()]  # the job's, and the end of its own
            assert sentinel(*command.split()).stdout.startswith("TooHigh")  # its id is the job's by now
            node.rank.steps(2, [LOW])
            over = ops.next()
    assert (own["status"], own["alerts"][0]["labels"]["run_id"]) == ("firing", f"{RUN}@node-1")
    assert {(page["alerts"][0]["labels"]["run_id"], page["status"]) for page in pages} == {
        (RUN, "firing"),
        (f"{RUN}@node-1", "resolved"),
    }
    assert (over["alerts"][0]["labels"]["run_id"], over["status"]) == (RUN, "resolved")
    assert received(ops) == []


@pytest.mark.slow
def test_what_a_node_told_by_itself_is_not_told_once_more_by_the_job_when_its_daemon_is_restarted(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    address, began = free_address(), time.time()
    with (
        node_daemon(0, 2, address, tmp_path, *options) as coordinator,
        node_daemon(1, 2, address, tmp_path, *options) as node,
    ):
        until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
        coordinator.process.terminate()
        assert ended(coordinator.process) == 0
        until(lambda: node.job()["view"] == "alone", "node 1 to know that it is alone")
        node.rank.steps(0, [LOW, HIGH], began=began)
        own = [ops.next()]
        node.rank.steps(2, [LOW], began=began)
        own.append(ops.next())
        node.process.terminate()
        assert ended(node.process) == 0
    assert [page["status"] for page in own] == ["firing", "resolved"]
    with (
        node_daemon(0, 2, address, tmp_path, *options) as coordinator,
        node_daemon(1, 2, address, tmp_path, *options) as node,
    ):
        assert [case["state"] for case in node.cases()] == ["resolved"]
        until(lambda: coordinator.states().get(1) == "alive", "the coordinator to hear node 1")
        until(lambda: coordinator.job()["nodes"][1]["applied"] > 0, "it to have what node 1 knows")
        node.rank.steps(3, [HIGH], began=began)
        assert [alert["status"] for alert in ops.next()["alerts"]] == ["firing"]
    assert received(ops) == []


@pytest.mark.slow
def test_a_node_that_is_alone_tells_people_once_that_a_problem_is_over(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"{rules.read_text()}    problem: mine\n")
    with job(tmp_path, options, nodes=2) as (coordinator, node):
        coordinator.process.terminate()
        until(lambda: node.job()["view"] == "alone", "node 1 to know that it is alone")
        node.rank.steps(0, [LOW, HIGH])
        pages = [ops.next()]
        node.rank.steps(2, [LOW])
        until(lambda: node.cases()[0]["state"] == "resolved", "the incident to be over")
        node.rank.say(wire.Goodbye())
        assert ended(node.process) == 0
    pages += received(ops)
    assert [page["status"] for page in pages] == ["firing", "resolved"]
    assert {page["alerts"][0]["labels"]["run_id"] for page in pages} == {f"{RUN}@node-1"}


@pytest.mark.slow
def test_the_last_incident_of_a_node_is_told_before_its_daemon_goes(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with job(tmp_path, options, nodes=2) as (coordinator, node):
        node.rank.steps(0, [LOW])
        until(node.judges, "a step to close")
        node.rank.steps(1, [HIGH])
        for daemon in (node, coordinator):
            daemon.rank.say(wire.Goodbye())
        assert ended(node.process) == 0
        assert ended(coordinator.process) == 0
    (page, *more) = received(ops)
    assert page["alerts"][0]["labels"]["run_id"] == RUN
    assert more == []


@pytest.mark.slow
def test_a_wrong_secret_gets_nowhere(options: tuple[str, ...], tmp_path: Path) -> None:
    address = free_address()
    with (
        node_daemon(0, 2, address, tmp_path, *options) as coordinator,
        node_daemon(1, 2, address, tmp_path, *options, secret="another secret, as long") as stranger,
    ):
        until(lambda: "secret" in stranger.job()["trouble"], "the stranger to be refused")
        until(lambda: list(coordinator.states()) == [0], "the coordinator to know itself alone")
        assert stranger.job()["nodes"] == []


@pytest.mark.slow
def test_a_run_on_one_node_opens_no_port_and_imports_no_zenoh(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    address = free_address()
    monkeypatch.setenv("SENTINEL_CLUSTER", address)
    monkeypatch.setenv("SENTINEL_CLUSTER_SECRET", "a secret of all nodes")
    with daemon_process(*options) as (path, process), SimulatedRank(path, 0, 2) as rank:
        rank.hello()
        rank.steps(0, [LOW])
        (run,) = ask_daemon(path, "status")["runs"]
        assert run["job"] is None
        assert "zenoh" not in Path(f"/proc/{process.pid}/maps").read_text()
    code = "import sys; import sentinel.daemon.app; sys.exit('zenoh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0


def test_a_missing_secret_is_reported(options: tuple[str, ...], tmp_path: Path) -> None:
    with node_daemon(0, 2, free_address(), tmp_path, *options, secret="short") as daemon:
        notice = daemon.rank.expect(wire.Notice).text
        assert "16 or more" in notice
        assert "short" not in notice
        (run,) = ask_daemon(daemon.path, "status")["runs"]
        assert run["job"] is None
        daemon.rank.say(wire.Goodbye())
        assert ended(daemon.process) == 0


def test_a_node_ends_in_time_where_no_coordinator_ever_was(options: tuple[str, ...], tmp_path: Path) -> None:
    with node_daemon(1, 2, free_address(), tmp_path, *options) as node:
        until(lambda: "cannot reach" in node.job()["trouble"], "the node to say so")
        began = time.monotonic()
        node.rank.say(wire.Goodbye())
        assert ended(node.process) == 0
        assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_node_with_the_history_directory_of_another_stays_the_node_that_it_is(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Its daemon used to go on from the other node's history: as that node, with that node's ranks as lost."""
    address = free_address()
    (tmp_path / "state0").mkdir()
    (tmp_path / "state1").symlink_to("state0")
    with node_daemon(0, 2, address, tmp_path, *options) as coordinator:
        coordinator.rank.steps(0, [LOW])
        until(coordinator.judges, "a step to close")
        with node_daemon(1, 2, address, tmp_path, *options) as node:
            until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
            assert [rank["rank"] for rank in node.run()["ranks"]] == [1]
            assert node.run()["history"] == ""
            (note,) = node.notes
            assert "is that of node 0 (host0) of this job, and this is node 1 (host1); alerts and rollback go" in note
            assert note.endswith("set SENTINEL_STATE to a directory of its own on each node")
        assert coordinator.notes == ()


def test_ranks_of_two_nodes_at_one_daemon_are_reported(options: tuple[str, ...], tmp_path: Path) -> None:
    """As of two containers that share /tmp, or two `torchrun --nnodes 2` on one machine."""
    with (
        node_daemon(0, 2, free_address(), tmp_path, *options) as daemon,
        SimulatedRank(daemon.path, 1, 2, run_id=RUN, on_a_node=1) as other,
    ):
        other.identity = msgspec.structs.replace(other.identity, local_world_size=1)
        other.hello()
        notice = next(line for line in _notices(daemon) if "one daemon" in line)
        assert notice.startswith("[sentinel] nodes 0, 1 use one daemon, so the nodes of this job do not meet: no roll")
        assert notice.endswith("set SENTINEL_RUNTIME and SENTINEL_STATE to directories of its own on each node")
