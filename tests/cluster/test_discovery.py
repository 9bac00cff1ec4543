"""Nodes that have no address find each other by the process group's store: what is asked, written, read and refused."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed

from sentinel import wire
from sentinel.cluster.connection import NOT_INSTALLED
from sentinel.cluster.membership import NO_ORDERS
from sentinel.hooks.core import network_address, store_client
from sentinel.hooks.session import meeting_finder
from sentinel.hooks.session.meeting_finder import MeetingFinder
from tests.cluster.job import RUN, SECRET, free_address
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.waiting import until

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
dist: Any = torch.distributed
ASKED = wire.FindMeeting(nodes=2, secret="of the store, 32 bytes")


@contextlib.contextmanager
def waiting_daemon(node: int, folder: Path, *options: str, **environment: str) -> Iterator[SimulatedRank]:
    """The first rank of a node whose daemon knows no address."""
    said = {"SENTINEL_STATE": str(folder / f"state{node}"), "SENTINEL_CLUSTER": "", **environment}
    with (
        daemon_process("--config", str(_write_settings(folder)), *options, run_id=f"{RUN}-{node}", **said) as (path, _),
        SimulatedRank(path, node, 2, run_id=RUN, on_a_node=1) as rank,
    ):
        rank.identity = msgspec.structs.replace(rank.identity, local_world_size=1)
        rank.hello(rollback=wire.RollbackTerms(every=1, keep=2, margin=1, budget=3))
        yield rank


def _write_settings(folder: Path) -> Path:
    file = folder / "sentinel.toml"
    if not file.exists():
        file.write_text("[daemon]\nhttp = 'off'\n")
    return file


def describe_job(rank: SimulatedRank) -> Any:
    """What `sentinel status` shows of it."""
    (run,) = rank.ask("status")["runs"]
    return run["job"]


def say(rank: SimulatedRank, words: str) -> None:
    """Wait until the daemon printed a line with these words."""
    while words not in rank.expect(wire.Notice).text:
        pass


# The daemon.


def test_the_store_carries_what_the_nodes_need_and_no_order(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    with waiting_daemon(0, tmp_path) as first, waiting_daemon(1, tmp_path) as second:
        asked = first.expect(wire.FindMeeting)
        assert (asked.nodes, asked.address, len(bytes.fromhex(asked.secret))) == (2, "", 32)
        assert second.expect(wire.FindMeeting).secret != asked.secret
        found = wire.MeetingFound(nodes=2, address=free_address(), secret=asked.secret)
        for rank in (first, second):
            rank.say(found)
        until(lambda: describe_job(second)["view"] == "joined", "the nodes to meet")
        assert [describe_job(rank)["no_orders"] for rank in (first, second)] == [NO_ORDERS] * 2
        say(
            first, f"meet at {found.address}, found by the process group's store; they share what they see: orders need"
        )
        say(first, f"rollback is not armed: {NO_ORDERS}")

        first.hello()  # the next start of the ranks, whose store has nothing yet
        assert first.expect(wire.FindMeeting) == wire.FindMeeting(nodes=2, address=found.address, secret=asked.secret)
        moved = wire.MeetingFound(nodes=2, address=free_address(), secret="another, of a store begun again")
        for rank in (first, second):
            rank.say(moved)
        until(lambda: describe_job(second)["address"] == moved.address, "node 1 to go where the others meet")
        until(lambda: describe_job(second)["coordinator_silent_seconds"] < 1, "node 1 to hear the coordinator there")


def test_with_a_secret_of_their_own_nodes_take_orders_and_none_is_in_the_store(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    (tmp_path / "sentinel.toml").write_text("[daemon]\nhttp = 'off'\n[cluster]\nport = 9478\n")
    with waiting_daemon(0, tmp_path, SENTINEL_CLUSTER_SECRET=SECRET) as rank:
        assert rank.expect(wire.FindMeeting) == wire.FindMeeting(nodes=2, port=9478)
        rank.say(wire.MeetingFound(nodes=2, address=free_address()))
        until(lambda: describe_job(rank), "the node to join")
        assert describe_job(rank)["no_orders"] == ""


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"address": "a:1", "nodes": 3, "secret": "s"}, "rank 0 has 3 nodes, and this one 2"),
        (
            {"address": "a:1", "nodes": 2},
            "node 0 has a secret or a certificate and this node has none",
        ),
        ({"address": "a", "nodes": 2, "secret": "s"}, "the process group's store: 'a' is no host:port"),
        ({"reason": "there is no process group, in 300 s"}, "no process group, in 300 s; set SENTINEL_CLUSTER"),
    ],
)
def test_what_is_in_the_way_is_said_and_the_node_is_watched_alone(
    found: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    with waiting_daemon(0, tmp_path) as rank:
        rank.expect(wire.FindMeeting)
        rank.say(wire.MeetingFound(**found))
        say(rank, words)
        say(rank, "rollback is not armed: the nodes of this job do not meet")
        rank.steps(0, [1.0])
        assert describe_job(rank) is None


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    (tmp_path / "sentinel.toml").write_text("[daemon]\nhttp = 'off'\n[cluster]\nenabled = false\n")
    with waiting_daemon(0, tmp_path) as rank:
        say(rank, "rollback is not armed: the nodes of this job do not meet")
        rank.say(wire.Goodbye())
        with pytest.raises(AssertionError, match="closed the connection before a FindMeeting"):
            rank.expect(wire.FindMeeting)


def test_without_zenoh_one_line_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['zenoh'] = None")
    with waiting_daemon(0, tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])) as rank:
        say(rank, NOT_INSTALLED)
        rank.steps(0, [1.0])
        assert describe_job(rank) is None


# The ranks.


class Found:
    """What one rank sent."""

    def __init__(self, rank: int) -> None:
        identity = wire.Identity(run="train", run_id=RUN, rank=rank, world_size=2, local_world_size=1)
        self._sent: queue.Queue[wire.Message] = queue.Queue()
        self.finder = MeetingFinder(lambda: identity, self._sent.put)

    def find(self, asked: wire.FindMeeting = ASKED) -> wire.Message:
        """Its answer."""
        self.finder.find(asked)
        return self.wait()

    def wait(self) -> wire.Message:
        return self._sent.get(timeout=60)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The last is that of the process group; there is none without one."""
    made: list[Any] = []
    for module in (store_client, meeting_finder):
        monkeypatch.setattr(module, "group_store", lambda: dist.PrefixStore("pg", made[-1]) if made else None)
    monkeypatch.setattr(meeting_finder, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(meeting_finder, "LOST_SECONDS", 0.01)
    return made


def open_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_rank_0_writes_once_and_the_other_waits_for_it(stores: list[Any]) -> None:
    first, second = Found(0), Found(1)
    second.finder.find(ASKED)
    stores.append(open_store())
    word = first.find()
    assert isinstance(word, wire.MeetingFound)
    assert (word.nodes, word.secret, word.address[:10]) == (2, ASKED.secret, "127.0.0.1:")
    assert second.wait() == word
    assert Found(0).find(msgspec.structs.replace(ASKED, secret="of a daemon that came later")) == word
    assert stores[-1].num_keys() in (1, 2), "one key, beside torch's own"


def test_the_port_and_the_address_that_the_daemon_has_are_taken(stores: list[Any]) -> None:
    stores.append(open_store())
    word = Found(0).find(msgspec.structs.replace(ASKED, port=9478))
    assert isinstance(word, wire.MeetingFound)
    assert word.address == "127.0.0.1:9478"
    stores.append(open_store())
    word = Found(0).find(msgspec.structs.replace(ASKED, port=9478, address="10.0.0.1:5"))
    assert isinstance(word, wire.MeetingFound)
    assert word.address == "10.0.0.1:5"


def test_why_it_is_not_found_is_said(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_finder, "FIND_SECONDS", 0.0)
    assert Found(1).find() == wire.MeetingFound(reason="there is no process group, in 0 s")
    stores.append(open_store())
    assert Found(1).find() == wire.MeetingFound(reason="rank 0 has not said where, in 0 s")
    stores[-1].set(f"sentinel/meeting/{RUN}", "what somebody else wrote")
    word = Found(1).find()
    assert isinstance(word, wire.MeetingFound)
    assert word.reason.startswith("JSON is malformed")
    stores.append(dist.HashStore())
    assert Found(0).find() == wire.MeetingFound(
        reason="the process group's store is a HashStore, and must be a TCPStore"
    )


def test_a_store_that_is_gone_is_said(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_finder, "FIND_SECONDS", 0.0)
    server = open_store()
    port = server.port
    stores.append(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    del server
    word = Found(1).find()
    assert isinstance(word, wire.MeetingFound)
    assert word.reason.startswith("the process group's store is lost (")


def test_a_run_that_is_over_is_not_looked_for(stores: list[Any]) -> None:
    found = Found(1)
    found.finder.close()
    found.finder.find(ASKED)
    found.finder.find(ASKED)
    with pytest.raises(queue.Empty):
        found._sent.get(timeout=0.1)


@pytest.mark.parametrize("named", ["lo", "=lo", "l", "nothing,lo"])
def test_the_interface_of_the_process_group_is_taken(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    assert network_address.find_own_address("192.0.2.9", 1) == "127.0.0.1"


@pytest.mark.parametrize("named", ["^eth0", "=l", "nothing"])
def test_an_interface_that_is_not_there_leaves_the_address_to_the_store(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    assert network_address.find_own_address("127.0.0.2", 1) == "127.0.0.1"


def test_a_name_that_means_loopback_here_is_not_taken_where_there_is_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to others")
        own = probe.getsockname()[0]
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **how: look_up(host.replace("node0", "127.0.1.1"), *more, **how)
    )
    assert network_address.find_own_address("node0", 1) == own
    assert network_address.find_own_address("localhost", 1) == "127.0.0.1"
