"""Who holds memory, by the stack that allocated it, and whose share grows."""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec

from sentinel.toolkit.memory.reading import AllocatorSnapshot, Stack

_LIBRARIES = ("site-packages/torch/", "dist-packages/torch/", "torch/csrc", "??", "/c10/", "/aten/")


_UNWINDING = ("unwind::unwind", "CapturedTraceback::gather", "gather_with_cpp", "CachingAllocator")
"""Frames of C++ that every allocation has: who records the stack, and who gives the memory."""
_ALLOCATING = ("StorageImpl", "Storage::", "at::detail::empty", "at::native::empty", "at::empty", "at::_ops::empty")
"""Those that many have: an empty tensor is made."""
_CATEGORIES = (
    ("torch::autograd::Engine", "gradients (autograd engine)"),
    ("c10d::", "collectives (c10d)"),
    ("torch::inductor", "compiled graph (inductor)"),
    ("torch::jit", "TorchScript"),
)
"""What a thread does that has no frame of Python, by a frame of C++ in its stack."""


class StackHolder(msgspec.Struct, frozen=True):
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
    return (own or python or [_native(stack)])[0]


def select_telling(stack: Stack) -> Stack:
    """The frames that tell something, innermost first: those of Python, or of C++ what is not every allocation's."""
    python = tuple(frame for frame in stack if frame.split(":")[0].endswith(".py"))
    beyond = tuple(frame for frame in stack if not any(name in frame for name in _UNWINDING))
    telling = tuple(frame for frame in beyond if not any(name in frame for name in _ALLOCATING))
    return python or telling or beyond or stack


def _native(stack: Stack) -> str:
    """Of a stack of C++ alone: what its thread does, and the function that does it."""
    telling = [_function(frame) for frame in select_telling(stack)]
    category = next((words for name, words in _CATEGORIES if any(name in frame for frame in stack)), "")
    first = next((name for name in telling if "Backward" in name), next(iter(telling), ""))
    return f"{category}: {first}" if category else first


def _function(frame: str) -> str:
    """`file:line name(arguments)` without arguments, and without a place where C++ has none."""
    where, _, name = frame.partition(" ")
    name = name.replace("(anonymous namespace)", "anonymous").partition("(")[0]
    return name if where.startswith("??") else f"{where} {name}"


def holders(snapshot: AllocatorSnapshot) -> list[StackHolder]:
    """The largest first."""
    return sorted(
        (StackHolder(size, count, stack) for stack, (size, count) in _live(snapshot).items()), reverse=True, key=_key
    )


def growing(snapshots: list[AllocatorSnapshot]) -> list[Growth]:
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


def _key(holder: StackHolder) -> tuple[int, int, Stack]:
    return holder.bytes, holder.blocks, holder.stack


def _live(snapshot: AllocatorSnapshot) -> dict[Stack, tuple[int, int]]:
    sizes: dict[Stack, list[int]] = defaultdict(lambda: [0, 0])
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state != "free":
                held = sizes[block.stack]
                held[0] += block.size
                held[1] += 1
    return {stack: (size, count) for stack, (size, count) in sizes.items()}
