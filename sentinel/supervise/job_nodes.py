"""The nodes that a job goes on with where some may be left out, as one of its supervisors knows them. Pure.

Sentinel's number of a node stays that of the first start. The launcher gets ranks without gaps:

    nodes 0, 1, 2, 3; node 2 is left out      0 -> 0   1 -> 1   3 -> 2      {nodes} is 3, {node_rank} of node 3 is 2

The supervisor remembers an agreement (`cluster/protocol/restart.py`), because it outlives the daemon of its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.text import name_nodes

NODES, NODE_RANK = "SENTINEL_NODES", "SENTINEL_NODE_RANK"
"""Variables for the node count and this node's number: Sentinel's in `sentinel run`, the launcher's in the job."""
NODE, MEMBERS = "SENTINEL_NODE", "SENTINEL_MEMBERS"
"""Variables that the job's ranks report: Sentinel's number of the node, and `wire.Members` in JSON."""
_PLACES = ((NODES, NODE_RANK), ("SLURM_NNODES", "SLURM_NODEID"))
_NODES_WORD, _RANK_WORD = "{nodes}", "{node_rank}"


class JobNodes:
    """The nodes of one job, as one of its nodes knows them."""

    def __init__(self, least: int, node: int, whole: int) -> None:
        """`least`: the fewest nodes with which the job may go on. `node`: number of this one, out of `whole` nodes."""
        self.least, self.node = least, node
        self.members = wire.Members(nodes=tuple(range(whole)), whole=whole)
        """The nodes of the present start."""
        self.promised = 0
        self.accepted: wire.Order | None = None

    def hear(self, order: wire.Order) -> bool:
        """Take in an order about the present start, which has ended here. Returns whether the coordinator needs a new
        report."""
        if order.does != "end" or order.epoch < self.promised:
            return False
        before = self.promised, self.accepted
        self.promised = order.epoch
        if self.node in order.nodes:
            self.accepted = order
        return before != (self.promised, self.accepted)

    def is_left_out(self, order: wire.Order) -> bool:
        """Whether the job goes on without this node."""
        return order.does in ("begin", "stop") and bool(order.nodes) and self.node not in order.nodes

    def explain(self, order: wire.Order) -> str:
        """Return why the job goes on without this node, from the order that says so."""
        if order.does == "stop":  # the order is of this node's daemon, which knows the job's nodes
            return order.why
        fault = order.fault.words if order.fault is not None else ""
        members = wire.Members(start=order.start + 1, nodes=order.nodes, whole=self.members.whole)
        return explain_left_out(members, fault)

    def begin(self, order: wire.Order) -> tuple[int, ...]:
        """Take the nodes of this order, this one among them, for the next start. Returns the nodes that are lost."""
        before, nodes = self.members.nodes, order.nodes or self.members.nodes
        self.members = msgspec.structs.replace(self.members, start=order.start + 1, nodes=nodes, job=order.job)
        return tuple(node for node in before if node not in nodes)

    def add_to(self, report: wire.JobReport) -> wire.JobReport:
        """Return the report with what the coordinator needs to know of these nodes."""
        return msgspec.structs.replace(
            report, allow_shrink=self.least, members=self.members, promised=self.promised, accepted=self.accepted
        )

    def fill(self, command: Sequence[str]) -> list[str]:
        """Return the command with the launcher's numbers of this start filled in."""
        nodes, rank = str(len(self.members.nodes)), str(self.members.nodes.index(self.node))
        return [word.replace(_NODES_WORD, nodes).replace(_RANK_WORD, rank) for word in command]

    def list_environment(self) -> dict[str, str]:
        """Return the variables for the environment of this start's ranks and scripts."""
        nodes = self.members.nodes
        return {
            NODES: str(len(nodes)),
            NODE_RANK: str(nodes.index(self.node)),
            NODE: str(self.node),
            MEMBERS: msgspec.json.encode(self.members).decode(),
        }


def explain_left_out(members: wire.Members, fault: str = "") -> str:
    """Return what a left-out node says. `members`: the nodes that go on; `fault`: the reason, if known, in words."""
    left = f"{name_nodes(members.nodes)} ({len(members.nodes)} of {members.whole})"
    decided = f"as the coordinator ordered for restart {members.start}" + (f", after {fault}" if fault else "")
    return f"left out by --allow-shrink: the job goes on with {left}, {decided}"


def find_job_nodes(least: int, given: Mapping[str, str], command: Sequence[str]) -> JobNodes:
    """Find the nodes that `--allow-shrink` needs to know. `given`: the environment. Raises ConfigError."""
    words = " ".join(command)
    if lacking := [word for word in (_NODES_WORD, _RANK_WORD) if word not in words]:
        raise ConfigError(
            f"--allow-shrink: the command has no {' and no '.join(lacking)}: it would wait for the nodes left out; "
            "write torchrun --nnodes={nodes} --node-rank={node_rank} --master-addr=... (docs/cluster.md)"
        )
    named = next((pair for pair in _PLACES if all(name in given for name in pair)), None)
    if named is None:
        raise ConfigError(
            f"--allow-shrink: which node is this? set {NODES} to how many there are, and {NODE_RANK} to the number of "
            "this one, from 0 (Slurm's SLURM_NNODES and SLURM_NODEID do as well)"
        )
    numbers = [given[name] for name in named]
    if not all(number.isdecimal() for number in numbers) or not int(numbers[1]) < int(numbers[0]):
        shown = ", ".join(f"{name}={number}" for name, number in zip(named, numbers, strict=True))
        raise ConfigError(f"--allow-shrink: {shown}: expected a number of nodes, and one below it")
    whole, node = map(int, numbers)
    if not 1 <= least <= whole:
        raise ConfigError(f"--allow-shrink {least}: the job has {whole} nodes")
    return JobNodes(least, node, whole)
