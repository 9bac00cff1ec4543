"""Selects the snapshots that ranks can be rolled back to: the good ones that all ranks hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from sentinel import wire
from sentinel.actions import RollbackCases
from sentinel.diagnose.case import Case
from sentinel.runs import Rank, Stage

ACTION = "rollback"
"""The name by which rules ask for a rollback."""


class RollbackRanks(Protocol):
    """The ranks that are rolled back together: those of one node (`Attempt`), or of a job over several nodes."""

    @property
    def ranks(self) -> Mapping[int, Rank]:
        """All ranks so far, by number."""

    @property
    def live(self) -> list[Rank]:
        """Ranks with an open connection."""

    @property
    def absence(self) -> str:
        """Why nothing is possible that all ranks must agree on; empty if all are connected."""

    @property
    def held(self) -> set[int]:
        """Seqs of the snapshots that every rank holds."""

    @property
    def last_seq(self) -> int:
        """The furthest step that any rank reported; -1 before the first."""

    @property
    def step_offset(self) -> int:
        """What to add to a seq to get the user's step."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in the order in which they were announced."""

    @property
    def stage_seq(self) -> int:
        """The first step of the present stage; 0 if none was announced."""

    def step_seconds(self) -> float:
        """Return the median time of a step."""


class HeldSnapshots:
    """The snapshots that the ranks hold, and which of them are good."""

    def __init__(self, ranks: RollbackRanks, cases: RollbackCases) -> None:
        self._ranks, self._cases = ranks, cases
        self.bad: set[int] = set()
        """Seqs of snapshots that could not be restored."""

    @property
    def terms(self) -> wire.RollbackTerms | None:
        """The terms of the armed rollback; None if not every rank armed it."""
        armed = [rank.hello.rollback for rank in self._ranks.live]
        return armed[0] if armed and all(terms is not None for terms in armed) else None

    def list_good(self, closed: int) -> set[int]:
        """Return the snapshots that could be restored for a fault whose first sign comes after step `closed`."""
        terms = self.terms
        return set() if terms is None else {seq for seq in self.list_sound(terms) if seq + terms.margin <= closed}

    def list_sound(self, terms: wire.RollbackTerms, besides: Case | None = None) -> set[int]:
        """Return the snapshots of this stage that all ranks hold, except those taken during trouble or less than
        `margin` steps before it. Trouble that was rolled back, and that of `besides`, does not count."""
        offset = self._ranks.step_offset
        troubles = [
            (case.first_seq, math.inf if case.state == "firing" else (case.resolved_step or case.step) - offset)
            for case in self._cases.list_asking(ACTION)
            if case is not besides and case.state != "rolled_back"
        ]
        held = {seq for seq in self._ranks.held - self.bad if seq >= self._ranks.stage_seq}
        return {seq for seq in held if not any(first < seq + terms.margin and seq <= end for first, end in troubles)}
