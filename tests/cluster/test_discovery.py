"""Nodes without an address find each other by the process group's store: what they ask, write, read and refuse."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch.distributed

from sentinel import wire
from sentinel.cluster.connection import NOT_INSTALLED
from sentinel.cluster.orders import NO_ORDERS
from sentinel.cluster.protocol.election import next_epoch
from sentinel.cluster.protocol.messages import Beat, RollbackOrder, encode
from sentinel.config.cluster import Meeting
from sentinel.daemon.run.meeting_search import MeetingSearch, SearchOwner
from sentinel.hooks.core import store_client
from sentinel.hooks.session import meeting_finder
from sentinel.hooks.session.meeting_finder import MeetingFinder
from sentinel.node import network_address
from tests.cluster.job import HIGH, LOW, RUN, SECRET, free_address
from tests.cluster.listener import Listener
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import sentinel
from tests.notify.consumer import DEADLINE_SECONDS, HANG, Consumer
from tests.waiting import until

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
dist: Any = torch.distributed
ASKED = wire.FindMeeting(nodes=2, secret="of the store, 32 bytes", offers=True)


@contextlib.contextmanager
def waiting_daemon(node: int, folder: Path, *options: str, **environment: str) -> Iterator[SimulatedRank]:
    """Run a daemon that knows no address; yields the first rank of its node."""
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
    """Return the job of a rank as `sentinel status` shows it."""
    (run,) = rank.ask("status")["runs"]
    return run["job"]


def say(rank: SimulatedRank, words: str) -> None:
    """Wait until the daemon printed a line with these words."""
    while words not in rank.expect(wire.Notice).text:
        pass


# The daemon.


@pytest.mark.slow
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
        assert f"no rollback, stop or restart of all nodes: {NO_ORDERS}" in sentinel("status").stdout

        first.hello()  # the next start of the ranks, whose store has nothing yet
        assert first.expect(wire.FindMeeting) == msgspec.structs.replace(asked, address=found.address)
        moved = wire.MeetingFound(nodes=2, address=free_address(), secret="another, of a store begun again")
        for rank in (first, second):
            rank.say(moved)
        until(lambda: describe_job(second)["address"] == moved.address, "node 1 to go where the others meet")
        until(lambda: describe_job(second)["coordinator_silent_seconds"] < 1, "node 1 to hear the coordinator there")


def test_with_a_secret_of_their_own_nodes_take_orders_and_none_is_in_the_store(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    (tmp_path / "sentinel.toml").write_text("[daemon]\nhttp = 'off'\n[cluster]\nport = 9478\n")
    with waiting_daemon(0, tmp_path, SENTINEL_CLUSTER_SECRET=SECRET) as rank:
        assert rank.expect(wire.FindMeeting) == wire.FindMeeting(nodes=2, port=9478, offers=True)
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
def test_an_obstacle_is_reported_and_the_node_is_watched_alone(
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


def test_node_0_says_that_rollback_is_not_armed_whichever_of_its_ranks_came_first(tmp_path: Path) -> None:
    """Before, it said so only if rank 0 came first, which is the rank that it asks where the nodes meet."""
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    said = {"SENTINEL_STATE": str(tmp_path), "SENTINEL_CLUSTER": ""}
    terms = wire.RollbackTerms(every=1, keep=2, margin=1, budget=3)
    with (
        daemon_process("--config", str(_write_settings(tmp_path)), run_id=f"{RUN}-0", **said) as (path, _),
        SimulatedRank(path, 1, 4, run_id=RUN, on_a_node=2) as second,
        SimulatedRank(path, 0, 4, run_id=RUN, on_a_node=2) as first,
    ):
        for rank in (second, first):
            local = rank.identity.rank
            rank.identity = msgspec.structs.replace(rank.identity, local_rank=local, local_world_size=2)
            rank.hello(rollback=terms)
        asked = first.expect(wire.FindMeeting)
        first.say(wire.MeetingFound(nodes=2, address=free_address(), secret=asked.secret))
        say(first, f"rollback is not armed: {NO_ORDERS}")


def test_discovery_can_be_turned_off(tmp_path: Path) -> None:
    (tmp_path / "sentinel.toml").write_text("[daemon]\nhttp = 'off'\n[cluster]\nenabled = false\n")
    with waiting_daemon(0, tmp_path) as rank:
        say(rank, "rollback is not armed: the nodes of this job do not meet")
        rank.say(wire.Goodbye())
        with pytest.raises(AssertionError, match="closed the connection before a FindMeeting"):
            rank.expect(wire.FindMeeting)


@pytest.mark.slow
def test_without_zenoh_one_line_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['zenoh'] = None")
    with waiting_daemon(0, tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])) as rank:
        say(rank, NOT_INSTALLED)
        rank.steps(0, [1.0])
        assert describe_job(rank) is None


@pytest.mark.slow
def test_a_page_that_a_daemon_without_zenoh_owes_is_sent_by_the_next_one(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    """On all nodes but node 0 it was held back until the end of the run, for a search that never began."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['zenoh'] = None")
    hidden, rules = os.pathsep.join([str(tmp_path), str(ROOT)]), options[2:]
    ops.answers = [HANG]
    with waiting_daemon(1, tmp_path, *rules, PYTHONPATH=hidden) as rank:
        rank.steps(0, [LOW, HIGH])
        assert ops.hung.wait(DEADLINE_SECONDS)
    with waiting_daemon(1, tmp_path, *rules, PYTHONPATH=hidden) as rank:
        rank.steps(2, [HIGH])
        (alert,) = ops.next()["alerts"]
        assert (alert["status"], alert["labels"]["alertname"]) == ("firing", "TooHigh")


@pytest.mark.slow
def test_a_port_that_is_taken_is_reported_and_the_node_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    with socket.create_server(("127.0.0.1", 0)) as taken, waiting_daemon(0, tmp_path) as rank:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        rank.say(wire.MeetingFound(nodes=2, address=address, secret=rank.expect(wire.FindMeeting).secret))
        say(rank, f"cannot listen on {address}: the port is taken")
        _expect_monitoring(rank)


@pytest.mark.slow
def test_a_node_that_gets_no_answer_says_so_and_goes_on(tmp_path: Path) -> None:
    """As behind a firewall, everything that it sends is lost."""
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    with socket.create_server(("127.0.0.1", 0)) as silent, waiting_daemon(1, tmp_path) as rank:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        rank.say(wire.MeetingFound(nodes=2, address=address, secret=rank.expect(wire.FindMeeting).secret))
        say(rank, f"cannot reach {address}: no daemon listens there, a firewall is between")
        _expect_monitoring(rank)


def _expect_monitoring(rank: SimulatedRank) -> None:
    """Check that steps are judged, and that the daemon ends in time."""
    rank.steps(0, [1.0, 2.0])

    def find_loss() -> Any:
        (run,) = rank.ask("status")["runs"]
        return run["values"].get("loss")

    until(find_loss, "a step to be judged")
    rank.say(wire.Goodbye())
    with pytest.raises(AssertionError, match="closed the connection"):
        rank.expect(wire.Prepare)


@pytest.mark.slow
@pytest.mark.parametrize("own", ["", SECRET], ids=["of the store", "of the environment"])
def test_only_with_a_secret_of_the_users_can_orders_be_given(own: str, tmp_path: Path) -> None:
    """A stranger acts as the coordinator, with the secret from the store or with the users' own."""
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    address, public = free_address(), "" if own else "what a stranger read in the store"
    said = {"SENTINEL_STATE": str(tmp_path), "SENTINEL_CLUSTER": "", "SENTINEL_CLUSTER_SECRET": own}
    with (
        stranger(address, own or public) as give_orders,
        daemon_process("--config", str(_write_settings(tmp_path)), run_id=f"{RUN}-1", **said) as (path, process),
        SimulatedRank(path, 1, 2, run_id=RUN, on_a_node=1) as rank,
        SimulatedRank(path) as supervisor,
    ):
        rank.identity = msgspec.structs.replace(rank.identity, local_world_size=1)
        terms = wire.RollbackTerms(every=1, keep=2, margin=1, budget=3)
        rank.say(wire.Hello(version="test", identity=rank.identity, rollback=terms, supervisor="mark"))
        supervisor.say(wire.Supervise(mark="mark"))
        rank.expect(wire.FindMeeting)
        rank.say(wire.MeetingFound(nodes=2, address=address, secret=public))

        def follows() -> bool:
            give_orders()
            job = describe_job(rank)
            return job is not None and job["view"] == "joined"

        until(follows, "the node to follow the stranger")
        supervisor.say(
            wire.Supervise(mark="mark", job=wire.JobReport(fault=wire.JobFault(kind="Hang", words="it hangs")))
        )
        order = supervisor.expect(wire.Order)
        assert (order.does, order.why) == (("end", "") if own else ("stop", NO_ORDERS))
        process.kill()
        if own:
            assert rank.expect(wire.Prepare).id == 1
        else:
            with pytest.raises(AssertionError, match="closed the connection before a Prepare"):
                rank.expect(wire.Prepare)


@contextlib.contextmanager
def stranger(address: str, secret: str) -> Iterator[Callable[[], None]]:
    """Listen where node 0 should. Yields a function that orders the end of the job, and a rollback."""
    from sentinel.cluster.session import Session

    session = Session(Meeting((address,), secret), RUN, 0, Listener())
    epoch = next_epoch(0, 0, int(time.time() * 1000))

    def give_orders() -> None:
        beat = Beat(
            epoch=epoch, stamp=time.monotonic(), acting=True, expected=2, nodes=(),
            order=wire.Order(start=0, does="end"),
            rollback=RollbackOrder(attempt=0, message=wire.Prepare(id=1, at=100, to=1)),
        )  # fmt: skip
        session.publish_beat(encode(beat))

    try:
        yield give_orders
    finally:
        session.close()


# The ranks.


class Found:
    """A rank that finds the meeting and is the only one of its node, and what it sent."""

    def __init__(self, rank: int) -> None:
        identity = wire.Identity(run="train", run_id=RUN, rank=rank, node=rank, world_size=3, local_world_size=1)
        self._sent: queue.Queue[wire.Message] = queue.Queue()
        self.finder = MeetingFinder(lambda: identity, self._sent.put)

    def find(self, asked: wire.FindMeeting = ASKED) -> wire.Message:
        """Ask the rank, and return its answer."""
        self.finder.find(asked)
        return self.wait()

    def wait(self) -> wire.Message:
        return self._sent.get(timeout=60)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of stores. The last one is the process group's; while it is empty, there is no group."""
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


def test_rank_0_puts_the_address_of_node_1_beside_its_own(stores: list[Any]) -> None:
    stores.append(open_store())
    asked, ranks = msgspec.structs.replace(ASKED, nodes=3), [Found(rank) for rank in range(3)]
    for rank in reversed(ranks):
        rank.finder.find(msgspec.structs.replace(asked, address="10.0.0.2:5") if rank is ranks[1] else asked)
    words = [rank.wait() for rank in ranks]
    assert words == [words[0]] * 3
    assert isinstance(words[0], wire.MeetingFound)
    assert (words[0].second, words[0].address[:10], words[0].secret) == ("10.0.0.2:5", "127.0.0.1:", ASKED.secret)


@pytest.mark.parametrize("has_network", [True, False], ids=["late", "without a network"])
def test_a_node_1_that_offers_nothing_in_time_is_not_waited_for(
    has_network: bool, stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_finder, "OFFER_SECONDS", 0.1)
    stores.append(open_store())
    asked = msgspec.structs.replace(ASKED, nodes=3, address="10.0.0.1:5")
    word = Found(0).find(asked)
    assert word == wire.MeetingFound(nodes=3, address="10.0.0.1:5", secret=ASKED.secret)
    if not has_network:
        monkeypatch.setattr(network_address, "_find_source", _find_no_route)
    for rank in (1, 2):
        assert Found(rank).find(msgspec.structs.replace(ASKED, nodes=3)) == word


def test_two_nodes_with_one_address_have_it_once(stores: list[Any]) -> None:
    stores.append(open_store())
    asked, second = msgspec.structs.replace(ASKED, nodes=3, address="10.0.0.1:5"), Found(1)
    second.finder.find(asked)
    word = Found(0).find(asked)
    assert word == second.wait() == wire.MeetingFound(nodes=3, address="10.0.0.1:5", secret=ASKED.secret)


@pytest.mark.parametrize("offer", ["of another program", '{"type":"meeting-found","address":"a:1,b:2"}', "{}"])
def test_malformed_offers_are_ignored(offer: str, stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_finder, "OFFER_SECONDS", 0.1)
    stores.append(open_store())
    stores[-1].set(f"sentinel/meeting/{RUN}/offer", offer)
    word = Found(0).find(msgspec.structs.replace(ASKED, nodes=3, address="10.0.0.1:5"))
    assert word == wire.MeetingFound(nodes=3, address="10.0.0.1:5", secret=ASKED.secret)


def test_a_daemon_that_would_not_listen_there_offers_nothing(
    stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a daemon is of an earlier version, with hooks of this version."""
    monkeypatch.setattr(meeting_finder, "OFFER_SECONDS", 0.1)
    stores.append(open_store())
    asked, second = msgspec.structs.replace(ASKED, nodes=3, address="10.0.0.2:5"), Found(1)
    second.finder.find(msgspec.structs.replace(asked, offers=False))
    word = Found(0).find(msgspec.structs.replace(asked, address="10.0.0.1:5"))
    assert word == second.wait() == wire.MeetingFound(nodes=3, address="10.0.0.1:5", secret=ASKED.secret)
    assert not stores[-1].check([f"sentinel/meeting/{RUN}/offer"])


def _find_no_route(*_: object) -> str:
    raise OSError("no route")


def test_the_answer_says_why_no_meeting_was_found(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_finder, "FIND_SECONDS", 0.0)
    assert Found(1).find() == wire.MeetingFound(reason="there is no process group, in 0 s")
    stores.append(open_store())
    assert Found(1).find() == wire.MeetingFound(reason="rank 0 has not said where, in 0 s")
    stores[-1].set(f"sentinel/meeting/{RUN}", "what another program wrote")
    word = Found(1).find()
    assert isinstance(word, wire.MeetingFound)
    assert word.reason.startswith("JSON is malformed")
    stores.append(dist.HashStore())
    assert Found(0).find() == wire.MeetingFound(
        reason="the process group's store is a HashStore, and must be a TCPStore"
    )


@pytest.mark.slow
def test_a_store_that_is_gone_is_reported(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def own_address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of this machine, which is called node0, a name that resolves to its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to others")
        own: str = probe.getsockname()[0]
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **how: look_up(host.replace("node0", "127.0.1.1"), *more, **how)
    )
    return own


def test_a_name_that_means_loopback_here_is_not_taken_where_there_is_a_network(own_address: str) -> None:
    assert network_address.find_own_address("node0", 1) == own_address
    assert network_address.find_own_address("localhost", 1) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "other"),
    [("node0:9478", True), ("localhost:9478", False), ("127.0.1.1:9478", False), ("[::1]:9478", False),
     ("192.0.2.9:9478", False), ("never.invalid:9478", False)],
)  # fmt: skip
def test_a_node_whose_own_name_means_loopback_listens_where_others_find_it_too(
    address: str, other: bool, own_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zenoh = pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    from sentinel.cluster.session import open_session

    opened = []
    monkeypatch.setattr(zenoh, "open", opened.append)
    open_session(Meeting((address, "node1:9478"), "s" * 16), 0)
    listens = json.loads(opened[0].get_json("listen/endpoints"))
    assert listens == [f"tcp/{address}", *([f"tcp/{own_address}:9478"] if other else [])]


def test_a_later_attempt_with_fewer_nodes_is_asked_for_as_many() -> None:
    search = MeetingSearch(Meeting((), SECRET), 0, cast("SearchOwner", None))
    for nodes in (4, 3):
        identity = wire.Identity(run="r", run_id="r", world_size=2 * nodes, local_world_size=2)
        question = search.ask(wire.Hello(version="t", identity=identity))
        assert question is not None
        assert question.nodes == nodes
