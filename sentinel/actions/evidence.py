"""Has ranks collect the evidence that a rule wants, and takes in evidence that they collected by themselves.

A rank answers when it can: between two steps, or at the next step that is not finite. It may also send evidence before
the alert, as it sees some things first. A run that ends soon after its alert answers at its end: a rank that says
goodbye stays connected while it owes an answer, for `LAST_WORDS_SECONDS` at most.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from sentinel import wire
from sentinel.actions import CaseRecords
from sentinel.diagnose.case import EARLIER, Case
from sentinel.engine import Entity, Observation
from sentinel.runs import Attempt, Rank, RankLink
from sentinel.wire.evidence import KINDS

log = logging.getLogger(__name__)

LARGEST = 64 * 1024
"""Most bytes of one piece of evidence. A census of 16 holders is 4 kB."""
LAST_WORDS_SECONDS = 1.5
"""Seconds to wait for evidence after a goodbye. The rank itself waits for 2 s."""
_AT_THE_END = frozenset({"census", "moments"})
"""Evidence on which a rank answers in any case when its run ends, if only why it has none."""
TRACED = 16
_FIRST_ID = 1 << 30
"""First id of questions. Replies are distinguished by ids alone, and those of stacks rise from 1."""


def out_of_memory(rank: Rank, seq: int) -> Observation:
    """Return the observation of a rank whose allocation failed, for the rules."""
    values: dict[str, float] = {"out_of_memory": 1.0}
    return Observation(seq=seq, time=time.time(), values={Entity("rank", str(rank.identity.rank)): values})


class EvidenceRequests:
    """Asks the ranks of one attempt for evidence. It waits for none: a diagnosis does without a missing answer."""

    def __init__(self, attempt: Attempt, link: RankLink, incidents: CaseRecords) -> None:
        self._attempt, self._link, self._incidents = attempt, link, incidents
        self._ids = _FIRST_ID
        self._owed: set[tuple[int, str]] = set()
        self._traced: deque[Case] = deque(maxlen=TRACED)
        """The last cases that want a provenance."""

    def ask_ranks(self, case: Case, wanted: Sequence[str]) -> None:
        """Ask the ranks that a rule fired for, or all ranks if the rule is about the run, for the evidence it wants."""
        if "provenance" in wanted:
            self._traced.append(case)
        members = {int(member.name) for member in case.members if member.scope == "rank"}
        for what in wanted:
            for rank in self._attempt.live:
                known = rank.collected.get(what)
                if rank.identity.rank in (members or {rank.identity.rank}) and (
                    known is None or known.seq < case.first_seq
                ):
                    self._ids += 1
                    self._owed.add((rank.identity.rank, what))
                    self._link.send(rank.identity.rank, wire.Ask(id=self._ids, what=what))

    def is_owed(self, number: int) -> bool:
        """Whether a rank that says goodbye is about to send more evidence."""
        return any((number, what) in self._owed for what in _AT_THE_END)

    def add_evidence(self, number: int, message: wire.Collected) -> None:
        """Take evidence that a rank sent."""
        rank, kind = self._attempt.ranks.get(number), KINDS.get(message.what)
        self._owed.discard((number, message.what))
        if rank is None or kind is None:
            return
        try:
            found = msgspec.convert(message.content, kind)
            if len(msgspec.msgpack.encode(found)) > LARGEST:
                raise ValueError("too large")
        except (msgspec.ValidationError, ValueError) as error:
            log.warning("rank %d: %s is not taken: %s", number, message.what, error)
            return
        if message.what == "provenance" and self._has_origin(rank):
            return
        rank.collected[message.what] = found
        self._incidents.add_evidence(message.what, found.seq)

    def _has_origin(self, rank: Rank) -> bool:
        """Whether the origin of an open incident is known already.

        A rank that traced it by itself is asked all the same if the alert came first, and then finds weights that the
        first step had broken.
        """
        held = rank.collected.get("provenance")
        return held is not None and any(
            case.state == "firing" and held.seq >= case.first_seq - EARLIER for case in self._traced
        )
