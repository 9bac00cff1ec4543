"""What the segments of a GPU hold."""

from __future__ import annotations

import msgspec

from sentinel.toolkit.memory.reading import AllocatorSnapshot, Segment


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one GPU, as its allocator sees them."""

    device: int
    reserved: int
    live: int
    waiting: int
    """Freed, but in use on another stream (record_stream)."""
    pieces: int
    """Free, in segments that also hold something: no other allocation size and no other process can use them."""
    whole: int
    """Free, in segments that hold nothing: empty_cache() returns them to the driver."""
    rounding: int
    """Live, beyond what was requested."""
    private: int
    """Reserved by private pools (CUDA graphs)."""
    largest_free: int
    segments: int
    expandable: bool
    """Whether any segment is expandable."""

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is free in pieces."""
        return self.pieces / self.reserved if self.reserved else 0.0


def occupancies(snapshot: AllocatorSnapshot) -> list[Occupancy]:
    """Return the occupancy of each GPU that has reserved anything."""
    devices = sorted({segment.device for segment in snapshot.segments})
    return [_occupancy(device, [s for s in snapshot.segments if s.device == device]) for device in devices]


def _occupancy(device: int, segments: list[Segment]) -> Occupancy:
    blocks = [block for segment in segments for block in segment.blocks]
    empty = [segment for segment in segments if all(block.state == "free" for block in segment.blocks)]
    free = sum(block.size for block in blocks if block.state == "free")
    whole = sum(block.size for segment in empty for block in segment.blocks)
    return Occupancy(
        device=device,
        reserved=sum(segment.size for segment in segments),
        live=sum(block.size for block in blocks if block.state == "live"),
        waiting=sum(block.size for block in blocks if block.state == "waiting"),
        pieces=free - whole,
        whole=whole,
        rounding=sum(max(0, block.size - block.requested) for block in blocks if block.state == "live"),
        private=sum(segment.size for segment in segments if segment.private),
        largest_free=max((block.size for block in blocks if block.state == "free"), default=0),
        segments=len(segments),
        expandable=any(segment.expandable for segment in segments),
    )


_LEVELS = " ▁▂▃▄▅▆▇█"


def picture(segments: list[Segment], width: int) -> list[tuple[Segment, str]]:
    """Return a line for each segment in use: how full each `1/width` of it is; those with most free memory first."""
    torn = [segment for segment in segments if any(block.state != "free" for block in segment.blocks)]
    torn.sort(key=lambda segment: sum(b.size for b in segment.blocks if b.state == "free"), reverse=True)
    return [(segment, _bar(segment, width)) for segment in torn]


def _bar(segment: Segment, width: int) -> str:
    cell = max(1.0, segment.size / width)
    filled = [0.0] * width
    start = 0
    for block in segment.blocks:
        end = start + block.size
        if block.state != "free":
            for at in range(int(start / cell), min(width, int((end - 1) / cell) + 1)):
                filled[at] += min(end, (at + 1) * cell) - max(start, at * cell)
        start = end
    return "".join(_LEVELS[min(8, -int(-8 * min(1.0, share / cell) // 1))] for share in filled)
