"""Has ranks dump their stacks, before anybody asks: a dump is at hand when the alert fires.

signal     SIGRTMIN+7 through a pidfd, where the rank says that it is its own and the kernel that it is caught;
           faulthandler answers in C, whoever holds the GIL, into a file in memory that we hold, too
message    where the process cannot be signalled: answered by the rank's own sender, if it gets the GIL
timer      else what faulthandler's timer wrote there, which nobody wound up any more
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.heartbeat import SIGNAL
from sentinel.runs import Attempt, Rank

ANSWER_SECONDS = 3.0
"""In which a dump is complete. It takes milliseconds; a process that is swapped out takes longer."""
PAUSE_SECONDS = 10.0
PAUSE_FACTOR = 4.0
"""Before a rank that did not answer is asked again, and how much longer each further time."""
LARGEST = 256 * 1024
"""Bytes of a dump that are kept: 100 threads of 25 frames."""

_MASKS = ("SigCgt", "ShdPnd")
_BIT = 1 << (SIGNAL - 1) if SIGNAL else 0


class _Order(msgspec.Struct):
    began: float
    id: int
    after: float = 0.0
    """Unix seconds: what lies in the file since before then is of an earlier stall."""
    size: int = 0


class StacksAction:
    """The action `stacks` of one attempt."""

    name = "stacks"

    def __init__(
        self,
        attempt: Attempt,
        send: Callable[[int, wire.Message], None],
        *,
        file: Callable[[int], int],
        interrupt: Callable[[int, int], bool],
        taken: Callable[[int], None],
        beside: Callable[[Rank, float], None] = lambda *_: None,
    ) -> None:
        """`file`: descriptor of a rank's dumps, or -1; `interrupt(process, signal)`: whether it was sent; `taken`: told
        of each rank whose `dump` is there; `beside`: asks a rank for what an alert wants with the stacks."""
        self._attempt, self._send = attempt, send
        self._file, self._interrupt, self._taken, self._beside = file, interrupt, taken, beside
        self._orders: dict[int, _Order] = {}
        self._pauses: dict[int, tuple[float, float]] = {}
        """Rank -> not before, and the next pause."""
        self._ids = 0

    @property
    def waiting(self) -> bool:
        """Whether a dump is on its way."""
        return bool(self._orders)

    def fired(self, case: Case, now: float) -> None:
        """Take those of all ranks that have none of this stall yet."""
        for rank in self._attempt.live:
            if not rank.dump:
                self.order(rank, now)
            self._beside(rank, now)

    def forget(self, rank: Rank) -> None:
        """It goes on: a dump that is on its way is of where it was."""
        self._orders.pop(rank.identity.rank, None)
        rank.dump = ""

    def order(self, rank: Rank, now: float) -> None:
        """Have one rank dump its stacks."""
        number = rank.identity.rank
        if number in self._orders or now < self._pauses.get(number, (0.0, 0.0))[0]:
            return
        self._ids += 1
        order = self._orders[number] = _Order(now, self._ids)
        file = self._file(number)
        ours = rank.heartbeat is not None and rank.heartbeat.signal == SIGNAL
        if ours and _takes(rank.process) and _emptied(file) and self._interrupt(rank.process, SIGNAL):
            return
        order.after = time.time() - rank.stall.quiet
        self._send(number, wire.Ask(id=self._ids, what="stacks"))

    def replied(self, number: int, reply: wire.Reply) -> None:
        """A rank answered in words."""
        order = self._orders.get(number)
        if order is not None and order.id == reply.id and reply.ok:
            self._take(number, str(reply.content.get("text", ""))[:LARGEST])

    def tick(self, now: float) -> None:
        """Look whether dumps are complete."""
        for number, order in list(self._orders.items()):
            file = self._file(number)
            size = _size(file, order.after)
            late = now - order.began > ANSWER_SECONDS
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
            self._taken(number)


def _size(file: int, after: float) -> int:
    """Bytes that were dumped; 0 where that was too long ago."""
    if file < 0:
        return 0
    stat = os.fstat(file)
    return stat.st_size if stat.st_mtime >= after else 0


def _emptied(file: int) -> bool:
    """Throw away what was dumped before. A peer may have sealed its file: then it stays empty-handed."""
    try:
        os.ftruncate(file, 0)
    except OSError:
        return False
    return True


def _takes(process: int) -> bool:
    """Whether the process handles the signal, and would else be killed by it, and none waits: in the kernel it is deaf,
    and signals of this kind add up."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {name: int(mask, 16) for name, _, mask in (line.partition(":") for line in lines) if name in _MASKS}
    return bool(masks.get("SigCgt", 0) & _BIT) and not masks.get("ShdPnd", 0) & _BIT
