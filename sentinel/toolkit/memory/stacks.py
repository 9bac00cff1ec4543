"""Which code holds memory, by the stack that allocated it, and whose share grows."""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec

from sentinel.toolkit.memory.reading import AllocatorSnapshot, Stack

_LIBRARIES = ("site-packages/torch/", "dist-packages/torch/", "torch/csrc", "??", "/c10/", "/aten/")


_UNWINDING = ("unwind::unwind", "CapturedTraceback::gather", "gather_with_cpp", "CachingAllocator")
"""C++ frames that every allocation has: they record the stack, and provide the memory."""
_ALLOCATING = ("StorageImpl", "Storage::", "at::detail::empty", "at::native::empty", "at::empty", "at::_ops::empty")
"""C++ frames that many allocations have: they make an empty tensor."""
_CATEGORIES = (
    ("torch::autograd::Engine", "gradients (autograd engine)"),
    ("c10d::", "collectives (c10d)"),
    ("torch::inductor", "compiled graph (inductor)"),
    ("torch::jit", "TorchScript"),
)
"""What a thread without Python frames does, by a C++ frame in its stack."""


class StackHolder(msgspec.Struct, frozen=True):
    """The live blocks of one stack."""

    bytes: int
    blocks: int
    stack: Stack

    @property
    def place(self) -> str:
        """The innermost frame that is not torch's own."""
        return place(self.stack)


class Growth(msgspec.Struct, frozen=True):
    """The live blocks of one stack in several snapshots."""

    bytes: tuple[int, ...]
    """Live bytes in each snapshot."""
    blocks: tuple[int, ...]
    stack: Stack

    @property
    def place(self) -> str:
        """The innermost frame that is not torch's own."""
        return place(self.stack)


def place(stack: Stack) -> str:
    """Return the innermost frame of user code, otherwise of torch; empty if no stack was recorded."""
    python = [frame for frame in stack if frame.split(":")[0].endswith(".py")]
    own = [frame for frame in python if not any(library in frame for library in _LIBRARIES)]
    return (own or python or [_native(stack)])[0]


def select_telling(stack: Stack) -> Stack:
    """Return the informative frames, innermost first: Python's, or those of C++ that not every allocation has."""
    python = tuple(frame for frame in stack if frame.split(":")[0].endswith(".py"))
    beyond = tuple(frame for frame in stack if not any(name in frame for name in _UNWINDING))
    telling = tuple(frame for frame in beyond if not any(name in frame for name in _ALLOCATING))
    return python or telling or beyond or stack


def _native(stack: Stack) -> str:
    """Return, for a stack of C++ frames only, what its thread does, and the function that does it."""
    telling = [_function(frame) for frame in select_telling(stack)]
    category = next((words for name, words in _CATEGORIES if any(name in frame for frame in stack)), "")
    first = next((name for name in telling if "Backward" in name), next(iter(telling), ""))
    return f"{category}: {first}" if category else first


def _function(frame: str) -> str:
    """Return `file:line name(arguments)` without the arguments, and without an unknown place."""
    where, _, name = frame.partition(" ")
    name = name.replace("(anonymous namespace)", "anonymous").partition("(")[0]
    return name if where.startswith("??") else f"{where} {name}"


def holders(snapshot: AllocatorSnapshot) -> list[StackHolder]:
    """Return the live blocks of each stack, the largest first."""
    return sorted(
        (StackHolder(size, count, stack) for stack, (size, count) in _live(snapshot).items()), reverse=True, key=_key
    )


def growing(snapshots: list[AllocatorSnapshot]) -> list[Growth]:
    """Return the stacks whose live blocks never decreased, and increased overall; the one that grew most first."""
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
