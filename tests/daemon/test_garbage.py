"""Ranks that send nonsense get an explanation, and no other rank loses a step by it."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon.ingest import server
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ingest.shares import Shares
from sentinel.errors import ProtocolError
from sentinel.node import paths
from sentinel.runs import Run
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process, ended

DEEP = b"\x91" * 100_000 + b"\xc0"
HELLO = wire.Hello(version="test", identity=wire.Identity(run="train", run_id="r1", world_size=2))


def packed(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa4type\xa5query".replace(b"\x81", b"\x83") + b"\xa8protocol\x01\xa4what\xa1\xff",
        b"\x84\xa4type\xa5query\xa8protocol\x01\xa4what\xa1x\xa9arguments\x81\xa1a" + DEEP,
        msgspec.msgpack.encode({"type": "phase", "name": "x", "seq": 2**63, "time": 0.0}),
    ],
    ids=["no UTF-8", "nested without end", "a step that no history can hold"],
)
def test_what_is_no_message_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.from_rank(body)


@pytest.mark.parametrize(
    "who", [{"rank": -1}, {"rank": 1 << 40}, {"world_size": 10**9}, {"world_size": 0}, {"attempt": -1}], ids=str
)
def test_absurd_ranks_and_world_sizes_are_refused(who: dict[str, int]) -> None:
    identity = msgspec.structs.replace(HELLO.identity, **who)
    with pytest.raises(ProtocolError, match=next(iter(who))):
        wire.from_rank(wire.frame(msgspec.structs.replace(HELLO, identity=identity))[4:])


def batch(seq: int, *blocks: wire.LayerBlock) -> wire.Batch:
    column = wire.Column(array("d", [1.0]).tobytes())
    times = array("d", [1e9 + seq]).tobytes()
    return wire.Batch(seqs=array("q", [seq]).tobytes(), times=times, columns={"loss": column}, layers=blocks)


ODD = {
    "a layer that is not in the table": wire.LayerBlock(
        seq=3, table="d", stats={"layer_grad_norm": packed(1.0)}, layers=array("I", [7]).tobytes()
    ),
    "too few": wire.LayerBlock(seq=3, table="d", stats={"layer_grad_norm": packed(1.0)}),
    "cut": wire.LayerBlock(seq=3, table="d", stats={"layer_grad_norm": b"abc"}),
    "uneven": wire.LayerBlock(
        seq=3, table="d", stats={"layer_grad_norm": packed(1.0, 2.0), "layer_grad_max": packed(1.0)}
    ),
}
TABLE = wire.LayerTable(
    digest="d", layers=(wire.Layer(name="w", shape=(2,), dtype="f"), wire.Layer(name="v", shape=(2,), dtype="f"))
)


@pytest.mark.parametrize("block", ODD.values(), ids=ODD)
def test_only_the_rank_whose_layers_do_not_fit_is_refused(block: wire.LayerBlock) -> None:
    """Layers that do not fit used to be found only when the step closed, and the rank that closed it was refused."""
    run = Run("train", "r1", 0.0)
    ranks = []
    for number in (0, 1):
        identity = msgspec.structs.replace(HELLO.identity, rank=number)
        ranks.append(run.hello(msgspec.structs.replace(HELLO, identity=identity), 0.0)[0])
    run.attempt.tables["d"] = TABLE
    with pytest.raises(ProtocolError, match=r"of step 3 do not fit their table of 2 layers|cut short"):
        run.attempt.take(ranks[0], batch(3, block), 0.0)
    run.attempt.take(ranks[1], batch(3), 0.0)
    assert [step.run["loss"] for step in run.attempt.take_closed(10.0)] == [1.0]


@pytest.mark.parametrize("seq", [-1, 2**62])
def test_steps_count_from_0(seq: int) -> None:
    run = Run("train", "r1", 0.0)
    rank, _ = run.hello(HELLO, 0.0)
    with pytest.raises(ProtocolError, match="they count from 0"):
        run.attempt.take(rank, batch(seq), 0.0)


@pytest.mark.processes
def test_a_connection_serves_one_rank() -> None:
    """Each further run on one connection would be a run that never ends."""
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank, SimulatedRank(path, run_id="r2") as hydra:
            rank.hello()
            hydra.hello()
            hydra.identity = msgspec.structs.replace(hydra.identity, run_id="r3")
            hydra.say(wire.Hello(version="test", identity=hydra.identity))
            assert hydra.expect(wire.Refused).reason == "this connection is run r2's: open one for each run"
            rank.steps(0, [1.0, 1.0])
            process.terminate()
        assert ended(process) == 0
    assert sorted(path.stem for path in (paths.state_directory() / "runs").glob("*.sqlite")) == ["r1", "r2"]


@pytest.mark.processes
def test_a_process_that_learns_its_rank_later_is_not_counted_twice() -> None:
    """It attached before its process group was there; its former rank 0 must not be awaited, or lost when it ends."""
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.hello()
            rank.steps(0, [1.0])
            rank.identity = msgspec.structs.replace(rank.identity, rank=1, world_size=2)
            rank.hello(next_seq=1)
            rank.steps(1, [1.0])
            (run,) = rank.ask("status")["runs"]
            assert [(one["rank"], one["state"]) for one in run["ranks"]] == [(0, "gone"), (1, "live")]
            rank.say(wire.Goodbye(next_seq=2))
        assert ended(process) == 0
    with History(paths.state_directory() / "runs/r1.sqlite") as history:
        assert not history.incidents()


class Silent:
    """A service that answers every message and ignores disconnects."""

    async def handle_message(self, peer: Peer, message: wire.FromRank) -> None:
        peer.send(wire.Answer(ok=True))

    def drop_peer(self, peer: Peer) -> None:
        pass


def test_a_connection_without_a_message_is_closed_and_others_are_not(
    private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = wire.frame(wire.Query(what="status"))

    async def conversations() -> None:
        path = private_places / "socket"
        listener = await server.serve(path, Silent(), Shares(several=False))
        greeted, speaks = await asyncio.open_unix_connection(path)
        speaks.write(query)
        answer = await greeted.readexactly(len(wire.frame(wire.Answer(ok=True))))
        monkeypatch.setattr(server, "_OPENING_SECONDS", 0.1)
        silent, silence = await asyncio.open_unix_connection(path)
        halting, halt = await asyncio.open_unix_connection(path)
        halt.write(query[:7])
        assert await silent.read() == await halting.read() == b""
        speaks.write(query)
        assert await greeted.readexactly(len(answer)) == answer
        listener.close()
        for writer in (speaks, silence, halt):
            writer.close()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(conversations(), 20))


def test_connections_of_a_user_are_limited(private_places: Path) -> None:
    shares = Shares(several=False)
    shares.connections = 2

    async def conversations() -> None:
        path = private_places / "socket"
        listener = await server.serve(path, Silent(), shares)
        first, second, third = [await asyncio.open_unix_connection(path) for _ in range(3)]
        assert b"has 2 connections to this daemon, the most that it serves for one user" in await third[0].read()
        second[1].close()
        while True:
            again, writer = await asyncio.open_unix_connection(path)
            writer.write(wire.frame(wire.Query(what="status")))
            if b"connections" not in await again.read(128):  # the end of the former connection has been seen
                break
            writer.close()
        listener.close()
        for opened in (first[1], third[1], writer):
            opened.close()

    asyncio.run(asyncio.wait_for(conversations(), 20))


def test_layers_that_come_before_their_table_are_left_out() -> None:
    run = Run("train", "r1", 0.0)
    rank, _ = run.hello(msgspec.structs.replace(HELLO, identity=wire.Identity(run="train", run_id="r1")), 0.0)
    run.attempt.take(rank, batch(3, ODD["too few"]), 0.0)
    run.attempt.tables["d"] = TABLE
    (step,) = run.attempt.take_closed(10.0)
    assert step.layers is None


def test_the_time_of_a_step_must_be_a_number() -> None:
    run = Run("train", "r1", 0.0)
    rank, _ = run.hello(msgspec.structs.replace(HELLO, identity=wire.Identity(run="train", run_id="r1")), 0.0)
    seconds = array("d", [float("nan"), float("inf"), 0.0, 0.25, -1.0])
    seqs, times = array("q", range(5)).tobytes(), array("d", range(5)).tobytes()
    columns = {"step_seconds": wire.Column(seconds.tobytes())}
    with pytest.raises(ProtocolError, match="a time that is no number"):
        run.attempt.take(rank, wire.Batch(seqs=seqs, times=seconds.tobytes(), columns=columns), 0.0)
    run.attempt.take(rank, wire.Batch(seqs=seqs, times=times, columns=columns), 0.0)
    assert len(list(run.attempt.take_closed(10.0))) == 5
    assert run.attempt.step_seconds() == 0.25


@pytest.mark.processes
def test_messages_of_an_attempt_that_is_over_do_not_reach_the_next() -> None:
    """A late message from a step far ahead would count as a step of the new attempt, and make all its steps late."""
    with daemon_process() as (path, process):
        with SimulatedRank(path, 0, 2) as former, SimulatedRank(path, 1, 2) as late:
            for rank in (former, late):
                rank.hello()
                rank.steps(0, [1.0])
            former.say(wire.Goodbye())
            former.expect(wire.Kept)
            with SimulatedRank(path, session="new") as returned:
                returned.hello()
                late.steps(500, [float("nan")])
                late.say(wire.Goodbye())
                late.expect(wire.Kept)
                returned.steps(0, [2.0, 3.0])
                (run,) = returned.ask("status")["runs"]
                assert (run["attempt"], [rank["rank"] for rank in run["ranks"]]) == (1, [0])
                assert run["values"]["loss"] == 3.0
                assert run["incidents"] == 0
                returned.say(wire.Goodbye())
        assert ended(process) == 0
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
