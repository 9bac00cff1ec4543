"""Simulated nodes of a job, without daemons or ranks: they send the coordinator what real nodes send, once a second.

    python -m bench.cluster_nodes '{"first": 1, "last": 63, ...}'       bench/cluster.py starts it, for a part of a job

They have the parts that a daemon has: its session, its numbered events, its digests of steps. When the process reads
the line `storm`, all its nodes have the same alert within a second; at the next line it prints as JSON what it saw,
and ends.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import msgspec

from sentinel.cluster.protocol.digest import DigestSender
from sentinel.cluster.protocol.job_rules import find_signals, select_job_rules
from sentinel.cluster.protocol.messages import Beat, Pulse, decode, encode
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.seal import Seal
from sentinel.cluster.session import open_session
from sentinel.config.cluster import Meeting
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.rulebook.loader import stock_rules
from sentinel.runs.steps import RunStep
from sentinel.signals import SIGNALS

SAMPLED_EVERY = 16
"""A rank measures what takes time at every step divisible by this."""
SECONDS = {"step_seconds": 0.9, "forward_seconds": 0.3, "backward_seconds": 0.5}
"""Seconds that each step takes, about the same on all ranks."""
FIRES_SECONDS = 2.0
"""Seconds after which an incident is over."""
STORM = "Storm"
"""The alert that all nodes have in the storm."""
ADDRESSES = 1
"""How many nodes may be the coordinator: only node 0."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some nodes of a job."""

    address: str
    secret: str
    run_id: str
    first: int
    last: int
    ranks: int
    """Ranks of each node."""
    sessions: int
    """Number of Zenoh sessions that these nodes share."""
    incident_seconds: float
    """Seconds between two incidents of these nodes."""


class Seen(msgspec.Struct, kw_only=True):
    """What happened to the nodes of a part."""

    fired: dict[str, float] = {}
    """Id of the job's incident -> Unix seconds at which it was sent to the coordinator."""
    behind: int = 0
    """The largest number of steps of one node that the coordinator has not confirmed."""
    storm_at: float = 0.0
    """Unix seconds at which the first of them raised `STORM`."""
    known: int = 0
    """Number of these nodes that are alive according to the coordinator."""
    cpu_seconds: float = 0.0


class LoadNode:
    """One simulated node."""

    def __init__(self, number: int, ranks: int) -> None:
        self.number, self._ranks = number, range(ranks * number, ranks * (number + 1))
        self.state = Node(number, int(time.time() * 1000), time.monotonic(), ADDRESSES)
        self._signals = find_signals(select_job_rules(stock_rules()))
        self._digests = DigestSender(number, 0, self._signals)
        self._draw = random.Random(number)
        self.step = -1
        self.in_storm = False

    def make_messages(self, now: float) -> list[tuple[str, bytes]]:
        """Make a step now; return the messages that the node sends after it, as (kind, payload)."""
        self.step += 1
        self._digests.add(RunStep(self.step, time.time(), {rank: self._measure() for rank in self._ranks}, {}))
        election = self.state.election
        pulse = Pulse(
            node=self.number, incarnation=self.state.incarnation, hostname=f"host-{self.number:04}.cluster.local",
            attempt=0, step=self.step, ranks={str(rank): self.step for rank in self._ranks}, last=self.state.last,
            epoch=election.epoch, stamp=election.stamp,
        )  # fmt: skip
        digest = self._digests.make_digest(now)
        return [("pulse", encode(pulse)), *([("digest", encode(digest))] if digest is not None else [])]

    def take_beat(self, beat: Beat, now: float) -> None:
        """Take a beat of the coordinator, with the steps that it confirms."""
        self.state.take_beat(beat, now)
        self._digests.confirm(beat.digested.get(str(self.number), -1), now)

    def count_behind(self, beat: Beat) -> int:
        """Return how many steps the coordinator has not confirmed."""
        return self.step - beat.digested.get(str(self.number), -1)

    def make_event(self, number: int, alert: str, state: str) -> bytes:
        """Return the event of a case that fires or is over, encoded."""
        case = Case(
            id=f"0.{number}", run="load", run_id="load", attempt=0, alert=alert,
            severity="critical", state=state, first_step=self.step, first_seq=self.step, step=self.step,
            resolved_step=self.step if state != "firing" else None, time=time.time(), members=(),
            resolved_time=time.time() if state != "firing" else None, summary="an alert of one node",
            diagnosis=Finding(cause="", confidence="none"), told=True,
        )  # fmt: skip
        return encode(self.state.record(case))

    def _measure(self) -> dict[str, float]:
        sampled = self.step % SAMPLED_EVERY == 0
        names = [name for name in self._signals if sampled or SIGNALS[name].tier == 0]
        # Seconds differ between ranks, and hardly compress; batch sizes and checksums are equal on all.
        return {name: SECONDS[name] + 0.02 * self._draw.random() if name in SECONDS else 1.0 for name in names}


class Line:
    """A Zenoh session, and the nodes that send by it."""

    def __init__(self, part: Part, nodes: list[LoadNode]) -> None:
        self._root, self.nodes = f"sentinel/{part.run_id}", {node.number: node for node in nodes}
        self.payload = b""
        """The last beat received."""
        self._session = open_session(Meeting((part.address,) * ADDRESSES, part.secret), nodes[0].number)
        self._seal = Seal(part.secret)
        self._kept: list[Any] = [self._session.declare_subscriber(f"{self._root}/beat/*", self._take)]
        for number in self.nodes:
            self._kept.append(self._session.liveliness().declare_token(f"{self._root}/alive/{number}"))
            self._kept.append(self._session.declare_queryable(f"{self._root}/event/{number}", self._answer))

    def put(self, kind: str, node: int, payload: bytes) -> None:
        """Send a message of a node."""
        key = f"{self._root}/{kind}/{node}"
        self._session.put(key, self._seal.sign(key, payload))

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _take(self, sample: Any) -> None:
        self.payload = self._seal.check(str(sample.key_expr), bytes(sample.payload))

    def _answer(self, query: Any) -> None:
        node = self.nodes[int(str(query.key_expr).rpartition("/")[2])]
        after = int(str(query.parameters).removeprefix("after="))
        with query:
            query.reply(query.key_expr, self._seal.sign(str(query.key_expr), encode(node.state.list_events(after))))


class Load:
    """Runs all nodes of a part."""

    def __init__(self, part: Part) -> None:
        nodes = [LoadNode(number, part.ranks) for number in range(part.first, part.last + 1)]
        self._lines = [Line(part, nodes[index :: part.sessions]) for index in range(part.sessions)]
        self._pairs = [(line, node) for line in self._lines for node in line.nodes.values()]
        self._draw, self._incident_seconds = random.Random(part.first), part.incident_seconds
        self._incident_at = time.monotonic() + part.incident_seconds
        self._open: list[tuple[float, Line, LoadNode, int]] = []
        self._opened = 0
        self.storm = threading.Event()
        self.seen = Seen()

    def run(self, stop: threading.Event) -> None:
        """Send for all nodes, once a second each and spread over the second, until `stop` is set."""
        began, turn = time.monotonic(), 0
        while not stop.is_set():
            beat = self._read_beat()
            for index, (line, node) in enumerate(self._pairs):
                time.sleep(max(began + turn + index / len(self._pairs) - time.monotonic(), 0.0))
                now = time.monotonic()
                if beat is not None:
                    node.take_beat(beat, now)
                for kind, payload in node.make_messages(now):
                    line.put(kind, node.number, payload)
                self._change_incidents(now)
                if self.storm.is_set() and not node.in_storm:
                    node.in_storm, self.seen.storm_at = True, self.seen.storm_at or time.time()
                    line.put("event", node.number, node.make_event(0, STORM, "firing"))
            turn = max(turn + 1, int(time.monotonic() - began))  # too slow for this many nodes: skip seconds
        if (beat := self._read_beat()) is not None:
            self.seen.behind = max(node.count_behind(beat) for _, node in self._pairs)
            own = {node.number for _, node in self._pairs}
            self.seen.known = sum(state.state == "alive" for state in beat.nodes if state.node in own)
        self.seen.cpu_seconds = time.process_time()

    def close(self) -> None:
        """End all sessions."""
        for line in self._lines:
            line.close()

    def _read_beat(self) -> Beat | None:
        """Return the beat of the first session that has one: it is decoded once for all nodes of this process."""
        payload = next((line.payload for line in self._lines if line.payload), b"")
        return decode(payload, Beat) if payload else None

    def _change_incidents(self, now: float) -> None:
        while self._open and now > self._open[0][0]:
            _, line, node, number = self._open.pop(0)
            line.put("event", node.number, node.make_event(number, f"Load{node.number}x{number}", "resolved"))
        if now < self._incident_at or self._lines[0].payload == b"":
            return
        self._incident_at = now + self._incident_seconds
        line, node = self._draw.choice(self._pairs)
        self._opened += 1
        self._open.append((now + FIRES_SECONDS, line, node, self._opened))
        payload = node.make_event(self._opened, f"Load{node.number}x{self._opened}", "firing")
        self.seen.fired[f"n{node.number}-0.{self._opened}"] = time.time()
        line.put("event", node.number, payload)


def main() -> None:
    load = Load(msgspec.json.decode(sys.argv[1], type=Part))
    stop = threading.Event()
    speaking = threading.Thread(target=load.run, args=(stop,))
    speaking.start()
    if sys.stdin.readline() == "storm\n":
        load.storm.set()
        sys.stdin.readline()
    stop.set()
    speaking.join()
    print(msgspec.json.encode(load.seen).decode(), flush=True)
    load.close()


if __name__ == "__main__":
    main()
