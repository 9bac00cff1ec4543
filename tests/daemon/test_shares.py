"""Each user's share of a daemon that serves several: caps on frames, turns, portions, and limits."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon.ingest import peer as peers
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ingest.shares import RUNS, Shares, turn
from sentinel.daemon.job.supervision import Supervision
from sentinel.daemon.ranks.processes import Processes
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.errors import ProtocolError
from sentinel.node import paths
from sentinel.rulebook import loader
from sentinel.runs import Rank, Run
from sentinel.runs.attempt import AWAITED_RANKS, RECENT_VALUES, SIGNALS_OF_A_RANK
from sentinel.runs.reported import MOST_STEPS, MOST_VALUES
from sentinel.runs.step_alignment import OPEN_STEPS, Alignment
from sentinel.store import History, Store
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_service import service as service
from tests.run_parts import watch_run
from tests.second_user import NOBODY, SOMEBODY, as_user
from tests.waiting import until


def greeted(**identity: Any) -> tuple[Run, Rank]:
    run = Run("train", "r1", 0.0)
    hello = wire.Hello(version="test", identity=wire.Identity(run="train", run_id="r1", **identity))
    return run, run.hello(hello, 0.0)[0]


def batch(first: int, count: int, *names: str, stream: int = 0) -> wire.Batch:
    column = wire.Column(array("d", [1.0] * count).tobytes())
    return wire.Batch(
        stream=stream,
        seqs=array("q", range(first, first + count)).tobytes(),
        times=array("d", [1e9 + seq for seq in range(first, first + count)]).tobytes(),
        columns=dict.fromkeys(names or ("loss",), column),
    )


def test_steps_and_values_of_a_batch_are_limited() -> None:
    run, rank = greeted()
    run.attempt.take(rank, batch(0, MOST_STEPS), 0.0)
    with pytest.raises(ProtocolError, match=f"a batch of {MOST_STEPS + 1} steps, of which it may hold {MOST_STEPS}"):
        run.attempt.take(rank, batch(0, MOST_STEPS + 1), 0.0)
    names = [f"signal {number}" for number in range(MOST_VALUES // MOST_STEPS + 1)]
    with pytest.raises(ProtocolError, match=f"more than {MOST_VALUES} values"):
        run.attempt.take(rank, batch(0, MOST_STEPS, *names), 0.0)


def test_the_steps_of_a_large_batch_have_their_own_values() -> None:
    """Steps are made in portions, and columns that lack rows are cut at the same places."""
    run, rank = greeted()
    whole = {f"signal {number}": array("d", [number + seq for seq in range(500)]) for number in range(400)}
    some = array("H", [row for row in range(500) if row % 7 == 3])
    columns = {name: wire.Column(values.tobytes()) for name, values in whole.items()}
    columns["rare"] = wire.Column(array("d", [10.0 * row for row in some]).tobytes(), some.tobytes())
    run.attempt.take(rank, msgspec.structs.replace(batch(0, 500), columns=columns), 0.0)
    for step in run.attempt.take_closed(0.0):
        assert step.run.pop("rare", None) == (10.0 * step.seq if step.seq % 7 == 3 else None)
        assert step.run == {f"signal {number}": number + step.seq for number in range(400)}
    assert run.attempt.closed_to == 499


def test_the_rows_of_a_column_must_rise() -> None:
    run, rank = greeted()
    column = wire.Column(array("d", [1.0, 2.0]).tobytes(), array("H", [4, 2]).tobytes())
    with pytest.raises(ProtocolError, match="column loss has rows that do not rise"):
        run.attempt.take(rank, msgspec.structs.replace(batch(0, 5), columns={"loss": column}), 0.0)


@pytest.mark.slow
def test_ranks_beyond_those_that_a_node_can_have_are_not_waited_for() -> None:
    run, rank = greeted(world_size=1 << 18)
    assert run.attempt.ranks == {0: rank}
    for number in range(1, AWAITED_RANKS):
        identity = wire.Identity(run="train", run_id="r1", world_size=1 << 18, rank=number)
        run.hello(wire.Hello(version="test", identity=identity), 0.0)
    for known in run.attempt.ranks.values():
        assert not list(run.attempt.take_closed(0.0))
        run.attempt.take(known, batch(0, 1), 0.0)
    assert [len(step.ranks) for step in run.attempt.take_closed(0.0)] == [AWAITED_RANKS]


def test_signals_of_a_rank_are_limited() -> None:
    run, rank = greeted()
    names = (f"signal {number}" for number in itertools.count())
    for seq in range(SIGNALS_OF_A_RANK // 1024):
        run.attempt.take(rank, batch(seq, 1, *itertools.islice(names, 1024)), 0.0)
    with pytest.raises(ProtocolError, match=f"more than {SIGNALS_OF_A_RANK} signals"):
        run.attempt.take(rank, batch(10, 1, next(names)), 0.0)


def test_batches_of_unknown_streams_cost_nothing() -> None:
    run, rank = greeted()
    for stream in range(1, 3000):
        run.attempt.take(rank, batch(0, 2, stream=stream), 0.0)
    run.attempt.take(rank, batch(0, 2), 0.0)
    assert [step.seq for step in run.attempt.take_closed(0.1)] == [0, 1]


def test_content_without_a_fixed_type_is_limited_and_a_first_message_more_so() -> None:
    large = {"text": "x" * (1 << 20)}
    with pytest.raises(ProtocolError, match="a Collected of"):
        wire.frame(wire.Collected(what="census", seq=0, content=large))
    body = wire.frame(wire.Answer(ok=True, content=large))[4:].replace(b"\xa6answer", b"\xa6replyx")
    with pytest.raises(ProtocolError, match="over the limit of 1048576 for one of its kind"):
        wire.from_rank(body)
    empty = wire.frame(wire.Collected(what="census", seq=0, content={"all": [[]] * 300_000}))[4:]
    with pytest.raises(ProtocolError, match="maps and lists, of which it may hold 200000"):
        wire.from_rank(empty)
    assert wire.from_rank(wire.frame(batch(0, MOST_STEPS, *map(str, range(64))))[4:])
    frames = wire.Frames(wire.OPENING_LIMIT)
    with pytest.raises(ProtocolError, match=f"over the limit of {wire.OPENING_LIMIT}"):
        list(frames.feed((wire.OPENING_LIMIT + 1).to_bytes(4, "big")))


@pytest.mark.slow
def test_recent_steps_of_many_signals_are_fewer() -> None:
    run, rank = greeted()
    names = [f"signal {number}" for number in range(2000)]
    for first in range(0, 2048, 128):
        run.attempt.take(rank, batch(first, 128, *names), 0.0)
        list(run.attempt.take_closed(0.0))
    kept = [step.seq for step in run.attempt.recent]
    assert len(kept) == RECENT_VALUES // 4000
    assert kept[-1] == 2047
    run.attempt.rewind(to=10, at=2047)
    assert not run.attempt.recent


def test_the_number_of_steps_that_wait_for_others_is_limited() -> None:
    alignment = Alignment[int]()
    alignment.join_all(range(2))
    alignment.report_all(0, [(seq, 0) for seq in range(OPEN_STEPS + 10)], 0.0)
    closed = [seq for seq, _ in alignment.take_closed(0.0)]
    assert closed == [*range(OPEN_STEPS + 10)], "the rank that nobody heard of is silent, and waited for no more"
    assert alignment.silent == {1}


def test_closed_steps_wait_while_their_reader_pauses() -> None:
    run, rank = greeted()
    run.attempt.take(rank, batch(0, 5), 0.0)
    assert next(run.attempt.take_closed(0.0)).seq == 0
    assert run.attempt.closed_to == 0
    assert [step.seq for step in run.attempt.take_closed(0.0)] == [1, 2, 3, 4]


def watched(tmp_path: Path, supervisor: str = "") -> tuple[WatchedRun, Rank]:
    store = Store(tmp_path / "r1.sqlite", run="train", run_id="r1")
    watch = watch_run(Run("train", "r1", 0.0), loader.load().rules, store)
    identity = wire.Identity(run="train", run_id="r1")
    return watch, watch.ingest.hello(wire.Hello(version="test", identity=identity, supervisor=supervisor), 0.0)


def test_steps_are_judged_in_portions_and_the_attempt_ends_after_the_last(tmp_path: Path) -> None:
    watch, rank = watched(tmp_path)
    watch.ingest.portion = 0.0
    watch.ingest.message(rank, batch(0, 3), 0.0)
    assert (watch.incidents.judged_to, watch.ingest.behind) == (0, True)
    rank.goodbye = wire.Goodbye(next_seq=3)
    watch.ingest.drop_rank(rank, 0.0)
    assert watch.store is not None
    seen = []
    while watch.ingest.behind:
        watch.store.flush(None)
        with History(tmp_path / "r1.sqlite") as history:
            seen.append(history.attempts()[0][2])
        watch.ingest.advance(0.0)
    assert seen
    assert not any(seen)
    watch.store.close()
    with History(tmp_path / "r1.sqlite") as history:
        assert (history.last_seq(0), history.attempts()[0][2] is not None) == (2, True)


def test_users_take_turns_with_one_piece_of_work_each() -> None:
    shares, done = Shares(several=True), list[int]()

    async def work(uid: int) -> None:
        async with turn(shares.find_share(uid)):
            done.append(uid)

    async def work_of_two() -> None:
        await asyncio.gather(*[work(1) for _ in range(50)], work(2))

    asyncio.run(work_of_two())
    assert done.index(2) <= 2, "not after all that another one has to do"


def test_a_user_of_a_service_has_a_part_of_its_descriptors() -> None:
    alone, one_of_several = Shares(several=False), Shares(several=True)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < one_of_several.connections <= soft // 4
    assert one_of_several.connections <= alone.connections


@pytest.mark.processes
def test_a_run_that_ended_before_it_was_heard_is_read_to_its_end() -> None:
    """The daemon is stopped until the process is gone: it cannot send its Welcome, but can read what was sent."""
    program = f"""
import os, socket, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.daemon.simulated import SimulatedRank
from sentinel import wire
rank = SimulatedRank(sys.argv[1])
hello = wire.frame(wire.Hello(version="test", identity=rank.identity))
null = os.open(os.devnull, os.O_RDONLY)
socket.send_fds(rank.connection, [hello], [null, null])
rank.steps(0, [1.0, 2.0, 3.0])
rank.say(wire.Goodbye(next_seq=3))
os._exit(0)
"""
    with daemon_process() as (path, process):
        process.send_signal(signal.SIGSTOP)
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        process.send_signal(signal.SIGCONT)
        assert ended(process) == 0
    with History(paths.state_directory() / "runs/r1.sqlite") as history:
        assert history.incidents() == []
        assert history.last_seq(0) == 2


def test_the_process_of_a_peer_is_held_from_the_connection_on(tmp_path: Path) -> None:
    """By the time at which a peer says hello, its pid may belong to another process."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
            connection, _ = listening.accept()
            with connection:
                process = peers.open_process(connection, child.pid, os.getuid())
            assert process >= 0
            child.kill()
            child.wait()
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(process, 0)
            os.close(process)


@pytest.mark.parametrize("uid", [os.getuid(), os.getuid() + 1])
def test_without_a_pidfd_from_the_kernel_no_process_of_another_user_is_taken(
    uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_PEER_PIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = peers.open_process(ours, os.getpid(), uid)
        assert (process >= 0) == (uid == os.getuid())
        if process >= 0:
            os.close(process)


def test_no_signal_goes_to_a_process_that_is_known_by_its_number_alone() -> None:
    """The number comes from the history, and the process that had it may have ended long ago."""

    async def signalled() -> tuple[bool, bool]:
        processes = Processes(lambda *_: None)
        processes.hold(os.getpid())
        written_down = processes.interrupt(os.getpid(), 0)
        processes.take(os.getpid(), os.pidfd_open(os.getpid()))
        connected = processes.interrupt(os.getpid(), 0)
        processes.close()
        return written_down, connected

    assert asyncio.run(signalled()) == (False, True)


@pytest.mark.slow
@pytest.mark.processes
def test_a_history_for_which_no_descriptor_is_free_is_continued_later() -> None:
    with daemon_process() as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello()
        rank.steps(0, [1.0, 2.0])
        (run,) = rank.ask("status")["runs"]
        process.terminate()
        ended(process)
    with daemon_process("--stay") as (path, process):
        until(lambda: list((paths.state_directory() / "prometheus").glob("*.json")), "the end of its start")
        usual = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        used = set(map(int, os.listdir(f"/proc/{process.pid}/fd")))
        free = (number for number in itertools.count() if number not in used)
        limit = next(itertools.islice(free, 2, None))  # a connection takes the two free ones below it
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, usual[1]))
        with (
            SimulatedRank(path, session="s") as rank,
            pytest.raises(AssertionError, match=r"closed the connection.*\[\]"),
        ):
            rank.hello(next_seq=2)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, usual)
        with SimulatedRank(path, session="s") as rank:
            rank.hello(next_seq=2)
            (run,) = rank.ask("status")["runs"]
            assert (run["attempt"], run["values"]["loss"]) == (0, 2.0)
            rank.say(wire.Goodbye(next_seq=2))
            rank.expect(wire.Kept)
        process.terminate()
        assert ended(process) == 0
    assert [file.name for file in (paths.state_directory() / "runs").iterdir()] == ["r1.sqlite"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.root
def test_runs_of_one_user_are_limited_and_others_are_served(service: Path) -> None:
    def many() -> list[str]:
        ranks, told = [], list[str]()
        for number in range(RUNS + 1):
            ranks.append(SimulatedRank(service, run_id=f"r{number}"))
            ranks[-1].say(wire.Hello(version="test", identity=ranks[-1].identity))
        for rank in ranks[:-1]:
            rank.expect(wire.Welcome)
        told.append(ranks[-1].expect(wire.Refused).reason)
        with SimulatedRank(service, run_id="r0", session="again") as again:
            again.hello()
        return told

    (told,) = as_user(NOBODY, many)
    assert told.startswith(f"user {NOBODY} has {RUNS} runs on this service, the most that it watches for one user")
    with SimulatedRank(service, run_id="other") as rank:
        rank.hello()
        rank.say(wire.Goodbye())
        rank.expect(wire.Kept)


class Asker:
    """A peer that only remembers what is sent to it."""

    def __init__(self, uid: int) -> None:
        self.uid, self.told = uid, list[wire.Message]()

    def send(self, message: wire.Message) -> None:
        self.told.append(message)


@pytest.mark.parametrize(("uid", "learns"), [(NOBODY, True), (0, True), (SOMEBODY, False)])
def test_a_supervisor_is_the_runs_own_user_or_root(uid: int, learns: bool, tmp_path: Path) -> None:
    watch, _ = watched(tmp_path, supervisor="0123456789abcdef")
    supervision, asker = Supervision(cast("Tenants", SimpleNamespace(uid=lambda run_id: NOBODY))), Asker(uid)
    supervision.handle_message(cast("Peer", asker), wire.Supervise(mark="0123456789abcdef", always=True))
    supervision.tell(watch, over=False)
    assert (supervision.serves(watch), bool(asker.told)) == (learns, learns)
    supervision.drop_peer(cast("Peer", asker))
    assert not supervision.serves(watch)
    assert watch.store is not None
    watch.store.close()
