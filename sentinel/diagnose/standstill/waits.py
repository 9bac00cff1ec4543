"""A standstill of ranks: the operations that do not end, and the ranks that hold up the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from sentinel.diagnose.evidence import Confidence
from sentinel.wire.flight_recorder import Collective

LISTING = {"gather", "scatter"}
"""Operations of which only the root has both inputs and outputs."""
ROOTED = {"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", *LISTING}
"""Operations that may be over on a rank that others have not joined. The recorder does not tell which rank is the
root."""

Kind = Literal["mismatch", "missing", "silent", "unreached", "left behind", "unlisted", "together", "circle"]


class Wait(msgspec.Struct, frozen=True):
    """An operation that does not end. Ranks are global ones."""

    collective: Collective
    """The collective as most of the waiting ranks issued it."""
    description: str = ""
    """What its group is for."""
    waiting: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    """Members of the group that never issued it."""
    differing: dict[int, Collective] = {}
    """Members that issued something else under its number."""
    unknown: tuple[int, ...] = ()
    """Members without a record."""
    over: tuple[int, ...] = ()
    """Members on which it is over."""
    queued: tuple[int, ...] = ()
    """Members that issued it after another operation that is not completed."""
    behind: tuple[int, ...] = ()
    """Members that issued it and stand in something older."""
    certain: bool = True
    """Whether it is certain that these are all members."""
    roots: tuple[int, ...] | None = None
    """Members that take themselves for the root; None: not known."""
    ends: tuple[int, int] | None = None
    """Sender and receiver of a transfer."""

    def __str__(self) -> str:
        name = self.description if self.description not in ("", "undefined") else self.collective.group[:12]
        where = "" if name in ("0", "default_pg") else f" in group {name}"
        if self.ends is not None:
            what = str(self.collective).partition(" ")[2]
            return f"a transfer {what} from rank {self.ends[0]} to rank {self.ends[1]}".replace("  ", " ") + where
        return f"{self.collective}, number {self.collective.seq}{where}"

    @property
    def rooted(self) -> bool:
        return self.ends is None and self.collective.op in ROOTED

    @property
    def mismatched(self) -> bool:
        return bool(self.differing) or (self.roots is not None and len(self.roots) != 1)


class Standstill(msgspec.Struct, frozen=True):
    """Which ranks hold up the others, as far as their records show."""

    kind: Kind
    culprits: tuple[int, ...]
    confidence: Confidence
    wait: Wait
    """The operation that shows it."""
    others: tuple[Wait, ...] = ()
    """The other operations that do not end: those that wait for `wait`, those that wait for these, and so on."""
    circle: tuple[tuple[int, Wait], ...] = ()
    """(rank, the operation it stands in), where ranks wait for each other."""
    idle: tuple[int, ...] = ()
    """Ranks in no operation that no rank waits for."""
    doubts: tuple[str, ...] = ()
    """What else it may be, and what would decide."""


def each_wait(stand: Standstill) -> Iterator[Wait]:
    """Yield all operations of a standstill, first the one that shows it."""
    yield stand.wait
    yield from stand.others
