"""Asks ranks for their collectives when one of them stands still, to have the answers before the alert fires.

Their senders answer, whatever the training thread waits for. A rank whose GIL is held cannot answer, which tells what
it does.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from sentinel import wire
from sentinel.runs import Attempt, Rank, RankLink
from sentinel.wire.flight_recorder import Flight

ASK_SECONDS = 5.0
"""Seconds between two questions to a rank that stands: others reach their last collective a little later."""


class FlightReader(Protocol):
    """Examines the flight records of ranks."""

    def read_flight(self, number: int) -> None:
        """Read the `flight` of this rank, which has changed."""


class Collectives:
    """Asks the ranks of one attempt for their collectives, and keeps the answers."""

    def __init__(self, attempt: Attempt, link: RankLink, reader: FlightReader) -> None:
        self._attempt, self._link, self._reader = attempt, link, reader
        self._asked: dict[int, tuple[int, float]] = {}
        self._owing: set[int] = set()
        self._ids = 0

    def waits_for(self, rank: Rank) -> bool:
        """Whether a rank has not answered the last question."""
        return rank.identity.rank in self._owing

    def order(self, rank: Rank, now: float) -> None:
        """Ask one rank, unless that was done a moment ago."""
        number = rank.identity.rank
        if now - self._asked.get(number, (0, -ASK_SECONDS))[1] >= ASK_SECONDS:
            self._ids -= 1  # negative: the ids of stacks rise from 1
            self._asked[number] = self._ids, now
            self._owing.add(number)
            self._link.send(number, wire.Ask(id=self._ids, what="collectives"))

    def add_reply(self, number: int, reply: wire.Reply) -> None:
        """Take a rank's answer."""
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
            self._reader.read_flight(number)

    def forget(self, rank: Rank) -> None:
        """Forget the collectives of a rank that goes on, and let it be asked again at once.

        An answer that is on its way still counts.
        """
        number = rank.identity.rank
        if number in self._asked:
            self._asked[number] = self._asked[number][0], -math.inf
        rank.flight = None
