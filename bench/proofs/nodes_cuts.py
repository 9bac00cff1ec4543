"""Cuts the network of a job over four nodes, and checks which node gives orders and which pages are sent.

Each trial has four network namespaces with a real daemon in each, three of which may be the coordinator, and on each a
scripted rank that trains nothing. The network is cut for 5, 20 or 60 s: into 2 and 2 nodes, into 3 and 1, in one
direction, or at a cable; or a node's link is slow, and its connections stall or end. Meanwhile one node has an alert
that asks for a rollback; it is resolved after the nodes have met again. A trial fails if

    two nodes act as the coordinator at the same time, or none does on a side with a majority after 20 s
    a rank on a side without a majority of nodes gets an order
    a node without a coordinator does not say so within 20 s
    the job's alert is not sent, or under two keys; a node pages for itself in a cut of 20 s or less, or twice
    a page is not resolved in the end
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.places import find_daemon, make_places
from sentinel import wire
from sentinel.demo.inbox import Inbox
from sentinel.demo.network import SUBNET, Network, find_hindrance, open_namespaces
from sentinel.errors import SentinelError
from sentinel.node.question import ask_daemon

NODES, ADDRESSES = 4, 3
RUN_ID = "cuts"
RULES = """
group: cuts
signals: {level: what the ranks log}
rules:
  - alert: High
    scope: run
    expr: level > 100
    severity: critical
    actions: [rollback]
"""
SETTINGS = """
[daemon]
http = "off"
[grouping]
wait = "0s"
interval = "0s"
[[receivers]]
name = "pager"
type = "webhook"
url = "http://%s/"
severities = ["critical"]
"""
STEP_SECONDS = 0.5
SNAPSHOT_EVERY = 10
TERMS = wire.RollbackTerms(every=SNAPSHOT_EVERY, keep=3, margin=5, budget=3)
LIMIT_SECONDS = 180.0
ORDERS_END_SECONDS = 6.0
"""Seconds after a cut within which orders may still come: a coordinator relies on silent nodes for 4.5 s."""
ALERT_SECONDS = 7.0
"""Seconds from a cut to the alert, in cuts of at least twice this length."""
SHORT_SECONDS = 20.0
"""Length of a cut in which no node pages for itself, and after which each cut-off node says it has no coordinator."""


class Cut(NamedTuple):
    """What is done to the network."""

    dropped: tuple[tuple[int, int], ...] = ()
    """(from, to): packets from one node to another are dropped."""
    cable: int | None = None
    """The node whose cable is unplugged."""
    apart: tuple[int, ...] = ()
    """Nodes that are not on a side with a majority of nodes."""
    link: dict[str, float] | None = None
    """Arguments of `_bad_link` for the link of the last node, which is bad instead of cut."""


def _part(*apart: int) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a in range(NODES) for b in range(NODES) if (a in apart) != (b in apart))


CUTS = {
    "2 and 2 nodes": Cut(_part(2, 3), apart=(0, 1, 2, 3)),
    "a node alone": Cut(_part(3), apart=(3,)),
    "the coordinator alone": Cut(_part(0), apart=(0,)),
    "a node is not heard": Cut(tuple((3, other) for other in range(3)), apart=(3,)),
    "the coordinator is not heard": Cut(tuple((0, other) for other in range(1, 4)), apart=(0,)),
    "a node's cable": Cut(cable=2, apart=(2,)),
    "the coordinator's cable": Cut(cable=0, apart=(0,)),
}
LINKS = {
    "100 ms each way": Cut(link={"delay": 0.1, "stall": 0.0, "cut": 0.0}),
    "100 ms, connections stall": Cut(link={"delay": 0.1, "stall": 0.05, "cut": 0.0}),
    "100 ms, connections end": Cut(link={"delay": 0.1, "stall": 0.0, "cut": 0.05}),
}
CASES = [(name, cut, seconds) for seconds in (5.0, 20.0, 60.0) for name, cut in CUTS.items()]
CASES += [(name, link, 40.0) for name, link in LINKS.items()]
TRIALS = len(CASES)
SAMPLE = (0,)


def run_trial(seed: int) -> dict[str, Any]:
    """Make one cut, and check what it leads to."""
    name, cut, seconds = CASES[seed]
    if hindrance := find_hindrance():
        return {"case": f"not run: {hindrance}"}
    with tempfile.TemporaryDirectory(prefix="n") as folder, open_namespaces(NODES) as network:
        trial = _Trial(Path(folder), network, cut, seconds)
        with contextlib.closing(trial):
            trial.start(seed)
            try:
                trial.run(alert_on=seed % NODES)
                return {"case": f"{name}, {seconds:.0f} s", **trial.check()}
            except AssertionError as error:
                raise AssertionError(f"{name}, {seconds:.0f} s: {error}\n{trial.describe()}") from None


class _Rank:
    """The only rank of a node: it sends steps and snapshots, and answers no order."""

    def __init__(self, path: Path, node: int) -> None:
        self.level = 1.0
        self.orders: list[tuple[float, wire.Message]] = []
        self._step, self._frames = 0, wire.Frames()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(str(path))
        self._connection.setblocking(False)
        identity = wire.Identity(
            run="cuts", run_id=RUN_ID, rank=node, world_size=NODES, local_world_size=1, pid=os.getpid(),
            session=f"s{node}", node=node, hostname=f"host{node}",
        )  # fmt: skip
        self._connection.sendall(wire.frame(wire.Hello(version="bench", identity=identity, rollback=TERMS)))

    def step(self) -> None:
        """Send one step, and note the orders that have come meanwhile."""
        seqs, times = array("q", [self._step]).tobytes(), array("d", [time.time()]).tobytes()
        columns = {"level": wire.Column(array("d", [self.level]).tobytes())}
        self._connection.sendall(wire.frame(wire.Batch(seqs=seqs, times=times, columns=columns)))
        if self._step % SNAPSHOT_EVERY == 0:
            taken = wire.SnapshotTaken(seq=self._step, nbytes=1000, seconds=0.01, time=time.time())
            self._connection.sendall(wire.frame(taken))
        self._step += 1
        with contextlib.suppress(BlockingIOError):
            for body in self._frames.feed(self._connection.recv(1 << 16)):
                if isinstance(message := wire.to_rank(body), wire.Prepare | wire.Commit):
                    self.orders.append((time.monotonic(), message))

    def close(self) -> None:
        """Close the connection without a goodbye, as a killed process does."""
        self._connection.close()


class _Trial:
    def __init__(self, root: Path, network: Network, cut: Cut, seconds: float) -> None:
        self._root, self._network, self._cut, self._seconds = root, network, cut, seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_Rank] = []
        self._inbox = Inbox(root / "pages.jsonl")
        self._views: list[tuple[float, list[str]]] = []
        self._cut_at = self._healed_at = 0.0
        self._stepped_at = 0.0

    def start(self, seed: int) -> None:
        """Start receiver, daemons and ranks; wait until all nodes have met and there are snapshots."""
        root, network = self._root, self._network
        (root / "rules.yaml").write_text(RULES)
        receiver = ["-m", "sentinel.demo.inbox", network.inbox, str(root / "pages.jsonl")]
        self._start([*network.inbox_prefix, sys.executable, *receiver], {}, "receiver")
        port = network.coordinator.rpartition(":")[2]
        addresses = [f"{SUBNET}.{node + 1}:{port}" for node in range(ADDRESSES)]
        for node in range(NODES):
            meeting = addresses
            if self._cut.link is not None and node == NODES - 1:
                meeting = [f"127.0.0.1:{9501 + index}" for index in range(ADDRESSES)]
                routes = [f"{9501 + index}={address}" for index, address in enumerate(addresses)]
                terms = json.dumps({"seed": seed, **self._cut.link})
                link = [sys.executable, "-m", "bench.proofs._bad_link", *routes, terms]
                self._start([*network.prefixes[node], *link], {}, "link")
            (root / f"{node}").mkdir()
            places = make_places(root / f"{node}", SETTINGS % network.inbox)
            places |= {"SENTINEL_CLUSTER": ",".join(meeting), "SENTINEL_CLUSTER_SECRET": "a secret of all nodes"}
            directory = ["--directory", f"{root}/{node}/run/{RUN_ID}", "--rules", str(root / "rules.yaml")]
            daemon = [sys.executable, "-m", "sentinel", "daemon", "--nice", "0", *directory]
            self._start([*network.prefixes[node], *daemon], places, f"daemon{node}")
        for node in range(NODES):
            self._await(functools.partial(find_daemon, root / f"{node}" / "run"), f"daemon {node}")
            self._ranks.append(_Rank(self._path(node), node))
        self._await(self._meets, "all nodes to meet")
        margin = time.monotonic() + 8.0  # time for a snapshot to become good
        self._await(lambda: time.monotonic() > margin, "snapshots")

    def run(self, *, alert_on: int) -> None:
        """Cut the network, raise the alert, and end both."""
        self._cut_at = time.monotonic()
        self._set_network(cut=True)
        self._pass(min(ALERT_SECONDS, self._seconds / 2))
        self._ranks[alert_on].level = 101.0
        self._pass(self._cut_at + self._seconds - time.monotonic())
        self._healed_at = time.monotonic()
        self._set_network(cut=False)
        self._await(self._meets, "all nodes to meet again")
        self._await(lambda: bool(self._list_keys(RUN_ID)), "the job's page")
        self._ranks[alert_on].level = 1.0
        self._await(self._is_resolved, "the end of all pages")

    def check(self) -> dict[str, Any]:
        """Return what was counted. Raises AssertionError if a promise was broken."""
        during = [(at - self._cut_at, views) for at, views in self._views if self._cut_at < at < self._healed_at]
        lasts = self._cut.link is None and self._seconds >= SHORT_SECONDS
        for node in self._cut.apart if lasts else ():
            assert any(views[node] in ("local view", "alone") for _, views in during), f"node {node} says nothing"
            late = [order for at, order in self._ranks[node].orders if self._is_late(at)]
            assert not late, f"node {node} was given {late}"
        if lasts and len(self._cut.apart) < NODES:
            assert "coordinator" in during[-1][1], f"none acts at the end of the cut: {during[-1]}"
        keys = self._list_keys(RUN_ID)
        assert len(keys) == 1, f"the job's alert came under {len(keys)} keys"
        own = {node: self._list_keys(f"{RUN_ID}@node-{node}") for node in range(NODES)}
        assert all(len(found) <= 1 for found in own.values()), f"a node paged for itself twice: {own}"
        told_alone = [node for node, found in own.items() if found]
        assert not told_alone or (lasts and self._seconds > SHORT_SECONDS), f"nodes {told_alone} paged for themselves"
        return {
            "pages of a node's own": len(told_alone),
            "seconds to meet again": round(self._met_again_at - self._healed_at, 1),
            "orders": sum(len(rank.orders) for rank in self._ranks),
        }

    def describe(self) -> str:
        """Describe what is known, for a failure's message."""
        self._inbox.take()
        pages = [
            f"{m.time - time.time() + time.monotonic() - self._cut_at:.1f} {m.run_id} {m.incident} {m.firing} {m.done}"
            for m in self._inbox.messages
        ]
        views = [f"{at - self._cut_at:.1f} {views}" for at, views in self._views]
        orders = [(node, round(at - self._cut_at, 1), m) for node, r in enumerate(self._ranks) for at, m in r.orders]
        said = [(self._root / f"daemon{node}.log").read_text(errors="replace")[-2000:] for node in range(NODES)]
        return "\n".join([*views, f"healed at {self._healed_at - self._cut_at:.1f}", *pages, str(orders), *said])

    def close(self) -> None:
        """Kill all processes."""
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def _met_again_at(self) -> float:
        after = (at for at, views in self._views if at > self._healed_at and _is_joined(views))
        return next(after)

    def _is_late(self, at: float) -> bool:
        return self._cut_at + ORDERS_END_SECONDS < at < self._healed_at

    def _start(self, command: list[str], environment: dict[str, str], name: str) -> None:
        with (self._root / f"{name}.log").open("wb") as said:
            self._processes.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=said, stderr=said)
            )

    def _path(self, node: int) -> Path:
        return self._root / f"{node}" / "run" / RUN_ID / "sentinel.sock"

    def _set_network(self, *, cut: bool) -> None:
        for sender, receiver in self._cut.dropped:
            route = f"ip route {'add' if cut else 'del'} blackhole {SUBNET}.{receiver + 1}/32"
            subprocess.run([*self._network.prefixes[sender], *route.split()], check=True)
        if self._cut.cable is not None:
            self._network.set_link(self._cut.cable, "down" if cut else "up")

    def _pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._await(lambda: time.monotonic() >= end, "the time to pass")

    def _await(self, holds: Callable[[], object], what: str) -> None:
        """Have the ranks make steps, and look at the nodes, until something holds."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            if time.monotonic() > self._stepped_at + STEP_SECONDS:
                self._stepped_at = time.monotonic()
                for rank in self._ranks:
                    rank.step()
                if len(self._ranks) == NODES:
                    self._look()
            time.sleep(0.05)

    def _look(self) -> None:
        """Note each node's view, in turn. A coordinator that still acts after another one did is a failure."""
        views = [self._ask(node) for node in range(NODES)]
        self._views.append((time.monotonic(), views))
        acting = [node for node, view in enumerate(views) if view == "coordinator"]
        if len(acting) > 1:
            assert self._ask(acting[0]) != "coordinator", f"nodes {acting} act as the coordinator"

    def _ask(self, node: int) -> str:
        with contextlib.suppress(SentinelError, OSError):
            for run in ask_daemon(self._path(node), "status")["runs"]:
                view: str = run["job"]["view"] if run["job"] else ""
                return view
        return ""

    def _meets(self) -> bool:
        return bool(self._views) and _is_joined(self._views[-1][1]) and self._views[-1][0] > self._healed_at

    def _list_keys(self, run_id: str) -> set[str]:
        self._inbox.take()
        return {message.key for message in self._inbox.messages if message.run_id == run_id and message.firing}

    def _is_resolved(self) -> bool:
        self._inbox.take()
        last = {message.key: message.firing for message in self._inbox.messages}
        return not any(last.values())


def _is_joined(views: list[str]) -> bool:
    return sorted(views) == ["coordinator", *["joined"] * (NODES - 1)]
