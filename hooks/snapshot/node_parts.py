"""Snapshots in a directory, as one rank sees them: in a job over several nodes, each node publishes its own part.

    DIRECTORY/node-of-rank-0/step-00000400/    ranks 0 to 3, laid out as the snapshot of one node
    DIRECTORY/node-of-rank-4/step-00000400/    ranks 4 to 7, on another disk or in the same directory

Nodes write without asking each other: all of them choose the same steps. A snapshot is whole if the parts of all ranks
are there, of one step and one `lineage`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from sentinel.hooks.snapshot import directory
from sentinel.hooks.snapshot.choice import Seen, State, View, follow_line
from sentinel.hooks.snapshot.directory import DiskSnapshot, Manifest

_PLACE = re.compile(r"node-of-rank-(\d+)")


def place_of(place: Path, first_rank: int) -> Path:
    """Return where the node with this first rank keeps its parts."""
    return place / f"node-of-rank-{first_rank}"


def list_places(place: Path) -> list[tuple[int, Path]]:
    """List (first rank, path) of the nodes' places here, rising; empty if `place` does not exist. Raises OSError."""
    try:
        names = [entry.name for entry in place.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), place / name) for name in names if (match := _PLACE.fullmatch(name)))


def list_common(place: Path, world: int, most: int) -> list[int]:
    """List the newest `most` steps whose parts are all here, the newest first, for a directory that nodes share.

    Older ones are not read: a file server has those of all nodes. Raises OSError.
    """
    found: dict[int, list[Path]] = {}
    for _, own in list_places(place):
        for step, path in directory.list_snapshots(own):
            found.setdefault(step, []).append(path)
    common: list[int] = []
    for step in sorted(found, reverse=True):
        if len(common) == most:
            break
        read = [directory.read_manifest(path) for path in found[step]]
        if _is_whole([one for one in read if isinstance(one, Manifest)], world):
            common.append(step)
    return common


def _is_whole(parts: Sequence[Manifest], world: int) -> bool:
    lineages = {(part.lineage, part.world_size) for part in parts}
    return len(lineages) == 1 and {rank for part in parts for rank in part.ranks} >= set(range(world))


class Looker(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that looks."""

    rank: int
    world: int
    node: int
    """Sentinel's number of its node, which stays when the job goes on without others."""
    local_rank: int
    shrunk: bool
    """Whether the job goes on without some of its nodes."""

    def find_own(self, part: Manifest) -> int | None:
        """Return the rank that this one was in a part; None: the part is of others.

        If more ranks wrote it than go on, a rank takes what its own node wrote: another node's may be another state.
        """
        if not self.is_renumbered(part):
            return self.rank if self.rank in part.ranks else None
        return part.ranks[self.local_rank % len(part.ranks)] if part.node == self.node else None

    def is_renumbered(self, part: Manifest) -> bool:
        """Whether ranks had other numbers when they wrote it."""
        return bool(part.ranks) and self.shrunk and part.world_size > self.world


def look(
    place: Path,
    looker: Looker,
    *,
    before: int | None,
    passed: Collection[int],
    whole: Collection[int],
    thorough: bool,
    late: bool,
    apart: bool,
) -> View:
    """Return what this rank sees in `place`. Raises nothing.

    Of the snapshots of its line before `before`, the newest that is not in `passed` is read, unless it is known to be
    `whole`; of the others only the manifests are read.
    """
    try:
        status = place.stat()
    except FileNotFoundError:
        return View(
            directory=str(place), present=False, empty_ancestor=_find_empty_ancestor(place), late=late, apart=apart,
            host=socket.gethostname(),
        )  # fmt: skip
    except OSError as error:
        return View(directory=str(place), trouble=f"{place}: {error.strerror}", late=late)
    if refusal := directory.refuse_directory(place, status):
        return View(directory=str(place), refusal=refusal, late=late)
    try:
        found, elsewhere = list_seen(place, looker)
    except OSError as error:
        return View(directory=str(place), trouble=f"{place}: {error.strerror}", late=late)
    seen = {step: _describe(path, one, looker) for step, (path, one) in found.items()}
    line = follow_line(seen) if seen else ()
    first = next((step for step in line if (before is None or step < before) and step not in passed), None)
    if first is not None and seen[first].state == "unchecked":
        seen[first] = _examine(seen[first], *found[first], known=first in whole, thorough=thorough, rank=looker.rank)
    others = {step: directory.describe(path, one) for step, (path, one) in elsewhere.items()}
    return View(directory=str(place), snapshots=seen, elsewhere=others, late=late, apart=apart)


def list_seen(
    place: Path, looker: Looker
) -> tuple[Mapping[int, tuple[Path, Manifest | Seen]], Mapping[int, tuple[Path, Manifest]]]:
    """List the snapshots in which this rank finds itself, and the parts of other ranks, by step.

    The first maps a step to the path and the manifest, or what is seen without one; the second has the steps in which
    this rank is found nowhere. Raises OSError.
    """
    rank = looker.rank
    found: dict[int, tuple[Path, Manifest | Seen]] = {}
    hidden: dict[int, tuple[Path, Manifest | Seen]] = {}
    elsewhere: dict[int, tuple[Path, Manifest]] = {}
    nearest = True  # the node that this rank is on, by its number: what cannot be read there is this rank's
    for first, own in sorted(list_places(place), key=lambda one: (one[0] > rank, -one[0])):
        for step, path in directory.list_snapshots(own):
            if step in found:
                continue
            one = directory.read_manifest(path)
            if isinstance(one, Seen):  # unreadable: this rank may be in it, wherever it is
                if looker.shrunk:  # places have the numbers from before
                    hidden[step] = path, msgspec.structs.replace(one, part=True)
                elif first <= rank and (nearest or one.state == "unreadable"):
                    found[step] = path, msgspec.structs.replace(one, part=True)
            elif looker.find_own(one) is not None:
                found[step] = path, one
            else:
                elsewhere[step] = path, one
        nearest = False
    found = hidden | found
    for step, path in directory.list_snapshots(place):
        one = directory.read_manifest(path)
        part = found.get(step, (path, None))[1]
        if not (isinstance(part, Manifest) and isinstance(one, Manifest) and part.time > one.time):
            found[step] = path, one
    return found, {step: other for step, other in elsewhere.items() if step not in found}


def _describe(path: Path, one: Manifest | Seen, looker: Looker) -> Seen:
    if isinstance(one, Seen):
        return one
    seen = directory.describe(path, one)
    if looker.is_renumbered(one) and (own := looker.find_own(one)) is not None:
        return msgspec.structs.replace(seen, rank=own)
    if one.ranks and one.world_size != looker.world:
        why = f"{path}: was written by {one.world_size} ranks on several nodes, and this job has {looker.world}"
        if one.world_size < looker.world:
            why += ": more cannot go on from it. Nodes that --allow-shrink left out stay out: "
            why += f"start {one.world_size} ranks"
        return msgspec.structs.replace(seen, state="misfit", why=why)
    return seen


def _examine(seen: Seen, path: Path, one: Manifest | Seen, *, known: bool, thorough: bool, rank: int) -> Seen:
    assert isinstance(one, Manifest)
    state: State = "whole"
    why = ""
    if not known:
        # The first rank of a part may not be the first of a node any more.
        state, why = DiskSnapshot(path, one).examine(thorough=thorough or one.ranks[:1] == (rank,))
    return msgspec.structs.replace(seen, state=state, why=why)


def _find_empty_ancestor(place: Path) -> str:
    """Return the nearest ancestor directory that exists, if it is empty."""
    for ancestor in place.parents:
        try:
            return "" if any(ancestor.iterdir()) else str(ancestor)
        except FileNotFoundError:
            continue
        except OSError:
            break
    return ""
