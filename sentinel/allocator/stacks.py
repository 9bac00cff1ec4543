"""Who holds memory, by the stack that allocated it, and whose share grows."""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec

from sentinel.allocator.reading import Snapshot, Stack

_LIBRARIES = ("site-packages/torch/", "dist-packages/torch/", "torch/csrc", "??", "/c10/", "/aten/")


class Holder(msgspec.Struct, frozen=True):
    """All live blocks of one stack."""

    bytes: int
    blocks: int
    stack: Stack

    @property
    def place(self) -> str:
        """The innermost frame that is not torch's own."""
        return place(self.stack)


class Growth(msgspec.Struct, frozen=True):
    """One stack over several snapshots."""

    bytes: tuple[int, ...]
    """Live, in each of them."""
    blocks: tuple[int, ...]
    stack: Stack

    @property
    def place(self) -> str:
        """The innermost frame that is not torch's own."""
        return place(self.stack)


def place(stack: Stack) -> str:
    """Where in the user's code; empty where no stack was recorded."""
    python = [frame for frame in stack if frame.split(":")[0].endswith(".py")]
    own = [frame for frame in python if not any(library in frame for library in _LIBRARIES)]
    return (own or python or list(stack) or [""])[0]


def holders(snapshot: Snapshot) -> list[Holder]:
    """The largest first."""
    return sorted(
        (Holder(size, count, stack) for stack, (size, count) in _live(snapshot).items()), reverse=True, key=_key
    )


def growing(snapshots: list[Snapshot]) -> list[Growth]:
    """Stacks whose live blocks never got fewer and grew in all: the one that grew most first."""
    live = [_live(snapshot) for snapshot in snapshots]
    found = []
    for stack in {stack for each in live for stack in each if stack}:
        sizes = tuple(each.get(stack, (0, 0))[0] for each in live)
        counts = tuple(each.get(stack, (0, 0))[1] for each in live)
        steady = all(a <= b for a, b in itertools.pairwise(counts))
        if steady and counts[-1] > counts[0] and sizes[-1] > sizes[0]:
            found.append(Growth(sizes, counts, stack))
    return sorted(found, key=lambda growth: (growth.bytes[0] - growth.bytes[-1], growth.stack))


def _key(holder: Holder) -> tuple[int, int, Stack]:
    return holder.bytes, holder.blocks, holder.stack


def _live(snapshot: Snapshot) -> dict[Stack, tuple[int, int]]:
    sizes: dict[Stack, list[int]] = defaultdict(lambda: [0, 0])
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state != "free":
                held = sizes[block.stack]
                held[0] += block.size
                held[1] += 1
    return {stack: (size, count) for stack, (size, count) in sizes.items()}
