"""Simulates ranks that issue given collectives and transfers until none can go on, and the flight records they leave.

A program is a list of calls. A collective completes when all members have reached it with matching calls; a transfer
when both ends have. On gloo a rank waits for a call before it issues the next one; on NCCL the device does, and the
rank itself runs ahead to the next `sync`. Records are as torch 2.13 writes them, with their gaps: gloo has no members,
no transfers and no states; both number their groups by process.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

LISTED = {"gather", "scatter"}
ROOT_FIRST, ROOT_LAST = {"broadcast", "scatter"}, {"reduce", "gather"}


class Call(NamedTuple):
    """A call that a rank issues."""

    op: str
    """`send`, `recv`, `sync`, or a collective."""
    group: str = "0"
    size: int = 4
    peer: int = -1
    """Global rank of a transfer's other end."""
    root: int = -1
    """Global rank of a collective's root."""
    waits: bool = True
    """Whether later calls wait for it."""
    batch: int = 0
    """Transfers of a rank with the same number, other than 0, are one batch."""


class Record:
    """A call that was issued."""

    def __init__(self, call: Call, seq: int, op_id: int, collectives: int, time: int) -> None:
        self.call, self.seq, self.op_id, self.time = call, seq, op_id, time
        self.collectives = collectives
        """Number of collectives that the rank had issued in the group by then."""
        self.done = self.begun = False

    @property
    def transfer(self) -> bool:
        return self.call.op in ("send", "recv")


class Ranks:
    """Runs one program for each rank."""

    def __init__(
        self,
        groups: dict[str, tuple[str, tuple[int, ...]]],
        programs: list[list[Call]],
        backend: str,
        *,
        broken: dict[tuple[str, int], set[int]] | None = None,
        halted: dict[int, int] | None = None,
    ) -> None:
        """Run the programs until no rank can go on.

        `groups`: name -> (description, members), in the order in which they are made. `broken`: (group, number) ->
        ranks on which that call never ends. `halted`: rank -> number of records after which its device does no more.
        """
        self.groups, self.programs, self.gloo = groups, programs, backend == "gloo"
        self.backend, self.broken, self.halted = backend, broken or {}, halted or {}
        self.records: list[list[Record]] = [[] for _ in programs]
        self._at = [0] * len(programs)
        self._clock = itertools.count(1)
        self._counts: dict[tuple[int, str, bool], int] = defaultdict(int)
        self._batches: dict[int, int] = {}
        self._pending: list[list[tuple[int, Record]]] = [[] for _ in programs]
        self._numbered: dict[tuple[int, str, int], Record] = {}
        self._lanes: dict[tuple[int, int, str, str], list[Record]] = defaultdict(list)
        while self._issue() | self._finish():
            pass

    def _issue(self) -> bool:
        moved = False
        for rank, program in enumerate(self.programs):
            while self._at[rank] < len(program) and not self._stands(rank):
                call = program[self._at[rank]]
                self._at[rank] += 1
                moved = True
                if call.op != "sync":
                    self._record(rank, call)
        return moved

    def _stands(self, rank: int) -> bool:
        """Return whether a rank's thread waits for what it has issued."""
        held = self.gloo or self.programs[rank][self._at[rank]].op == "sync"
        return held and any(each.call.waits or not self.gloo for _, each in self._pending[rank])

    def _record(self, rank: int, call: Call) -> None:
        transfer = call.op in ("send", "recv")
        if not (call.batch and self._batches.get(rank) == call.batch):
            self._counts[rank, call.group, transfer] += 1
        self._batches[rank] = call.batch
        self._counts[rank, f"op {call.group}", False] += 1
        seq, op_id = self._counts[rank, call.group, transfer], self._counts[rank, f"op {call.group}", False]
        record = Record(call, seq, op_id, self._counts[rank, call.group, False], next(self._clock))
        self._pending[rank].append((len(self.records[rank]), record))
        self.records[rank].append(record)
        if transfer:
            self._lanes[rank, call.peer, call.op, call.group].append(record)
        else:
            self._numbered[rank, call.group, seq] = record

    def _finish(self) -> bool:
        for rank, pending in enumerate(self._pending):
            for place, (index, each) in enumerate(pending):
                each.begun = index < self.halted.get(rank, index + 1) and all(
                    _lets(other, each) for _, other in pending[:place]
                )
        over = [each for rank, own in enumerate(self._pending) for _, each in own if self._ends(rank, each)]
        for each in over:
            each.done = True
        self._pending = [[each for each in own if not each[1].done] for own in self._pending]
        return bool(over)

    def _ends(self, rank: int, each: Record) -> bool:
        call = each.call
        if not each.begun or rank in self.broken.get((call.group, -each.seq if each.transfer else each.seq), ()):
            return False
        if each.transfer:
            return self._meets(rank, each)
        members = self.groups[call.group][1]
        others = {member: self._numbered.get((member, call.group, each.seq)) for member in members if member != rank}
        if any(one is not None and not _fits(call, one.call) for one in others.values()):
            return False
        needed = [one for member, one in others.items() if not (
            (call.op in ROOT_FIRST and member != call.root) or (call.op in ROOT_LAST and rank != call.root)
        )]  # fmt: skip
        return all(one is not None and one.begun for one in needed)

    def _meets(self, rank: int, each: Record) -> bool:
        op, group, peer = each.call.op, each.call.group, each.call.peer
        theirs = self._lanes[peer, rank, "recv" if op == "send" else "send", group]
        index = self._lanes[rank, peer, op, group].index(each)
        return index < len(theirs) and theirs[index].begun and theirs[index].call.size == each.call.size

    def dump(self, rank: int, ring: int = 2000, timing: bool = False) -> dict[str, Any]:
        """Return the flight record that a rank leaves, with the last `ring` entries."""
        own = [name for name, (_, ranks) in self.groups.items() if rank in ranks]
        used = [each for each in self.records[rank] if not (self.gloo and each.transfer)]
        entries = [entry for each in used for entry in self._entries(rank, each, own, timing)]
        for number, entry in enumerate(entries):
            entry["record_id"] = number
        status, config = {}, {}
        for number, name in enumerate(own):
            issued = [each for each in used if each.call.group == name]
            if not issued:
                continue
            over = [each for each in issued if each.done]
            counted = [each.op_id if self.gloo else each.seq for each in (*issued[-1:], *over[-1:])]
            status[str(number)] = {
                "last_enqueued_collective": str(counted[0]),
                "last_completed_collective": str(counted[1] if over else -1),
                "last_started_collective": "-1",
            }
            description, ranks = self.groups[name]
            config[name] = {"name": name, "desc": description, "ranks": str(list(ranks))}
        if self.gloo:
            config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        return {
            "version": "2.10", "comm_lib_version": "", "nccl_comm_state": {}, "entries": entries[-ring:],
            "pg_config": config, "pg_status": status,
        }  # fmt: skip

    def _entries(self, rank: int, each: Record, own: list[str], timing: bool) -> Iterator[dict[str, Any]]:
        call, (description, ranks) = each.call, self.groups[each.call.group]
        name, state = call.op, "completed" if each.done else "started" if each.begun and timing else "scheduled"
        if each.transfer:
            arrow = "->" if call.op == "send" else "<-"
            name = f"{call.op} {ranks.index(rank)}{arrow}{ranks.index(call.peer)}"
        inputs, outputs = [[call.size]], [[call.size]]
        if call.op in LISTED:
            lists = [[len(ranks), call.size]] if self.gloo else [[call.size]] * len(ranks)
            lists = lists if call.root == rank else [] if self.gloo else [[0]]
            inputs, outputs = (lists, outputs) if call.op == "scatter" else (inputs, lists)
        elif call.op in ("all_gather", "_all_gather_base"):
            outputs = [[call.size * len(ranks)]]
        elif call.op == "_reduce_scatter_base":
            inputs = [[call.size * len(ranks)]]
        entry = {
            "collective_seq_id": each.collectives,
            "p2p_seq_id": each.seq if each.transfer else 0,
            "is_p2p": each.transfer,
            "op_id": each.op_id,
            "pg_id": own.index(call.group),
            "process_group": (call.group, description),
            "profiling_name": f"{self.backend}:{name}",
            "input_sizes": inputs, "input_dtypes": ["Float"] * len(inputs),
            "output_sizes": outputs, "output_dtypes": ["Float"] * len(outputs),
            "state": "scheduled" if self.gloo or call.batch else state,
            "retired": each.done and not call.batch,
            "time_created_ns": 1_000_000_000 + 1_000_000 * each.time,
            "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
            "timeout_ms": 600_000,
            "thread_id": "1", "thread_name": "pt_main_thread",
        }  # fmt: skip
        yield entry
        siblings = [one for one in self.records[rank] if call.batch and one.call.batch == call.batch]
        if siblings and siblings[-1] is each:
            done = all(one.done for one in siblings)
            yield {
                **entry, "profiling_name": f"{self.backend}:coalesced", "input_sizes": [], "output_sizes": [],
                "input_dtypes": [], "output_dtypes": [], "retired": done,
                "state": "completed" if done else "scheduled",
            }  # fmt: skip


def _lets(earlier: Record, later: Record) -> bool:
    """Return whether an open call lets a later one of its rank begin.

    Not if both are in one group, if both are transfers between the same two ranks, or if later calls wait for it.
    """
    one, other = earlier.call, later.call
    if other.batch and one.batch == other.batch:
        return True
    alike = one.group == other.group and earlier.transfer == later.transfer
    return not (one.waits or (alike and (not later.transfer or one.peer == other.peer)))


def _fits(one: Call, other: Call) -> bool:
    return (one.op, one.size, one.root) == (other.op, other.size, other.root)
