"""What each GPU held at an earlier moment: the snapshot's segments, and its recorded history undone entry by entry.

A snapshot is mostly taken between two steps, when most memory is free. Its fragmentation means little then: all free
pieces may be in use at the peak, which decides whether the run fits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import msgspec

from sentinel.toolkit.memory.reading import AllocatorEvent, AllocatorSnapshot, Segment

_ROUNDING = 512
"""Bytes to a multiple of which the allocator rounds. The history has the bytes that were requested."""
_STEPS = 20_000_000
"""Most operations for undoing a history: one that needs more is not undone."""
_MAPPED, _UNMAPPED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class TimelineMoment(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one GPU after one entry of its history."""

    device: int
    entry: int
    entries: int
    """Number of entries of the history."""
    reserved: int
    live: int
    pieces: int
    """Free, in segments that also hold something."""
    whole: int
    """Free, in segments that hold nothing."""
    largest_free: int

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is free in pieces."""
        return self.pieces / self.reserved if self.reserved else 0.0


def peaks(snapshot: AllocatorSnapshot) -> dict[int, TimelineMoment]:
    """Return the moment at which each GPU held most, as far back as its history goes; GPUs without one are left out."""
    found = {}
    for device, changes in snapshot.histories.items():
        if any(change.action == "alloc" for change in changes):
            moment = before(snapshot, device, _peak(changes, _freeing(changes)))
            if moment is not None:
                found[device] = moment
    return found


def before(snapshot: AllocatorSnapshot, device: int, entry: int) -> TimelineMoment | None:
    """Return what a GPU held when this entry of its history was written; None if finding it would take too long."""
    mapped = sum(change.action in _MAPPED for change in snapshot.histories[device])
    return _moment(snapshot, device, entry) if mapped * len(snapshot.segments) < _STEPS else None


def _freeing(changes: Sequence[AllocatorEvent]) -> str:
    """Return the action after which memory can be used again; a history may lack `free_completed`."""
    return "free_completed" if any(change.action == "free_completed" for change in changes) else "free_requested"


def _peak(changes: Sequence[AllocatorEvent], freeing: str) -> int:
    held = most = at = 0
    for entry, change in enumerate(changes):
        if change.action == "alloc":
            held += change.size
            if held > most:
                most, at = held, entry
        elif change.action == freeing:
            held -= change.size
    return at


def _moment(snapshot: AllocatorSnapshot, device: int, entry: int) -> TimelineMoment:
    changes = snapshot.histories[device]
    freeing = _freeing(changes)
    segments = {s.address: s.size for s in snapshot.segments if s.device == device}
    live = dict(block for s in snapshot.segments if s.device == device for block in _list_held(s))
    for change in reversed(changes[entry + 1 :]):
        if change.action == "alloc":
            live.pop(change.address, None)
        elif change.action == freeing:
            live[change.address] = -(-change.size // _ROUNDING) * _ROUNDING
        elif change.action in _MAPPED:
            _cut(segments, change.address, change.size)
        elif change.action in _UNMAPPED:
            segments[change.address] = change.size
    gaps = list(_gaps(segments, live))
    return TimelineMoment(
        device=device,
        entry=entry,
        entries=len(changes),
        reserved=sum(segments.values()),
        live=sum(live.values()),
        pieces=sum(size for size, whole in gaps if not whole),
        whole=sum(size for size, whole in gaps if whole),
        largest_free=max((size for size, _ in gaps), default=0),
    )


def _list_held(segment: Segment) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the blocks that are in use."""
    at = segment.address
    for block in segment.blocks:
        if block.state != "free":
            yield at, block.size
        at += block.size


def _cut(segments: dict[int, int], address: int, size: int) -> None:
    """Remove memory from the segments; it may be a part of an expandable one."""
    if segments.get(address) == size:
        del segments[address]
        return
    for start, length in segments.items():
        if start <= address < start + length:
            del segments[start]
            if address > start:
                segments[start] = address - start
            if (rest := start + length - address - size) > 0:
                segments[address + size] = rest
            return


def _gaps(segments: dict[int, int], live: dict[int, int]) -> Iterator[tuple[int, bool]]:
    """Yield (bytes, whether its segment is empty) of each free range."""
    used = sorted(live.items())
    starts = [address for address, _ in used]
    for start, length in segments.items():
        inside = used[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, start + length)]
        at = start
        for address, size in inside:
            if address > at:
                yield address - at, False
            at = address + size
        if start + length > at:
            yield start + length - at, not inside
