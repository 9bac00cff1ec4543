"""Find where ranks wait for each other: a graph of the operations that do not end, live and post mortem.

Each rank stands in the first operation of each group, and of each pair of ranks that send to each other, that is not
over. Such an operation waits for the members that did not issue it, and for older operations that its members stand in.
The cause is a rank that others wait for and that waits for none: it is in no operation, or its peers have completed
the one it is in. If there is none, ranks wait in a circle, or all are in it and the fault lies between them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sentinel.diagnose.evidence import Confidence
from sentinel.diagnose.standstill.group_members import GroupMembers, Key, count_elements, find_commonest, fit
from sentinel.diagnose.standstill.waits import LISTING, Kind, Standstill, Wait
from sentinel.text import name_ranks
from sentinel.wire.flight_recorder import Collective, Flight, Lane

_MEDIUM: Confidence = "medium"
Node = tuple[Key, int, int]
"""Key of an operation: (group, 0, number) for a collective; (group, sender, receiver) for transfers, ranks from 1."""


class WaitGraph:
    """Operations that are not over, and what each of them waits for."""

    def __init__(
        self,
        flights: Mapping[int, Flight],
        world: int,
        elsewhere: Collection[int],
        stacks: Mapping[int, bool],
        closed: bool,
    ) -> None:
        self._flights, self._world = flights, world
        self._elsewhere, self._stacks = elsewhere, stacks
        self._members = GroupMembers(flights, world, closed)
        self._fronts: dict[int, dict[Node, float]] = defaultdict(dict)
        """Rank -> operation that it stands in -> when the rank issued that; inf: not known."""
        self._waits: dict[Node, Wait] = {}
        for key in sorted(set(self._members.keys.values())):
            self._add_collectives(key)
        self._add_transfers()
        self._after = {node: self._find_next(node) for node in self._waits}
        for node, after in self._after.items():
            wait = self._waits[node]
            behind = tuple(sorted({*after.values()} - {*wait.missing}))
            self._waits[node] = msgspec.structs.replace(wait, behind=behind)

    def judge(self) -> Standstill | None:
        """Return the verdict, deciding the most certain cases first."""
        if not self._waits:
            return None
        ends = [node for node in self._waits if not self._after[node] and not self._find_absent(node)]
        for decide in (self._find_mismatch, self._find_missing, self._find_silent):
            if (found := decide()) is not None:
                return found
        return self._explain_between(ends) if ends else self._explain_circle()

    def _add_collectives(self, key: Key) -> None:
        name, members = key
        progress = {
            rank: self._flights[rank].groups[name] for rank in members if self._members.keys.get((rank, name)) == key
        }
        standing = {rank: each.completed + 1 for rank, each in progress.items() if each.enqueued > each.completed}
        for seq in sorted(set(standing.values())):
            node = key, 0, seq
            issued = {rank for rank, each in progress.items() if each.enqueued >= seq}
            ones = {
                rank: one for rank in sorted(issued) if (one := self._flights[rank].find_issued(name, seq)) is not None
            }
            pending = [one for rank, one in ones.items() if standing.get(rank) == seq]
            reference = find_commonest(ones.values()) if ones else Collective(name, seq, "a collective")
            reference = next((one for one in pending if fit(reference, one)), reference)
            differing = {rank: one for rank, one in ones.items() if not fit(reference, one)}
            known = {rank for rank in members if rank in self._flights or rank in self._elsewhere}
            roots = None
            if reference.op in LISTING and len(ones) == len(members):
                roots = tuple(rank for rank, one in ones.items() if one.both)
            self._waits[node] = Wait(
                reference,
                self._members.descriptions[key],
                tuple(rank for rank in members if standing.get(rank) == seq and rank not in differing),
                tuple(rank for rank in members if rank in known - issued),
                differing,
                tuple(rank for rank in members if rank not in known),
                tuple(rank for rank in members if rank in issued and progress[rank].completed >= seq),
                tuple(rank for rank in members if rank in issued and standing.get(rank, seq) < seq),
                certain=key not in self._members.uncertain and name not in self._members.open,
                roots=roots,
            )
            for rank, at in standing.items():
                if at == seq:
                    self._fronts[rank][node] = ones[rank].created if rank in ones else math.inf

    def _add_transfers(self) -> None:
        lanes: dict[Node, dict[int, Lane]] = defaultdict(dict)
        for rank, flight in self._flights.items():
            for lane in flight.lanes:
                first, second = (rank, lane.peer) if lane.sends else (lane.peer, rank)
                lanes[(lane.group, ()), first + 1, second + 1][rank] = lane
        for node, own in sorted(lanes.items()):
            key, sender, receiver = node[0], node[1] - 1, node[2] - 1
            standing = {rank: lane for rank, lane in own.items() if lane.pending is not None}
            if not standing:
                continue
            back = lanes.get((key, node[2], node[1]), {})
            queued = {rank for rank, lane in standing.items() if _comes_after(lane, back.get(rank))}
            if len(queued) == len(standing):
                continue
            ahead = next(lane for rank, lane in standing.items() if rank not in queued)
            missing, over, unknown = [], [], []
            for rank in {sender, receiver} - standing.keys():
                if rank not in self._flights and rank not in self._elsewhere:
                    unknown.append(rank)
                elif rank in own and own[rank].completed > ahead.completed and self._flights[rank].whole:
                    over.append(rank)
                else:
                    missing.append(rank)
            pending = {rank: lane.pending for rank, lane in sorted(standing.items()) if lane.pending is not None}
            reference = next(iter(pending.values()))
            differing = {
                rank: one
                for rank, one in pending.items()
                if count_elements(one) != count_elements(reference) and not queued and reference.sizes and one.sizes
            }
            self._waits[node] = Wait(
                reference,
                next((self._flights[rank].groups[key[0]].description for rank in own), ""),
                tuple(rank for rank in sorted(standing) if rank not in queued and rank not in differing),
                tuple(missing),
                differing,
                tuple(unknown),
                tuple(over),
                tuple(sorted(queued)),
                ends=(sender, receiver),
            )
            for rank, one in pending.items():
                if rank not in queued:
                    self._fronts[rank][node] = one.created

    def _find_next(self, node: Node) -> dict[Node, int]:
        """Return the operations that must move before this one can -> the rank that stands in that operation."""
        wait, found = self._waits[node], dict[Node, int]()
        for rank in wait.missing:
            if rank not in self._elsewhere:
                found |= dict.fromkeys(self._fronts.get(rank, ()), rank)
        for rank in (*wait.queued, *wait.waiting):
            fronts = self._fronts.get(rank, {})
            own = fronts.get(node)
            for other, created in fronts.items():
                of_group = rank in wait.queued and other[0] == node[0]
                if other != node and (of_group or (own is not None and created < own)):
                    found[other] = rank
        return found

    def _find_absent(self, node: Node) -> set[int]:
        """Return the ranks that an operation waits for and that stand in nothing, or whose records are missing."""
        wait = self._waits[node]
        return {*wait.unknown, *(rank for rank in wait.missing if self._is_idle(rank))}

    def _is_idle(self, rank: int) -> bool:
        return rank in self._elsewhere or not self._fronts.get(rank)

    def _make_verdict(
        self, kind: Kind, culprits: Iterable[int], confidence: Confidence, node: Node, *doubts: str
    ) -> Standstill:
        steps = self._count_steps(node)
        others = sorted(self._waits.keys() - {node}, key=lambda each: (steps.get(each, math.inf), self._age(each)))
        blamed = set(culprits)
        return Standstill(
            kind,
            tuple(sorted(blamed)),
            confidence,
            self._waits[node],
            tuple(self._waits[each] for each in others),
            doubts=doubts,
            idle=tuple(rank for rank in sorted(self._flights) if self._is_idle(rank) and rank not in blamed),
        )

    def _count_steps(self, goal: Node) -> dict[Node, int]:
        """Return how many operations lie between each operation and the goal that it waits for."""
        before: dict[Node, list[Node]] = defaultdict(list)
        for node, after in self._after.items():
            for other in after:
                before[other].append(node)
        steps, waiting = {goal: 0}, deque([goal])
        while waiting:
            node = waiting.popleft()
            for other in before[node]:
                if other not in steps:
                    steps[other] = steps[node] + 1
                    waiting.append(other)
        return steps

    def _age(self, node: Node) -> tuple[float, Node]:
        return self._waits[node].collective.created, node

    def _find_mismatch(self) -> Standstill | None:
        found = [node for node, wait in self._waits.items() if wait.mismatched]
        if not found:
            return None
        node = min(found, key=self._age)
        return self._make_verdict("mismatch", name_minority(self._waits[node]), "high", node)

    def _find_missing(self) -> Standstill | None:
        late = {rank for wait in self._waits.values() for rank in wait.missing if self._is_idle(rank)}
        late = {rank for rank in late if not self._stacks.get(rank)} or late
        if not late:
            return None
        node = min((each for each, wait in self._waits.items() if late & set(wait.missing)), key=self._age)
        if late <= set(self._elsewhere):
            return self._make_verdict("missing", late, "high", node)
        wait, confidence = self._waits[node], _MEDIUM
        doubts = []
        if self._may_transfer(late):
            confidence = "low"
            doubts.append(
                f"{name_ranks(sorted(late))} may send or receive, which gloo does not record: the stacks decide"
            )
        if wait.over and not wait.rooted and wait.ends is None:
            confidence = "low"
            doubts.append(
                f"{name_ranks(sorted(wait.over))} completed it, which takes all of them: the records are not of "
                "one moment, or it "
                "failed there; records that are taken at once decide"
            )
        if silent := set(range(self._world)) - set(self._flights) - set(self._elsewhere):
            doubts.append(
                f"of {name_ranks(sorted(silent))} there is no record, and one may have died before: a log or an exit "
                "code decides"
            )
        return self._make_verdict("missing", late, confidence, node, *doubts)

    def _may_transfer(self, late: set[int]) -> bool:
        """Return whether one of them may wait in a transfer that is not recorded, for a rank that is in nothing
        recorded either. Where all others stand in a collective, there is no such rank."""
        if not any(flight.gloo for flight in self._flights.values()):
            return False
        others = [rank for rank in range(self._world) if rank not in late and not self._fronts.get(rank)]
        return any(self._stacks.get(rank, len(late) > 1 or bool(others)) for rank in late)

    def _find_silent(self) -> Standstill | None:
        late = {rank for wait in self._waits.values() for rank in wait.unknown}
        if not late:
            return None
        node = min((each for each, wait in self._waits.items() if wait.unknown), key=self._age)
        doubt = "they may be in it, and the fault between the devices: their records or logs decide"
        return self._make_verdict("silent", late, "low", node, doubt)

    def _explain_between(self, ends: list[Node]) -> Standstill:
        """Explain an operation that all its known members are in, while they stand in nothing older."""
        for node in sorted(ends, key=self._age):
            begun = {rank for rank in self._waits[node].waiting if self._has_begun(node, rank)}
            if begun and (late := set(self._waits[node].waiting) - begun):
                return self._make_verdict("unreached", late, "medium", node)
        for node in sorted(ends, key=self._age):
            if (wait := self._waits[node]).over:
                alone: Confidence = "medium" if len(wait.waiting) == 1 and not wait.rooted else "low"
                return self._make_verdict("left behind", wait.waiting, alone, node, *_about_roots(wait))
        for node in sorted(ends, key=self._age):
            outside = set(range(self._world)) - set(self._waits[node].waiting)
            if node[0] in self._members.uncertain and outside:
                idle = {rank for rank in outside if self._is_idle(rank)}
                doubt = "or none is missing, and the fault is between the devices: the members of the group decide"
                return self._make_verdict("unlisted", idle or outside, "low", node, doubt)
        node = min(ends, key=self._age)
        wait = self._waits[node]
        doubts = _about_roots(wait)
        if not wait.certain:
            doubts.append("or the job had more ranks, and one of them never came: the size of the group decides")
        return self._make_verdict("together", (), "low" if doubts else "medium", node, *doubts)

    def _has_begun(self, node: Node, rank: int) -> bool:
        wait = self._waits[node]
        if wait.ends is not None:
            return False
        one = self._flights[rank].find_issued(wait.collective.group, wait.collective.seq)
        return one is not None and one.started

    def _explain_circle(self) -> Standstill:
        """Explain a circle, in which every operation waits for another one."""
        circles = [circle for node in sorted(self._waits, key=self._age) if (circle := self._find_circle(node))]
        nodes = min(circles, key=len)
        via = [self._after[node][other] for node, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
        ranks = set(via)
        sure = self._has_turned(nodes, ranks) or all(self._stacks.get(rank) for rank in ranks)
        doubts = () if sure else (
            "or one of them issued the older one without waiting for it, and stands in its own code: its stack decides",
        )  # fmt: skip
        verdict = self._make_verdict("circle", ranks, "medium" if sure else "low", min(nodes, key=self._age), *doubts)
        stands = sorted(zip(via, [*nodes[1:], nodes[0]], strict=True))
        return msgspec.structs.replace(verdict, circle=tuple((rank, self._waits[node]) for rank, node in stands))

    def _find_circle(self, start: Node) -> list[Node]:
        """Return the shortest way from an operation to itself; empty where there is none."""
        ways, waiting = {start: [start]}, deque([start])
        while waiting:
            node = waiting.popleft()
            for other in self._after[node]:
                if other == start:
                    return ways[node]
                if other not in ways:
                    ways[other] = [*ways[node], other]
                    waiting.append(other)
        return []

    def _has_turned(self, circle: list[Node], ranks: Collection[int]) -> bool:
        """Return whether ranks that wait for each other did the same in one order the time before: then the order is
        new. Two ranks that send to each other first need no past."""
        if len(circle) != 2:
            return False
        one, other = circle
        if one[1] and other[1]:
            return {one[1], one[2]} == {other[1], other[2]} and all(self._waits[each].queued for each in circle)
        if one[1] or other[1]:
            return False
        before = {
            first.created < second.created
            for rank in ranks
            if (first := self._flights[rank].find_issued(one[0][0], one[2] - 1)) is not None
            and (second := self._flights[rank].find_issued(other[0][0], other[2] - 1)) is not None
        }
        return len(before) == 1


def name_minority(wait: Wait) -> tuple[int, ...]:
    """Return the ranks that issued something else than most; all of them where there is no majority."""
    if not wait.differing:
        return tuple(sorted((*wait.waiting, *wait.queued, *wait.over)))
    same = len(wait.waiting) + len(wait.queued) + len(wait.over)
    return tuple(wait.differing) if len(wait.differing) < same else tuple(sorted((*wait.waiting, *wait.differing)))


def _comes_after(lane: Lane, back: Lane | None) -> bool:
    """Return whether a rank's transfer waits for its own transfer in the other direction: between two ranks everything
    is in order, except within one batch."""
    if lane.pending is None or back is None or back.pending is None:
        return False
    return lane.pending.created > back.pending.created


def _about_roots(wait: Wait) -> list[str]:
    """Return a doubt that says that ranks may disagree over the root, where they may."""
    if not wait.rooted or wait.roots is not None:
        return []
    return [
        f"or ranks gave {wait.collective.op} different roots, which are not recorded: its src or dst on each decides"
    ]
