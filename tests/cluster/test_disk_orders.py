"""Rules that keep what all nodes have on disk from being deleted, whatever is late, lost or dead; without processes."""

from __future__ import annotations

import math
import random

import pytest

from sentinel.cluster.protocol.disk import NodeDisk, find_floor, list_on_all
from sentinel.cluster.protocol.messages import NodeRollback, RollbackOrder
from sentinel.hooks.rollback.disk_writer import AHEAD, CommonSnapshots

KEEP = 2


class Node:
    """A node's daemon, and what its first rank does with the directory."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begin_attempt(-1)

    def begin_attempt(self, resumed: int) -> None:
        self.steps = [step for step in self.steps if step <= resumed]
        self.common = CommonSnapshots(resumed)
        self.disk = NodeDisk()
        self.unheard = 0
        """Number of snapshots written since all nodes last heard what all have."""

    def publish(self, step: int) -> None:
        self.steps.append(step)
        self.common.note(self.steps, self.disk.on_all, self.disk.floor)
        for gone in self.common.list_superfluous(sorted(self.steps, reverse=True), KEEP):
            self.steps.remove(gone)
        self.disk.kept, self.disk.safe = tuple(self.steps), self.common.find_safe(KEEP)
        self.unheard += 1

    def rewind(self, to: int) -> None:
        self.steps = [step for step in self.steps if step <= to]
        self.common.rewind(to)
        self.disk.rewind(to)

    def report(self, attempt: int) -> NodeRollback:
        return NodeRollback(
            attempt=attempt, step_offset=0, step_seconds=0.1, ranks=(), on_disk=self.disk.kept, safe=self.disk.safe
        )


class Job:
    """A job to which everything possible happens, in random order."""

    def __init__(self, seed: int, nodes: int, talk: float, longest: float = math.inf) -> None:
        """Build the job.

        `talk` is how often nodes hear of each other for every ten times that they write, `longest` the most snapshots
        that a node writes between two moments at which all hear of all.
        """
        self.random = random.Random(seed)
        self.nodes = [Node() for _ in range(nodes)]
        self.talk, self.longest = talk, longest
        self.restarts = 0.3 if longest == math.inf else 0.0
        """Weight of restarts of daemons, which then do not know for a while what their node has."""
        self.attempt = self.step = self.began = 0
        self.reports: dict[int, NodeRollback] = {}
        """The reports that the coordinator heard last, by node."""
        self.orders: list[RollbackOrder] = []
        """The coordinator's orders: a late one may come after others."""
        self.best: int | None = None
        """Step of the newest snapshot that all nodes had; None: there was none."""
        self.floor = -1
        """The highest floor in an order since the last rollback."""

    def list_common(self) -> set[int]:
        return set.intersection(*(set(node.steps) for node in self.nodes))

    def train_on(self) -> None:
        """Train all nodes up to a step of which a snapshot is written. Some nodes cannot write it."""
        self.step += 10
        if any(node.unheard >= self.longest for node in self.nodes):
            for node in (*self.nodes, *self.nodes):
                self.hear(node, late=False)
                node.unheard = 0
        for node in self.nodes:
            if self.random.random() < 0.7:
                node.publish(self.step)

    def hear(self, node: Node, *, late: bool) -> None:
        """Let a node's report arrive, and an order of the coordinator: the last one, or with `late` an older one."""
        self.reports[self.nodes.index(node)] = node.report(self.attempt)
        count = len(self.nodes)
        order = RollbackOrder(
            attempt=self.attempt, on_all=list_on_all(self.reports, count, self.attempt),
            floor=find_floor(self.reports, count, self.attempt),
        )  # fmt: skip
        self.floor = max(self.floor, order.floor)
        self.orders.append(order)
        node.disk.take_order(self.random.choice(self.orders) if late else order)

    def go_back(self) -> None:
        """Roll all ranks back by less than two snapshots, but not before the step at which the attempt began."""
        to = max(self.step - self.random.randrange(1, 15), self.began)
        self.step = to - to % 10
        self.reports.clear()
        self.orders.clear()
        for node in self.nodes:
            node.rewind(to)
        self.best, self.floor = max(self.list_common(), default=None), -1

    def die(self) -> None:
        """Start the job again, from the newest snapshot that all have."""
        self.best, self.floor = max(self.list_common(), default=None), -1
        self.attempt += 1
        self.step = self.began = self.best or 0
        self.reports.clear()
        self.orders.clear()
        for node in self.nodes:
            node.begin_attempt(self.best if self.best is not None else -1)

    def advance(self) -> None:
        """Let one thing happen; check that the newest common snapshot, or a newer one, is still common."""
        kinds = ["train", "hear", "back", "die", "daemon", "coordinator"]
        match self.random.choices(kinds, [10, self.talk, 0.5, 0.3, self.restarts, 0.3]):
            case ["train"]:
                self.train_on()
            case ["hear"]:
                self.hear(self.random.choice(self.nodes), late=self.random.random() < 0.3)
            case ["back"]:
                self.go_back()
            case ["die"]:
                self.die()
            case ["daemon"]:
                self.random.choice(self.nodes).disk = NodeDisk()
            case ["coordinator"]:
                self.reports.clear()
        common = self.list_common()
        newest = max(common, default=-1)
        if self.longest < math.inf and self.best is not None:
            assert newest >= self.best, [node.steps for node in self.nodes]
        assert newest >= self.floor, [node.steps for node in self.nodes]
        self.best = newest if common else None


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("talk", [0.3, 3, 30])
@pytest.mark.parametrize("longest", [1, AHEAD - 1, math.inf])
def test_what_all_nodes_have_is_not_deleted(nodes: int, talk: float, longest: float) -> None:
    """The newest one stays if the nodes hear of each other now and then; if they never do, at least one stays."""
    for seed in range(100):
        job = Job(seed, nodes, talk, longest)
        for _ in range(80):
            job.advance()


def test_a_node_keeps_no_more_than_it_must() -> None:
    job = Job(0, 2, 0)
    for _ in range(20):
        job.step += 10
        for node in job.nodes:
            node.publish(job.step)
        for node in (*job.nodes, *job.nodes):
            job.hear(node, late=False)
    assert all(len(node.steps) <= KEEP + 2 for node in job.nodes), [node.steps for node in job.nodes]
    alone = Node()
    for step in range(0, 300, 10):
        alone.publish(step)
    newest = list(range(300 - 10 * (KEEP + AHEAD), 300, 10))
    assert alone.steps == [0, 160, *newest], "cut off from the beginning: the older ones are thinned out"


@pytest.mark.parametrize("spacing", [1, 10, 1000])
@pytest.mark.parametrize("duration", range(9))
def test_a_slow_node_shares_a_snapshot_with_the_others_even_without_messages(duration: int, spacing: int) -> None:
    """The slow node takes `duration` times the time between two snapshots to write one."""
    fast, slow = Node(), Node()
    stride = 1 << duration.bit_length()
    for now in range(200):
        fast.publish(now * spacing)
        begun = now - duration
        if begun >= 0 and begun % stride == 0:
            slow.publish(begun * spacing)
        if now >= duration:
            common = set(fast.steps) & set(slow.steps)
            assert max(common, default=-1) >= (now - 2 * stride) * spacing, (now, fast.steps, slow.steps)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("began", [0, 371])
def test_a_node_that_stopped_writing_shares_a_snapshot_with_the_others_however_long_ago(
    stride: int, began: int
) -> None:
    for last in range(0, 80, stride):
        fast, stopped = Node(), Node()
        for node in (fast, stopped):
            node.begin_attempt(began - 1)
        for now in range(600):
            fast.publish(began + now)
            if now <= last and now % stride == 0:
                stopped.publish(began + now)
            newest = max(set(fast.steps) & set(stopped.steps), default=-1) - began
            assert newest >= max(0, min(now, last) - 2 * max(stride, now - last)), (now, last)
            assert len(fast.steps) <= KEEP + AHEAD + now.bit_length()
