"""Looks at the heartbeats of one attempt's ranks, at least once a second, and has stalled ones dump their stacks.

What it sees goes to the rules as numbers of the clock: `stalled_seconds` and `stall_limit_seconds` of each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sentinel import wire
from sentinel.actions.stacks import StacksAction
from sentinel.daemon.pulses import Pulse
from sentinel.engine import Entity, Observation
from sentinel.heartbeat import Stall
from sentinel.runs import Attempt, Rank

NOTICEABLE_SECONDS = 1.0
"""Shorter stalls are steps. The rules are not troubled with them but every `ROUTINE_SECONDS`."""
ROUTINE_SECONDS = 10.0
DUMP_SECONDS = 5.0
DUMP_FACTOR = 3.0
"""A stall over `DUMP_SECONDS` and this many times the longest so far: the stacks are taken, once. A signal interrupts
what waits in C: it is not sent lightly."""


class Vigil:
    """See above."""

    def __init__(
        self,
        attempt: Attempt,
        send: Callable[[int, wire.Message], None],
        interrupt: Callable[[int, int], bool],
        dumped: Callable[[int], None],
    ) -> None:
        self._attempt = attempt
        self._pulses: dict[int, Pulse] = {}
        self._stalled: set[int] = set()
        self._routine_at = 0.0
        self.stacks = StacksAction(attempt, send, file=self._file, interrupt=interrupt, taken=dumped)

    def arrived(self, rank: Rank, descriptors: list[int]) -> None:
        """A rank said hello, and handed these over. They are ours now."""
        self.left(rank)
        identity = rank.identity
        self._pulses[identity.rank] = Pulse(descriptors, rank.process, alone=identity.world_size == 1)

    def left(self, rank: Rank) -> Observation | None:
        """A rank's connection ended: it stalls no more, whatever became of it."""
        number = rank.identity.rank
        pulse = self._pulses.pop(number, None)
        rank.stall, rank.heartbeat = Stall(), None
        if pulse is not None:
            pulse.close()
        if number not in self._stalled:
            return None
        self._stalled.discard(number)
        return self._observation([rank])

    def close(self) -> None:
        """The attempt is over."""
        for pulse in self._pulses.values():
            pulse.close()
        self._pulses.clear()

    def tick(self, now: float) -> Observation | None:
        """What the rules should know of this moment, if anything."""
        told = []
        for number, pulse in self._pulses.items():
            rank = self._attempt.ranks[number]
            stall = pulse.look(now)
            if stall is None:
                continue
            rank.stall, rank.heartbeat = stall, pulse.heartbeat
            self._provide(rank, now)
            if stall.seconds > NOTICEABLE_SECONDS or number in self._stalled or now >= self._routine_at:
                told.append(rank)
            if stall.seconds > NOTICEABLE_SECONDS:
                self._stalled.add(number)
            else:
                self._stalled.discard(number)
        if now >= self._routine_at:
            self._routine_at = now + ROUTINE_SECONDS
        return self._observation(told) if told else None

    def _provide(self, rank: Rank, now: float) -> None:
        """Have the stacks at hand when an alert fires, and forget them when the rank goes on."""
        longest = rank.heartbeat.longest if rank.heartbeat else 0.0
        if rank.stall.seconds < NOTICEABLE_SECONDS:
            rank.dump = ""  # it has gone on, or to another place
        elif rank.stall.seconds > max(DUMP_SECONDS, DUMP_FACTOR * longest) and not rank.dump:
            self.stacks.order(rank, now)

    def _file(self, number: int) -> int:
        pulse = self._pulses.get(number)
        return pulse.stacks if pulse is not None else -1

    def _observation(self, ranks: list[Rank]) -> Observation:
        values = {
            Entity("rank", str(rank.identity.rank)): {
                "stalled_seconds": rank.stall.seconds,
                "stall_limit_seconds": rank.stall.limit,
            }
            for rank in ranks
        }
        return Observation(seq=self._attempt.closed_to, time=time.time(), values=values)
