"""Ranks that act together: those of one node's attempt, or of a whole job."""

from __future__ import annotations

from sentinel.runs.rank import Rank


class RankSet:
    """Ranks by number, and properties of them all."""

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}

    @property
    def live(self) -> list[Rank]:
        """Ranks with an open connection."""
        return [rank for rank in self.ranks.values() if rank.state == "live"]

    @property
    def complete(self) -> bool:
        """Whether every rank of the world is live, so that steps that need the agreement of all are possible."""
        return bool(self.live) and len(self.live) == max(rank.identity.world_size for rank in self.ranks.values())

    @property
    def held(self) -> set[int]:
        """Seqs of the snapshots that every rank holds."""
        return set.intersection(*(rank.snapshots for rank in self.live)) if self.live else set()

    @property
    def last_seq(self) -> int:
        """The furthest step that any rank reported; -1 before the first."""
        return max((rank.last_seq for rank in self.ranks.values()), default=-1)

    @property
    def step_offset(self) -> int:
        """The offset that turns a seq into the user's step."""
        return min(self.ranks.items())[1].hello.step_offset if self.ranks else 0

    @property
    def absence(self) -> str:
        """Why nothing can be done that all ranks must agree on; empty where all are connected."""
        return "" if self.complete else "not every rank of the run is connected"
