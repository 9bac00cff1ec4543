"""Decides which snapshot a run goes on from, by what every rank sees of them. Pure: no clock, no disk.

    every rank sees it whole                            it is taken
    a rank has read it to its end, and it is damaged    passed over, and the next older one of its line is asked for
    a rank cannot read it, or does not see it           nothing is decided: ranks look again, and raise in the end
    it is of another format                             an error: it is whole, and not ours to pass over
    only some nodes published their parts of it         after a while, the newest one whose parts are all there

An older snapshot is never taken because a newer one could not be read: a file server that answers ESTALE, a directory
that is mounted on rank 1 a moment later, or a process out of descriptors says nothing about what is in the files.

A line is a chain of snapshots, each the parent of the next. There are several lines only if a run went on from an older
snapshot, and the younger ones could not be set aside. The line that was written to last is the run's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

State = Literal["whole", "damaged", "incomplete", "unreadable", "foreign", "misfit", "unchecked"]
"""How a rank sees a snapshot.

`damaged`: read to its end, and not what was written. `incomplete`: less than was written, which a network file system
may show for a moment. `unreadable`: no answer. `foreign`: of another version. `misfit`: parts of another number of
ranks. `unchecked`: an older one.
"""


UNKNOWN_TIME = 1e300
"""Time of a snapshot whose manifest cannot be read: later than all others, so that it is not taken for an old one."""


class Seen(msgspec.Struct, frozen=True):
    """One snapshot, as one rank sees it."""

    path: str
    state: State
    why: str = ""
    """What is wrong with it, with the file's name."""
    parent: int | None = None
    """Step of the one before it on its line; None: not known, take the next older one."""
    time: float = UNKNOWN_TIME
    """Unix seconds at publication."""
    part: bool = False
    """Whether it is the part of one node of several."""
    lineage: str = ""
    """Lineage of a part: only parts with the same one belong together."""
    rank: int = -1
    """For a part, the rank whose state is taken from it, if not this rank's own number; -1: its own.

    It is another one where the job goes on without some nodes.
    """


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees of a directory of snapshots."""

    directory: str
    present: bool = True
    empty_ancestor: str = ""
    """The nearest existing ancestor of an absent directory, if it is empty: a file system may not be mounted."""
    trouble: str = ""
    """Why the directory could not be read just now."""
    refusal: str = ""
    """Why it is not read at all."""
    snapshots: dict[int, Seen] = {}
    """The snapshots by step."""
    elsewhere: dict[int, Seen] = {}
    """By step, parts of other ranks, where no part of this one is seen."""
    late: bool = False
    """Whether this rank has looked for as long as allowed. Rank 0's value counts."""
    host: str = ""
    apart: bool = False
    """Whether the ranks are on several nodes, each of which may have a disk of its own. Rank 0's value counts."""


class Take(msgspec.Struct, frozen=True):
    """Go on from this step. `line` is its line, the youngest first."""

    step: int
    line: tuple[int, ...]


class Begin(msgspec.Struct, frozen=True):
    """Begin at step 0: there is no snapshot, or `before` rules out all."""


class PassOver(msgspec.Struct, frozen=True):
    """Pass over this snapshot, which is damaged, and look at the next older one."""

    step: int
    why: str


class PassParts(msgspec.Struct, frozen=True):
    """Pass over these steps, the youngest first: not all ranks have a part of them.

    `older`: whether there is an older step of which they do.
    """

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks that have no part of the first step."""
    older: bool


class KeepWaiting(msgspec.Struct, frozen=True):
    """Look again; it is an error if it stays so."""

    why: str


class Refuse(msgspec.Struct, frozen=True):
    """Raise an error: waiting would not help."""

    why: str


Decision = Take | Begin | PassOver | PassParts | KeepWaiting | Refuse


def decide(views: Sequence[View], *, before: int | None, passed: Mapping[int, str], restarted: bool) -> Decision:
    """Return the decision from the views of all ranks, by rank: it is the same on each.

    `passed`: steps that were passed over, and why. `restarted`: the run is known to have been started before.
    """
    if problem := _judge_directory(views, restarted=restarted):
        return problem
    seen = _merge(views)
    if not seen:
        return Begin()
    line = follow_line(seen)
    candidates = [step for step in line if (before is None or step < before) and step not in passed]
    if candidates:
        partial = tuple(itertools.takewhile(lambda step: _is_partial(step, views), candidates))
        if partial and views[0].late:
            without = (rank for rank, view in enumerate(views) if partial[0] not in view.snapshots)
            return PassParts(partial, tuple(without), older=len(partial) < len(candidates))
        return _judge_snapshot(candidates[0], line, views)
    if passed:
        listed = "; ".join(why for _, why in sorted(passed.items(), reverse=True))
        return Refuse(f"{views[0].directory} holds snapshots, and none can be used: {listed}. Nothing was changed")
    return Begin()


def follow_line(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    """Return the steps of the line that was written to last, the youngest first.

    A snapshot without a known parent, or whose parent was deleted, follows the next older one. So does a part, whatever
    its node wrote before it: another may have written one in between, and clocks of nodes differ. Void parts, which
    could not be set aside, are on the line too, but never whole: a node sets its own aside before it writes again.
    """
    falling = sorted(seen, reverse=True)
    parents: dict[int, int | None] = {}
    for step, one in seen.items():
        newest = step - 1 if one.part or one.parent is None else min(one.parent, step - 1)
        parents[step] = next((other for other in falling if other <= newest), None)
    tips = set(seen) - set(parents.values())
    following: int | None = max(tips, key=lambda tip: (seen[tip].time, tip))
    line = []
    while following is not None:
        line.append(following)
        following = parents[following]
    return tuple(line)


def _judge_directory(views: Sequence[View], *, restarted: bool) -> Decision | None:
    for rank, view in enumerate(views):
        if view.refusal:
            return Refuse(view.refusal)
        if view.trouble:
            return KeepWaiting(f"{_name(rank, views)}{view.trouble}")
    present = [rank for rank, view in enumerate(views) if view.present]
    absent = [rank for rank, view in enumerate(views) if not view.present]
    parts = any(seen.part for view in views for seen in (*view.snapshots.values(), *view.elsewhere.values()))
    if present and absent and not (parts and views[0].late):
        none = not any(view.snapshots or view.elsewhere for view in views)
        if none and views[0].late and views[0].apart and not restarted:
            return Begin()
        lacking = views[absent[0]]
        begin = f" To begin at step 0: mkdir -p {lacking.directory} on {lacking.host}" if none else ""
        return KeepWaiting(
            f"rank {absent[0]} does not see {lacking.directory}, which is there for rank {present[0]}: is its file "
            f"system mounted there?{begin}"
        )
    empty = next((view.empty_ancestor for view in views if view.empty_ancestor), "")
    if restarted and not present and empty:
        return KeepWaiting(
            f"{views[0].directory} is not there, {empty} is empty, and this run was started before: is its file system "
            f"mounted? To begin at step 0: mkdir -p {views[0].directory}"
        )
    return None if present else Begin()


def _judge_snapshot(step: int, line: tuple[int, ...], views: Sequence[View]) -> Decision:
    looks = [view.snapshots.get(step) for view in views]
    path = _merge(views)[step].path
    for look in looks:
        if look is not None and look.state == "misfit":
            return Refuse(
                f"{look.why}. It is left as it is. Resume it with as many ranks, or pass resume(before={step}) to go "
                "on from an older one"
            )
        if look is not None and look.state == "foreign":
            return Refuse(
                f"{look.why}. It is left as it is. Use the version that wrote it, or pass resume(before={step}) to go "
                "on from an older one"
            )
    for rank, look in enumerate(looks):
        if look is not None and look.state == "damaged":
            return PassOver(step, look.why)
        if look is not None and look.state == "unreadable":
            return KeepWaiting(f"{_name(rank, views)}{look.why}")
    for rank, look in enumerate(looks):
        if look is None and all(other is None or other.part for other in looks):
            return KeepWaiting(f"rank {rank} does not see its part of the snapshot of step {step}")
        if look is None:
            return KeepWaiting(f"rank {rank} does not see {path}, which other ranks do")
    if _is_partial(step, views):
        return KeepWaiting(f"the parts of the snapshot of step {step} are of two pasts")
    states = {look.state for look in looks if look is not None}
    if states == {"whole"}:
        return Take(step, line)
    if states == {"incomplete"} and views[0].late:  # for all ranks, and after the wait: not an old answer of a server
        return PassOver(step, next(look.why for look in looks if look is not None))
    for rank, look in enumerate(looks):
        if look is not None and look.state == "incomplete":
            return KeepWaiting(f"{_name(rank, views)}{look.why}")
    return KeepWaiting(f"{path} has not been looked at by every rank")


def _is_partial(step: int, views: Sequence[View]) -> bool:
    """Whether nodes published parts of it that do not make one whole."""
    looks = [view.snapshots.get(step) for view in views]
    there = [look for look in looks if look is not None]
    if not there:
        return True
    decisive = ("foreign", "misfit", "damaged", "unreadable")
    if not any(look.part for look in there) or any(look.state in decisive for look in there):
        return False
    return len(there) < len(looks) or len({(look.part, look.lineage) for look in there if look.time < UNKNOWN_TIME}) > 1


def _merge(views: Sequence[View]) -> dict[int, Seen]:
    """Return, for each step, what the rank that knows most of it sees: all ranks get the same."""
    merged: dict[int, Seen] = {}
    for view in views:
        for step, seen in (*view.snapshots.items(), *view.elsewhere.items()):
            if step not in merged or seen.time < merged[step].time:
                merged[step] = seen
    return merged


def _name(rank: int, views: Sequence[View]) -> str:
    return f"rank {rank}: " if len(views) > 1 else ""
