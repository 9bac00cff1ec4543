"""Malicious messages, sent by real Zenoh sessions to real daemons, with the secret and without it."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.cli import job_status
from sentinel.cluster.protocol.messages import MESSAGE_BYTES, Beat, Digest, Events, Pulse, RollbackOrder, decode, encode
from sentinel.cluster.seal import Seal
from sentinel.config.cluster import Meeting
from tests.cluster.job import HIGH, LOW, RUN, SECRET, NodeDaemon, free_address, node_daemon
from tests.notify.consumer import Consumer
from tests.waiting import until

zenoh = pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONNECTIONS = 1000
TERMS = wire.RollbackTerms(every=10, keep=3, margin=5, budget=3)


class Attacker:
    """A session that has the secret and can send anything."""

    def __init__(self, address: str) -> None:
        from sentinel.cluster.session import open_session

        self._session: Any = open_session(Meeting((address,), SECRET), 1)
        self._seal = Seal(SECRET)
        self._beats: queue.Queue[Any] = queue.Queue()
        self._kept = self._session.declare_subscriber(f"sentinel/{RUN}/beat/*", self._beats.put)

    def put(self, key: str, payload: bytes) -> None:
        """Send a message, signed as nodes do."""
        self.put_raw(key, self._seal.sign(f"sentinel/{RUN}/{key}", payload))

    def put_raw(self, key: str, payload: bytes) -> None:
        # Otherwise Zenoh drops what a busy machine does not send within a millisecond.
        self._session.put(f"sentinel/{RUN}/{key}", payload, congestion_control=zenoh.CongestionControl.BLOCK)

    def overhear(self) -> Beat:
        """Return the next beat of the coordinator."""
        sample = self._beats.get(timeout=60)
        return decode(self._seal.check(str(sample.key_expr), bytes(sample.payload)), Beat)

    def close(self) -> None:
        self._session.close()


@contextlib.contextmanager
def attacked_job(folder: Path, options: tuple[str, ...]) -> Iterator[tuple[NodeDaemon, NodeDaemon, Attacker]]:
    """Run two nodes that hear each other, and an attacker who has the secret."""
    address = free_address()
    with (
        node_daemon(0, 2, address, folder, *options) as coordinator,
        node_daemon(1, 2, address, folder, *options) as node,
    ):
        until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
        with contextlib.closing(Attacker(address)) as attacker:
            yield coordinator, node, attacker


def still_works(daemon: NodeDaemon, ops: Consumer) -> None:
    """Check that steps of its rank are judged, and that people hear of an alert."""
    daemon.rank.steps(0, [LOW, HIGH])
    page = ops.next()
    assert (page["status"], page["alerts"][0]["labels"]["alertname"]) == ("firing", "TooHigh")


def list_malformed(kind: str) -> list[bytes]:
    """Return messages for a key of this kind that no node sends."""
    chance = random.Random(kind)
    wrong = {"node": "one", "epoch": [], "incarnation": -1, "after": "x", "attempt": None}
    other_protocol = {**wrong, "protocol": 99}
    other_node = {
        "pulse": Pulse(node=7, incarnation=1, hostname="h", attempt=0, step=0),
        "event": Events(node=7, incarnation=1, after=0, upto=1),
        "digest": Digest(node=7, attempt=0, after=-1, upto=1, body=b""),
        "beat": Beat(node=7, epoch=1 << 50, expected=2, nodes=()),
    }[kind]
    return [
        b"",
        chance.randbytes(1000),
        zlib.compress(b"\xc1" * 10),
        zlib.compress(bytes(100_000_000)),
        encode(Pulse(node=1, incarnation=1, hostname="h" * 100_000, attempt=0, step=0)),
        zlib.compress(chance.randbytes(MESSAGE_BYTES - 100)),
        zlib.compress(msgspec.msgpack.encode(wrong)),
        zlib.compress(msgspec.msgpack.encode(other_protocol)),
        encode(other_node),
    ]


def test_what_is_malformed_is_refused_and_counted(ops: Consumer, options: tuple[str, ...], tmp_path: Path) -> None:
    with attacked_job(tmp_path, options) as (coordinator, node, attacker):
        told = [(kind, payload) for kind in ("pulse", "event", "digest") for payload in list_malformed(kind)]
        for kind, payload in told:
            attacker.put(f"{kind}/1", payload)
            attacker.put(f"{kind}/no-number", payload)
        beats = list_malformed("beat")
        for payload in beats:
            attacker.put("beat/0", payload)
        until(lambda: coordinator.job()["refused"] >= 2 * len(told), "the coordinator to count them all")
        until(lambda: node.job()["refused"] >= len(beats), "node 1 to count them all")
        attacker.put("pulse/1", os.urandom(64 * MESSAGE_BYTES))  # Zenoh may end a session that sends this
        still_works(coordinator, ops)
        still_works(node, ops)
        assert set(coordinator.states()) == {0, 1}


def test_digests_that_no_node_sends_harm_no_rule(ops: Consumer, options: tuple[str, ...], tmp_path: Path) -> None:
    with attacked_job(tmp_path, options) as (coordinator, node, attacker):
        for upto, body in (
            (1 << 60, b""),
            (5, zlib.compress(bytes(50_000_000))),
            (5, zlib.compress(b"\x93\x00\x00\x00")),
        ):
            digest = Digest(node=1, attempt=0, after=-1, upto=upto, body=body)
            attacker.put("digest/1", encode(digest))
        until(lambda: coordinator.job()["refused"] >= 3, "the coordinator to count them")
        still_works(coordinator, ops)
        still_works(node, ops)


def test_the_number_of_made_up_nodes_is_limited(ops: Consumer, options: tuple[str, ...], tmp_path: Path) -> None:
    with attacked_job(tmp_path, options) as (coordinator, node, attacker):
        for number in (5000, 99_999_999, 10**15):
            attacker.put(f"pulse/{number}", encode(Pulse(node=number, incarnation=1, hostname="h", attempt=0, step=0)))
        for number in range(2, 40):
            attacker.put(f"pulse/{number}", encode(Pulse(node=number, incarnation=1, hostname="h", attempt=0, step=0)))
        until(lambda: coordinator.job()["refused"] >= 3 + 38, "the coordinator to count them")
        assert set(coordinator.states()) == {0, 1}
        still_works(node, ops)


def test_an_epoch_above_all_blinds_no_node(ops: Consumer, options: tuple[str, ...], tmp_path: Path) -> None:
    with attacked_job(tmp_path, options) as (coordinator, node, attacker):
        job = wire.JobReport(promised=2**53)
        for pulse in (
            Pulse(node=1, incarnation=1, hostname="h", attempt=0, step=0, epoch=2**53),
            Pulse(node=1, incarnation=1, hostname="h", attempt=0, step=0, last_job=job),
        ):
            attacker.put("pulse/1", encode(pulse))
        attacker.put("beat/0", encode(Beat(epoch=2**53, stamp=1.0, acting=True, expected=2, nodes=())))
        until(lambda: coordinator.job()["refused"] >= 2, "the coordinator to count them")
        until(lambda: node.job()["refused"] >= 1, "node 1 to count its beat")
        still_works(node, ops)
        assert node.job()["view"] == "joined", "it has told people by way of the coordinator, not alone after 30 s"


def test_an_incarnation_above_all_and_a_stamp_of_the_future_blind_no_node(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    with attacked_job(tmp_path, options) as (coordinator, node, attacker):
        attacker.put("pulse/1", encode(Pulse(node=1, incarnation=2**53, hostname="h", attempt=0, step=0)))
        until(lambda: coordinator.job()["refused"] >= 1, "the coordinator to refuse the pulse")
        beat = attacker.overhear()
        states = tuple(msgspec.structs.replace(state, incarnation=2**53) for state in beat.nodes)
        attacker.put("beat/0", encode(msgspec.structs.replace(beat, stamp=beat.stamp + 0.1, nodes=states)))
        until(lambda: node.job()["refused"] >= 1, "node 1 to refuse the beat")
        attacker.put("beat/0", encode(msgspec.structs.replace(beat, stamp=1e15)))
        until(lambda: attacker.overhear().epoch > beat.epoch, "the coordinator to go on with a higher epoch")
        still_works(node, ops)
        assert node.job()["view"] == "joined"


def test_an_order_of_the_past_reaches_no_rank(options: tuple[str, ...], tmp_path: Path) -> None:
    """An old order is replayed, or is of another attempt, of a lower epoch, or under another node's key. An order that
    the coordinator could send now does reach ranks: those who have the secret can roll a job back."""
    with attacked_job(tmp_path, options) as (_, node, attacker):
        node.rank.hello(rollback=TERMS)
        beat = attacker.overhear()
        order = RollbackOrder(attempt=0, message=wire.Prepare(id=77, at=9, to=1))
        forged = msgspec.structs.replace(beat, stamp=beat.stamp + 0.1, rollback=order)
        other_attempt = msgspec.structs.replace(order, attempt=3)
        for key, harmful in (
            ("beat/0", msgspec.structs.replace(forged, stamp=beat.stamp)),
            ("beat/0", msgspec.structs.replace(forged, epoch=beat.epoch - 16)),
            ("beat/0", msgspec.structs.replace(forged, rollback=other_attempt)),
            ("beat/2", msgspec.structs.replace(forged, node=2, epoch=beat.epoch + 2)),
            ("beat/2", forged),
        ):
            attacker.put(key, encode(harmful))
        until(lambda: node.job()["refused"] == 1, "node 1 to refuse the one under another key")
        present = msgspec.structs.replace(order, message=wire.Prepare(id=78, at=9, to=1))
        attacker.put("beat/0", encode(msgspec.structs.replace(forged, stamp=beat.stamp + 0.2, rollback=present)))
        assert node.rank.expect(wire.Prepare).id == 78


@pytest.mark.parametrize("secret", ["", "another secret of a stranger"])
def test_an_order_without_the_secret_reaches_no_rank(secret: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """As by a router that lets everyone in, to which an entry in the process group's store led the nodes."""
    with attacked_job(tmp_path, options) as (_, node, attacker):
        node.rank.hello(rollback=TERMS)
        beat = attacker.overhear()
        order = RollbackOrder(attempt=0, message=wire.Prepare(id=77, at=9, to=1))
        forged = encode(msgspec.structs.replace(beat, stamp=beat.stamp + 0.1, rollback=order))
        attacker.put_raw("beat/0", Seal(secret).sign(f"sentinel/{RUN}/beat/0", forged))
        until(lambda: node.job()["refused"] == 1, "node 1 to refuse it")
        later = msgspec.structs.replace(order, message=wire.Prepare(id=78, at=9, to=1))
        attacker.put("beat/0", encode(msgspec.structs.replace(beat, stamp=beat.stamp + 0.2, rollback=later)))
        assert node.rank.expect(wire.Prepare).id == 78


def test_a_thousand_connections_keep_no_node_out(ops: Consumer, options: tuple[str, ...], tmp_path: Path) -> None:
    address = free_address()
    host, _, port = address.rpartition(":")
    with (
        node_daemon(0, 3, address, tmp_path, *options) as coordinator,
        node_daemon(1, 3, address, tmp_path, *options) as node,
    ):
        until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
        with contextlib.ExitStack() as stack:
            for number in range(CONNECTIONS):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    connection.send(os.urandom(100) if number % 2 else b"\xff\xff")
            still_works(node, ops)
            with node_daemon(2, 3, address, tmp_path, *options) as late:
                until(lambda: late.job()["view"] == "joined", "node 2 to get in")
                assert coordinator.states() == {0: "alive", 1: "alive", 2: "alive"}


def test_without_the_secret_a_session_hears_nothing_and_is_counted(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUST_LOG", "zenoh_transport=debug")
    address = free_address()
    with (
        node_daemon(0, 2, address, tmp_path, *options) as coordinator,
        node_daemon(1, 2, address, tmp_path, *options) as node,
    ):
        until(lambda: node.job()["view"] == "joined", "node 1 to hear the coordinator")
        for user, password in ((None, None), ("sentinel", "sentinel"), ("sentinel", SECRET)):
            config = zenoh.Config()
            config.insert_json5("mode", '"client"')
            config.insert_json5("scouting/multicast/enabled", "false")
            config.insert_json5("connect/endpoints", f'["tcp/{address}#bind=127.0.0.2:0"]')
            config.insert_json5("connect/timeout_ms", "2000")
            if user is not None:
                config.insert_json5("transport/auth/usrpwd/user", f'"{user}"')
                config.insert_json5("transport/auth/usrpwd/password", f'"{password}"')
            with pytest.raises(zenoh.ZError):
                zenoh.open(config)
        assert coordinator.states() == {0: "alive", 1: "alive"}
        assert capfd.readouterr().out.count("Invalid password") >= 2  # docs/cluster.md: who was turned away
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60, source_address=("127.0.0.3", 0)) as garbage:
            garbage.send(b"\xff\xff")
            until(lambda: "127.0.0.3" in coordinator.job()["rejected_from"], "the coordinator to count it")
        job = coordinator.job()
        assert job["rejected"] >= len(job["rejected_from"])
        assert set(job["rejected_from"]) <= {"127.0.0.2", "127.0.0.3"}, "not from where node 1 is, which was let in"
        assert "let in, last from 127.0.0." in "\n".join(job_status.lines(job))
