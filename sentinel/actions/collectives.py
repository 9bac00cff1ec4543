"""Asks ranks what they did in collectives, when one of them stands: the answer is at hand when the alert fires.

Their senders answer, whatever the thread that trains waits for. One whose GIL is held cannot, and says by that what it
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from sentinel import wire
from sentinel.flight import Flight
from sentinel.runs import Attempt, Rank

ASK_SECONDS = 5.0
"""Between two questions to a rank that stands: others come to their last collective a little later."""


class Collectives:
    """Asks the ranks of one attempt what they did in collectives, and keeps what they answer."""

    def __init__(
        self, attempt: Attempt, send: Callable[[int, wire.Message], None], taken: Callable[[int], None]
    ) -> None:
        """`taken`: told of each rank whose `flight` has become another."""
        self._attempt, self._send, self._taken = attempt, send, taken
        self._asked: dict[int, tuple[int, float]] = {}
        self._owing: set[int] = set()
        self._ids = 0

    def waits_for(self, rank: Rank) -> bool:
        """Whether it has not answered the last question."""
        return rank.identity.rank in self._owing

    def order(self, rank: Rank, now: float) -> None:
        """Ask one rank, unless that was done a moment ago."""
        number = rank.identity.rank
        if now - self._asked.get(number, (0, -ASK_SECONDS))[1] >= ASK_SECONDS:
            self._ids -= 1  # those of stacks rise
            self._asked[number] = self._ids, now
            self._owing.add(number)
            self._send(number, wire.Ask(id=self._ids, what="collectives"))

    def replied(self, number: int, reply: wire.Reply) -> None:
        """A rank answered."""
        rank = self._attempt.ranks.get(number)
        if rank is None or self._asked.get(number, (0, 0.0))[0] != reply.id:
            return
        self._owing.discard(number)
        if not reply.ok:
            return
        try:
            flight = msgspec.convert(reply.content, Flight)
        except msgspec.ValidationError:
            return
        if flight != rank.flight:
            rank.flight = flight
            self._taken(number)

    def forget(self, rank: Rank) -> None:
        """It goes on: it may be asked again at once. An answer that is on its way still counts."""
        number = rank.identity.rank
        if number in self._asked:
            self._asked[number] = self._asked[number][0], -math.inf
        rank.flight = None
