"""Has ranks dump their stacks in advance, so that a dump is there when the alert fires.

message    answered by the rank's own sender, which has the GIL then
signal     if the sender does not get the GIL: SIGRTMIN+7 through a pidfd, if the rank says that it handles the signal
           and the kernel that it is caught; faulthandler answers in C, without the GIL, into a memory file that we
           hold, too
timer      if the process cannot be signalled: what faulthandler's timer wrote there when it was no longer reset

Code that writes stacks without the GIL reads frames that other threads may be changing: one in some thousand such dumps
kills a process in which a thread runs Python. So it is done only if the GIL has been held for long, and all threads
stand. (`tests/hang/test_unharmed.py`.)
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

import msgspec

from sentinel import wire
from sentinel.actions import CaseRecords
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt, Rank, RankLink
from sentinel.wire.heartbeat_page import BEAT_SECONDS, SIGNAL, Kind

ANSWER_SECONDS = 3.0
"""Seconds within which a dump is complete. It takes milliseconds; a process that is swapped out takes longer."""
PAUSE_SECONDS = 10.0
"""Seconds before a rank that did not answer is asked again."""
PAUSE_FACTOR = 4.0
"""Factor by which each further pause is longer."""
LARGEST = 256 * 1024
"""Most bytes of a dump that are kept: 100 threads of 25 frames."""

_MASKS = ("SigCgt", "ShdPnd")
_BIT = 1 << (SIGNAL - 1) if SIGNAL else 0


class _Order(msgspec.Struct):
    began: float
    id: int
    after: float
    """Unix seconds: what was written into the file earlier belongs to an earlier stall."""
    size: int = 0
    signalled: bool = False


class StallWatch(Protocol):
    """Knows the ranks that stand still."""

    def find_dump_file(self, number: int) -> int:
        """Return the descriptor of the file that a rank's stacks are dumped into; -1 if there is none."""

    def ask_collectives(self, rank: Rank, now: float) -> None:
        """Ask a rank for its collectives, which alerts want with the stacks."""


class StacksAction:
    """The action `stacks` of one attempt."""

    name = "stacks"

    def __init__(self, attempt: Attempt, link: RankLink, incidents: CaseRecords, stalls: StallWatch) -> None:
        self._attempt, self._link, self._incidents, self._stalls = attempt, link, incidents, stalls
        self._orders: dict[int, _Order] = {}
        self._pauses: dict[int, tuple[float, float]] = {}
        """Earliest time of the next question, and the pause after it, by rank."""
        self._ids = 0

    @property
    def waiting(self) -> bool:
        """Whether a dump is on its way."""
        return bool(self._orders)

    def waits_for(self, rank: Rank) -> bool:
        """Whether a rank's dump is on its way."""
        return rank.identity.rank in self._orders

    def act_on(self, case: Case, now: float) -> None:
        """Order the stacks of all ranks without a dump of this stall, and the collectives of all."""
        for rank in self._attempt.live:
            if not rank.dump:
                self.order(rank, now)
            self._stalls.ask_collectives(rank, now)

    def forget(self, rank: Rank) -> None:
        """Forget the dump of a rank that goes on, also one that is on its way: it shows where the rank was."""
        self._orders.pop(rank.identity.rank, None)
        rank.dump = ""

    def order(self, rank: Rank, now: float) -> None:
        """Have one rank dump its stacks."""
        number = rank.identity.rank
        if number in self._orders or now < self._pauses.get(number, (0.0, 0.0))[0]:
            return
        self._ids += 1
        order = self._orders[number] = _Order(now, self._ids, time.time() - rank.stall.quiet)
        if not self._signal_rank(rank, order, now):
            self._link.send(number, wire.Ask(id=self._ids, what="stacks"))

    def _signal_rank(self, rank: Rank, order: _Order, now: float) -> bool:
        """Signal a rank, if it cannot answer otherwise and the signal is safe; return whether it was signalled."""
        if not (_ours(rank) and _holds(rank, now)) or order.signalled:
            return False
        if not (_takes(rank.process) and _empty_file(self._stalls.find_dump_file(rank.identity.rank))):
            return False
        if self._link.interrupt(rank.process, SIGNAL):
            order.began, order.after, order.signalled = now, 0.0, True
        return order.signalled

    def add_reply(self, number: int, reply: wire.Reply) -> None:
        """Take the stacks that a rank's sender answered."""
        order = self._orders.get(number)
        if order is not None and order.id == reply.id and reply.ok:
            self._take(number, str(reply.content.get("text", ""))[:LARGEST])

    def tick(self, now: float) -> None:
        """Take dumps that are complete, and give up late ones."""
        for number, order in list(self._orders.items()):
            rank = self._attempt.ranks[number]
            if self._signal_rank(rank, order, now):
                continue
            file = self._stalls.find_dump_file(number)
            size = _size(file, order.after)
            # A rank that can be signalled gets more time, until it is known to hold the GIL.
            patience = ANSWER_SECONDS if order.signalled or not _ours(rank) else BEAT_SECONDS + ANSWER_SECONDS
            late = now - order.began > patience
            if size and (size == order.size or late):
                self._take(number, os.pread(file, LARGEST, 0).decode(errors="replace"))
            elif late:
                del self._orders[number]
                _, pause = self._pauses.get(number, (0.0, PAUSE_SECONDS))
                self._pauses[number] = (now + pause, PAUSE_FACTOR * pause)
            order.size = size

    def _take(self, number: int, text: str) -> None:
        self._orders.pop(number, None)
        self._pauses.pop(number, None)
        rank = self._attempt.ranks.get(number)
        if rank is not None and text:
            rank.dump = text
            self._incidents.add_stacks()


def _ours(rank: Rank) -> bool:
    """Whether the signal triggers our dump in the rank, and not something of the user's."""
    return rank.heartbeat is not None and rank.heartbeat.signal == SIGNAL


def _holds(rank: Rank, now: float) -> bool:
    """Whether a thread has held the GIL for so long that no other thread runs Python, or is about to."""
    beat = rank.heartbeat
    return beat is not None and now - beat.beat > BEAT_SECONDS and rank.stall.kind in (Kind.HOLDING, Kind.LONG)


def _size(file: int, after: float) -> int:
    """Return the bytes that were dumped; 0 if that was before `after`."""
    if file < 0:
        return 0
    stat = os.fstat(file)
    return stat.st_size if stat.st_mtime >= after else 0


def _empty_file(file: int) -> bool:
    """Empty the dump file; False if that is impossible, as for a file that its rank has sealed."""
    try:
        os.ftruncate(file, 0)
    except OSError:
        return False
    return True


def _takes(process: int) -> bool:
    """Whether the process handles the signal, which would otherwise kill it, and has none pending: a thread stuck in
    the kernel handles none, and signals of this kind add up."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {name: int(mask, 16) for name, _, mask in (line.partition(":") for line in lines) if name in _MASKS}
    return bool(masks.get("SigCgt", 0) & _BIT) and not masks.get("ShdPnd", 0) & _BIT
