"""Snapshots of a job over several nodes: each node publishes a part of its own, with its ranks in it.

    DIRECTORY/node-of-rank-0/step-00000400/    ranks 0 to 3, laid out as the snapshot of one node
    DIRECTORY/node-of-rank-4/step-00000400/    ranks 4 to 7, on another disk or in the same directory

Nodes write without asking each other: all of them choose the same steps. A snapshot is whole where the parts of all
ranks are there, of one step and one `lineage`. A part may be all that there will ever be of its step, so what is
deleted follows from what all nodes are known to hold (`CommonSnapshots`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from sentinel.hooks.snapshot import directory

AHEAD = 4
"""Parts that a node keeps beyond `disk_keep` as long as it does not know whether the others have theirs; and of older
ones a few (`CommonSnapshots`)."""
_PLACE = re.compile(r"node-of-rank-(\d+)")


class CommonSnapshots:
    """What the first rank of a node knows of the steps whose snapshot all nodes hold, and which parts it keeps.

    The newest common one stays as long as the node writes at most `AHEAD` parts without word of the others. Beyond that
    parts are thinned out: of the attempt's steps it keeps the newest two multiples of each power of two, about log2 of
    all that it wrote. So two nodes that write the same steps always have one in common. Of a node with every 2^k-th
    step, its last one or the one before; of a node that stopped n steps ago, one at most 2n steps older than its last:
    the least 2^j above n has a multiple among the stopped node's newest two that is still among the other's.
    """

    def __init__(self, step: int) -> None:
        """`step`: what all ranks went on from; negative: from nothing."""
        self._first = step + 1
        self._steps = {step}
        self._floor = -1

    def note(self, own: Collection[int], steps: Iterable[int], floor: int) -> None:
        """All nodes hold these `steps`, and know that none needs what is older than `floor`, -1: that is not known.
        `own`: what this node has. What was said may be of before a rollback."""
        if floor in own:
            self._floor = max(self._floor, floor)
        self._steps = {step for step in (*self._steps, *steps) if step in own and step >= self._floor}

    def rewind(self, step: int) -> None:
        """The run went back to this step: what is younger is void."""
        self._steps = {one for one in self._steps if one <= step}
        self._floor = self._floor if self._floor <= step else -1

    def find_safe(self, keep: int) -> int:
        """The oldest of the newest `keep` that all nodes are known to hold; -1 where there are not as many."""
        newest = sorted(self._steps)[-keep:]
        return newest[0] if len(newest) == keep else -1

    def list_superfluous(self, line: Sequence[int], keep: int) -> list[int]:
        """The steps to delete of the node's own `line`, the youngest first, of which `keep` are wanted."""
        rest = line[keep:]
        unknown = [step for step in rest if step >= self._floor and step not in self._steps]
        spread = self._list_spread(line)
        return [step for step in rest if step < self._floor] + [step for step in unknown[AHEAD:] if step not in spread]

    def _list_spread(self, line: Sequence[int]) -> set[int]:
        """The newest two multiples of each power of two, counted from the attempt's first step, as all nodes do."""
        ordinals = [step - self._first for step in line if step >= self._first]
        spread = set()
        for bits in range(max(ordinals, default=0).bit_length() + 1):
            spread.update([one for one in ordinals if one % (1 << bits) == 0][:2])
        return {self._first + one for one in spread}


def place_of(place: Path, first_rank: int) -> Path:
    """Where the node whose first rank this is keeps its parts."""
    return place / f"node-of-rank-{first_rank}"


def list_places(place: Path) -> list[tuple[int, Path]]:
    """(first rank, path) of what nodes have here, rising; none where `place` is not there. Raises OSError."""
    try:
        names = [entry.name for entry in place.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), place / name) for name in names if (match := _PLACE.fullmatch(name)))


def list_common(place: Path, world: int, most: int) -> list[int]:
    """The newest `most` steps whose parts are all here, the newest first: of a directory that nodes share. Older ones
    are not read: a file server has those of all nodes. Raises OSError."""
    found: dict[int, list[Path]] = {}
    for _, own in list_places(place):
        for step, path in directory.list_snapshots(own):
            found.setdefault(step, []).append(path)
    common: list[int] = []
    for step in sorted(found, reverse=True):
        if len(common) == most:
            break
        read = [directory.read_manifest(path) for path in found[step]]
        if _is_whole([one for one in read if isinstance(one, directory.Manifest)], world):
            common.append(step)
    return common


def _is_whole(parts: Sequence[directory.Manifest], world: int) -> bool:
    lineages = {(part.lineage, part.world_size) for part in parts}
    return len(lineages) == 1 and {rank for part in parts for rank in part.ranks} >= set(range(world))
