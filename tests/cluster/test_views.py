"""Any node of a job shows all of it: incidents, whole cases, and where the ranks of all nodes are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel import wire
from sentinel.cli import cli, job_status
from sentinel.cluster.protocol.messages import MESSAGE_BYTES, PROTOCOL, decode, encode
from sentinel.cluster.protocol.questions import NodeAnswer, Question, pack_answer, view_rank
from sentinel.config.cluster import Meeting
from sentinel.node import paths
from sentinel.runs import Rank
from sentinel.wire.flight_recorder import Collective, Flight, Group
from sentinel.wire.heartbeat_page import PAGE, pack_heartbeat
from tests.cluster.job import HIGH, LOW, RUN, SECRET, NodeDaemon, free_address, node_daemon
from tests.cluster.listener import Listener
from tests.daemon.simulated import ended
from tests.daemon.test_stalls import BEAT
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
from sentinel.cluster.session import Session

pytestmark = pytest.mark.processes

NOT_ASKED = "ranks 0, 1 wait in all_reduce of 4, number 3, for rank 2: rank 2 is on node 2 (host2): "
WAITING = "rank 2 never came to all_reduce of 4, number 3, in which ranks 0, 1 wait: rank 2 "
DUMP = 'Thread 0x00000001 (most recent call first):\n  File "/x/train.py", line {line} in wait\n'


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """Options of a daemon with one rule that fires easily and asks for stacks."""
    rules, settings = tmp_path / "rules.yaml", tmp_path / "sentinel.toml"
    rules.write_text(
        "group: mine\nrules:\n"
        "  - {alert: TooHigh, scope: run, expr: loss > 100, severity: warning, actions: [evidence, stacks]}\n"
    )
    settings.write_text("[daemon]\nhttp = 'off'\n")
    return ("--config", str(settings), "--rules", str(rules))


@contextlib.contextmanager
def job(
    folder: Path, options: tuple[str, ...], nodes: int = 2, pages: Sequence[int] = ()
) -> Iterator[list[NodeDaemon]]:
    """Run the daemons of all nodes, which hear each other."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        of_node = [{"page": page} for page in pages] or [{}] * nodes
        found = [
            stack.enter_context(node_daemon(n, nodes, address, folder, *options, **of_node[n])) for n in range(nodes)
        ]
        for daemon in found:
            until(functools.partial(_knows, daemon, nodes), f"node {daemon.node} to know all")
        yield found


def _knows(daemon: NodeDaemon, nodes: int) -> bool:
    return len(daemon.states()) == nodes


@contextlib.contextmanager
def answering(*daemons: NodeDaemon, flights: Mapping[int, Flight] = {}) -> Iterator[None]:
    """Have ranks answer where they stand when they are asked, until the end. `flights`: by node, their collectives."""
    threads = [
        threading.Thread(target=_answer, args=(daemon, flights.get(daemon.node, Flight())), daemon=True)
        for daemon in daemons
    ]
    for thread in threads:
        thread.start()
    yield
    for daemon in daemons:
        with contextlib.suppress(OSError):  # its daemon has ended
            daemon.rank.connection.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)


def _answer(daemon: NodeDaemon, flight: Flight) -> None:
    with contextlib.suppress(AssertionError, OSError):
        while True:
            ask = daemon.rank.expect(wire.Ask)
            stacks = {"text": DUMP.format(line=daemon.node + 1)}
            content = stacks if ask.what == "stacks" else msgspec.to_builtins(flight)
            daemon.rank.say(wire.Reply(id=ask.id, ok=True, content=content))


def shown(*words: str, of: NodeDaemon, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """Run a command on one node; return its stdout, read as JSON, and its stderr."""
    monkeypatch.setattr("sentinel.node.paths.live_sockets", lambda: [of.path])
    result = CliRunner().invoke(cli, [*words, "--json"])
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
def test_the_page_of_any_node_lists_all_nodes(tmp_path: Path) -> None:
    settings = tmp_path / "sentinel.toml"
    settings.write_text("[daemon]\nhttp = 0\n")
    with job(tmp_path, ("--config", str(settings)), nodes=3) as nodes:
        nodes[2].process.kill()
        nodes[2].process.wait()
        state = paths.run_directory(f"{RUN}-1") / paths.STATE
        until(state.exists, "the state file")
        http = json.loads(state.read_text())

        def read_page() -> str:
            headers = {"Authorization": f"Bearer {http['token']}"}
            return httpx2.get(f"{http['http']}/live?run={RUN}", headers=headers).text

        until(lambda: "<td>silent for " in read_page(), "node 2 to be silent")
        view = read_page().partition("<h2>Nodes</h2>")[2]
        assert view.index("host2") < view.index("host0") < view.index("host1")
        assert "<td>host1</td><td>alive</td><td>-1</td><td>rank 1</td>" in view
        nodes[0].process.kill()
        until(lambda: "what other nodes do is not known" in read_page(), "the coordinator to be missed")
        assert re.search(r"<td>not heard of for \d+ s; was alive</td>", read_page())


@pytest.mark.slow
def test_incidents_of_all_nodes_are_shown_on_any_with_the_evidence_of_their_node(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(tmp_path, options) as nodes, answering(*nodes):
        for daemon in nodes:
            daemon.rank.steps(0, [LOW])
        nodes[1].rank.steps(1, [HIGH])
        until(lambda: nodes[0].job()["incidents"], "the coordinator to know the incident")
        until(lambda: nodes[1].cases()[0]["stacks"], "node 1 to have the stacks")
        for daemon in nodes:
            (case,), said = shown("incidents", of=daemon, monkeypatch=monkeypatch)
            assert (case["id"], case["alert"]) == ("n1-0.1", "TooHigh")
            assert case["stacks"] == {}
            assert said == ""
            whole, said = shown("incidents", "show", "n1-0.1", of=daemon, monkeypatch=monkeypatch)
            assert "train.py" in whole["stacks"]["1"]
            assert said == ""
            top, _ = shown("top", of=daemon, monkeypatch=monkeypatch)
            assert [case["id"] for case in top["incidents"]] == ["n1-0.1"]
            picture = CliRunner().invoke(cli, ["top", "--once"])
            assert picture.exit_code == 1
            assert "node 0     host0, alive, step 0, rank 0\n" in picture.stdout
            assert "node 1     host1, alive, step 1, was in 1 of 1 incident, rank 1\n" in picture.stdout
            (report,), _ = shown("report", daemon.run()["history"], of=daemon, monkeypatch=monkeypatch)
            assert [case["id"] for case in report["incidents"]] == ["n1-0.1"]
            assert f"this is node {daemon.node} of 2: curves and ranks are its own" in report["job"][0]
        histories = [daemon.run()["history"] for daemon in nodes]
        for daemon in nodes:
            daemon.rank.say(wire.Goodbye())
        for daemon in nodes:
            ended(daemon.process)

    def read_history(node: int, *words: str) -> Result:
        monkeypatch.setenv("SENTINEL_STATE", str(tmp_path / f"state{node}"))
        monkeypatch.setattr("sentinel.node.paths.live_sockets", list)
        return CliRunner().invoke(cli, [*words])

    (case,) = json.loads(read_history(0, "incidents", "--json").stdout)
    assert (case["id"], case["state"], case["own"]) == ("n1-0.1", "unresolved", [])
    assert case["summary"].endswith("(node 1)")
    (report,) = json.loads(read_history(0, "report", histories[0], "--json").stdout)
    assert [case["id"] for case in report["incidents"]] == ["n1-0.1"]
    assert read_history(0, "incidents", "show", "n1-0.1", "--run", RUN).stdout.startswith("TooHigh")
    (case,) = json.loads(read_history(1, "incidents", "--json").stdout)
    assert (case["id"], len(case["stacks"])) == ("0.1", 1)
    missing = read_history(1, "incidents", "show", "n1-0.1")
    assert "node 0 as a rule, keeps the incidents of all nodes; node 1 has it as 0.1" in str(missing.exception)


@pytest.mark.slow
def test_the_coordinator_alone_has_the_figures_of_the_job(tmp_path: Path) -> None:
    settings = tmp_path / "sentinel.toml"
    settings.write_text("[daemon]\nhttp = 0\n")
    with job(tmp_path, ("--config", str(settings)), nodes=2) as nodes:
        for daemon in nodes:
            shards = [3.0 + daemon.node] * (3 - daemon.node)
            daemon.rank.steps(0, [LOW] * len(shards), grad_norm=shards, grad_norm_sharded=shards)
        scrapes = [functools.partial(scrape, daemon) for daemon in nodes]
        until(lambda: 'sentinel_job_lag_steps{run="job1"} 1.0' in scrapes[0](), "the coordinator to know the steps")
        until(lambda: 'sentinel_job_grad_norm{run="job1"} 5.0' in scrapes[0](), "the norm of all shards")
        rejected = 'sentinel_job_connections_rejected_total{run="job1"} 0.0'
        until(lambda: rejected in scrapes[0](), "a first look at the kernel's table of connections")
        coordinator, node = (read() for read in scrapes)
        for line in ('nodes{run="job1",state="alive"} 2.0', 'nodes{run="job1",state="silent"} 0.0',
                     'step{run="job1"} 1.0', 'grad_norm{run="job1"} 5.0'):  # fmt: skip
            assert f"sentinel_job_{line}" in coordinator
            assert f"sentinel_job_{line}" not in node
        assert 'sentinel_job_joined{run="job1"} 1.0' in node
        assert "sentinel_job_connections_rejected_total{" not in node, "it listens on no port"
        nodes[1].process.kill()
        until(lambda: 'sentinel_job_nodes{run="job1",state="silent"} 1.0' in scrapes[0](), "node 1 to be missed")


def scrape(daemon: NodeDaemon) -> str:
    """Return the daemon's metrics, read over HTTP."""
    state = paths.run_directory(f"{RUN}-{daemon.node}") / paths.STATE
    http = json.loads(until(state.exists, "the state file") and state.read_text())
    return httpx2.get(f"{http['http']}/metrics", headers={"Authorization": f"Bearer {http['token']}"}).text


@pytest.mark.slow
def test_a_hang_names_the_rank_and_the_node_that_never_came(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    works = BEAT._replace(beat=now + 600.0, progressed=now + 600.0)
    pages = [os.memfd_create(PAGE) for _ in range(3)]
    for page in pages:
        os.pwrite(page, pack_heartbeat(works), 0)
    flights = {node: issued(2 if node == 2 else 3) for node in range(3)}
    with job(tmp_path, options, 3, pages) as nodes, answering(*nodes, flights=flights):
        for page in pages:  # only now: a rank that is asked before it can answer counts as one that cannot
            os.pwrite(page, pack_heartbeat(works._replace(progressed=time.monotonic() - 8.0)), 0)

        def find_cause(daemon: NodeDaemon) -> str:
            (run,), _ = shown("hang", of=daemon, monkeypatch=monkeypatch)
            return str(run["cause"])

        until(lambda: find_cause(nodes[0]).startswith(WAITING), "the ranks to stand")
        for daemon in nodes:
            (run,), _ = shown("hang", of=daemon, monkeypatch=monkeypatch)
            assert run["cause"].startswith(WAITING)
            assert run["cause"].endswith("at /x/train.py:3 in wait; rank 2 is on node 2 (host2)")
            assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [(0, 0), (1, 1), (2, 2)]
            assert run["not_asked"] == []
        nodes[2].process.send_signal(signal.SIGSTOP)
        (run,), _ = shown("hang", of=nodes[1], monkeypatch=monkeypatch)
        assert run["cause"].startswith(NOT_ASKED)
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        assert [words.startswith("node 2 (host2): ") for words in run["not_asked"]] == [True]
        text = CliRunner().invoke(cli, ["hang"]).stdout
        assert "  node 0      host0\n  rank 0      " in text
        assert "  not asked   node 2 (host2): " in text
    for page in pages:
        os.close(page)


def issued(count: int) -> Flight:
    """Return the record of a rank that has issued `count` all-reduces, of which two are complete on all ranks."""
    ones = [Collective("0", seq, "all_reduce", ((4,),), seq < 3, float(seq)) for seq in range(1, count + 1)]
    return Flight({"0": Group("0", "default_pg", (0, 1, 2), count, 2)}, tuple(ones))


@pytest.mark.slow
def test_a_node_without_its_coordinator_shows_what_it_has_and_says_so(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(tmp_path, options) as (coordinator, node), answering(coordinator, node):
        coordinator.process.terminate()
        until(lambda: node.job()["view"] == "alone", "node 1 to know that it is alone")
        node.rank.steps(0, [LOW, HIGH])
        until(node.cases, "node 1 to have an incident")
        (case,), said = shown("incidents", of=node, monkeypatch=monkeypatch)
        assert case["id"] == "0.1"
        assert "not asked: the other nodes: the coordinator at 127.0.0.1" in said
        (run,), _ = shown("hang", of=node, monkeypatch=monkeypatch)
        assert [rank["rank"] for rank in run["ranks"]] == [1]
        alone, silence = run["not_asked"]
        assert "this is what this node sees alone" in alone
        assert re.fullmatch(r"node 0 \(host0\): not heard of for \d+ s", silence)
        shown_node = next(line for line in job_status.lines(node.job()) if line.startswith("  node 0 "))
        assert re.fullmatch(r"  node 0    host0, not heard of for \d+ s; was alive, step -?\d+", shown_node)


@pytest.mark.slow
def test_what_is_no_question_is_refused_and_counted(options: tuple[str, ...], tmp_path: Path) -> None:
    with job(tmp_path, options) as nodes:
        address = nodes[0].job()["address"]
        answers, finished = list[bytes](), threading.Event()
        stranger = Session(Meeting((address,), SECRET), RUN, 7, Listener())

        def ask(payload: bytes, node: int | None = None) -> None:
            finished.clear()
            stranger.ask_view(node, payload, lambda _, part: answers.append(part), finished.set, 30.0)
            assert finished.wait(60)

        try:
            for payload in (b"", b"nonsense", encode(Question(what="ranks", protocol=PROTOCOL + 1))):
                ask(payload)
            assert answers == []
            until(lambda: [daemon.job()["refused"] for daemon in nodes] == [3, 3], "both nodes to count them")
            ask(encode(Question(what="cases")), 1)
            assert [decode(part, NodeAnswer).node for part in answers] == [1]
        finally:
            stranger.close()


def test_an_answer_is_cut_into_messages_that_fit_and_what_does_not_is_counted() -> None:
    ranks = tuple(view_rank(rank_with(flight)) for flight in [issued(3), wide(), wide(), wide()])
    parts = pack_answer(NodeAnswer(node=1, attempt=0, ranks=ranks))
    assert len(parts) > 1
    assert max(map(len, parts)) <= MESSAGE_BYTES
    found = [decode(part, NodeAnswer) for part in parts]
    assert [view for part in found for view in part.ranks] == list(ranks)
    assert [part.left_out for part in found] == [0] * len(parts)
    assert ranks[1].flight is not None
    assert {one.seq for one in ranks[1].flight.collectives} == {2, 3}, "those that are over are left out first"
    huge = view_rank(rank_with(wide("p" * 4000)))
    assert huge.flight is None
    large = msgspec.structs.replace(ranks[0], stack="s" * MESSAGE_BYTES)
    (part,) = pack_answer(NodeAnswer(node=1, attempt=0, ranks=(large,)))
    assert decode(part, NodeAnswer).left_out == 1


def rank_with(flight: Flight) -> Rank:
    rank = Rank(wire.Hello(version="test", identity=wire.Identity(run="train", run_id=RUN)), 0.0)
    rank.flight = flight
    return rank


def wide(place: str = "p" * 1000) -> Flight:
    """Return a record with many groups."""
    groups = {str(n): Group(str(n), "", (0, 1, 2), 3, 2) for n in range(90)}
    ones = (msgspec.structs.replace(one, group=name, place=place) for name in groups for one in issued(3).collectives)
    return Flight(groups, tuple(ones))
