"""Has ranks dump their stacks, before anybody asks: a dump is at hand when the alert fires.

signal     SIGRTMIN+7 through a pidfd, once the kernel says that the process catches it; faulthandler answers in C,
           whoever holds the GIL, into a file in memory that we hold, too
message    where the process cannot be signalled: answered by the rank's own sender, if it gets the GIL
timer      else what faulthandler's timer wrote there, which nobody wound up any more
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt, Rank

SIGNAL = signal.SIGRTMIN + 7
ANSWER_SECONDS = 3.0
"""In which a dump is complete. It takes milliseconds; a process that is swapped out takes longer."""
LARGEST = 256 * 1024
"""Bytes of a dump that are kept: 100 threads of 25 frames."""


class _Order(msgspec.Struct):
    began: float
    id: int
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
    ) -> None:
        """`file`: descriptor of a rank's dumps, or -1; `interrupt(process, signal)`: whether it was sent; `taken`: told
        of each rank whose `dump` is there."""
        self._attempt, self._send = attempt, send
        self._file, self._interrupt, self._taken = file, interrupt, taken
        self._orders: dict[int, _Order] = {}
        self._ids = 0

    def fired(self, case: Case, now: float) -> None:
        """Take those of all ranks that have none of this stall yet."""
        for rank in self._attempt.live:
            if not rank.dump:
                self.order(rank, now)

    def order(self, rank: Rank, now: float) -> None:
        """Have one rank dump its stacks."""
        number = rank.identity.rank
        if number in self._orders:
            return
        self._ids += 1
        self._orders[number] = _Order(now, self._ids)
        file = self._file(number)
        if file >= 0 and _catches(rank.process):
            os.ftruncate(file, 0)
            if self._interrupt(rank.process, SIGNAL):
                return
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
            size = os.fstat(file).st_size if file >= 0 else 0
            late = now - order.began > ANSWER_SECONDS
            if size and (size == order.size or late):
                self._take(number, os.pread(file, LARGEST, 0).decode(errors="replace"))
            elif late:
                del self._orders[number]
            order.size = size

    def _take(self, number: int, text: str) -> None:
        self._orders.pop(number, None)
        rank = self._attempt.ranks.get(number)
        if rank is not None and text:
            rank.dump = text
            self._taken(number)


def _catches(process: int) -> bool:
    """Whether the process handles the signal: it would else be killed by it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
