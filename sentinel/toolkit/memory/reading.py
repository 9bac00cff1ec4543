"""Reads what torch.cuda.memory._dump_snapshot wrote. The file may come from anyone.

A snapshot is a pickle of dicts, lists, tuples, strings and numbers. Every opcode that would import a name is refused,
so nothing in it is called. A file cannot expand much beyond its size: the address space is limited while it is read,
and entries are counted against its size, because a list may hold itself a million times for two bytes each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sentinel import safe_pickle
from sentinel.errors import ConfigError

LARGEST = 2 * 1024**3
"""Most bytes of a snapshot that is read."""
_DEEPEST = 64
"""Most frames of a stack that are kept."""
_ARCHIVES = {b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_STATES = {"active_allocated": "live", "active_awaiting_free": "waiting", "active_pending_free": "waiting"}

Stack = tuple[str, ...]
"""The frames of a stack as `file:line function`, innermost first."""


class Block(msgspec.Struct, frozen=True):
    """A piece of a segment."""

    size: int
    requested: int
    """Bytes that were requested: less than size, which is rounded up."""
    state: str
    """`live`, `waiting` (freed, but another stream may still use it) or `free`."""
    stack: Stack
    """Where it was allocated; empty if no history was recorded."""


class Segment(msgspec.Struct, frozen=True):
    """The memory of one cudaMalloc."""

    device: int
    address: int
    size: int
    large: bool
    private: bool
    """Whether it belongs to a private pool, such as a CUDA graph's."""
    expandable: bool
    stream: int
    blocks: tuple[Block, ...]


class OomEvent(msgspec.Struct, frozen=True):
    """An allocation that failed while history was recorded."""

    device: int
    size: int
    free: int
    """Bytes that the driver still had."""
    stack: Stack
    entry: int
    """Index in the history of its GPU."""


class AllocatorEvent(NamedTuple):
    """An entry of the history: `alloc`, `free_completed`, `segment_alloc` and others, as the allocator names them."""

    action: str
    address: int
    size: int


class AllocatorSnapshot(msgspec.Struct, frozen=True):
    """The content of one snapshot file."""

    file: str
    segments: tuple[Segment, ...]
    failures: tuple[OomEvent, ...]
    recorded: bool
    """Whether stacks were recorded."""
    settings: dict[str, Any]
    histories: Mapping[int, list[AllocatorEvent]]
    """What the allocator did on each GPU, in order, as far back as it was recorded."""


def read(path: Path) -> AllocatorSnapshot:
    """Read a snapshot. Raises ConfigError for no file, a too large one, an archive, no snapshot, or one that would run
    code."""
    content = _bytes(path)
    with safe_pickle.limit_memory(len(content)):
        unpickled = safe_pickle.load_pickle(path, content, "a snapshot of the allocator")
        return _Reading(path, len(content)).snapshot(unpickled)


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(
                f"{path}: {size / 1e9:.1f} GB; at most {LARGEST / 1e9:.1f} GB are read. "
                "Record less: torch.cuda.memory._record_memory_history(max_entries=100_000)"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    for start, kind in _ARCHIVES.items():
        if content.startswith(start):
            raise ConfigError(
                f"{path}: a {kind} archive; only what torch.cuda.memory._dump_snapshot wrote is read, unpacked"
            )
    return content


class _Reading:
    """Turns the unpickled content into structs, and counts its entries."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._budget = path, size
        self._stacks: dict[int, Stack] = {}

    def snapshot(self, content: Any) -> AllocatorSnapshot:
        try:
            return self._snapshot(content)
        except MemoryError:
            raise ConfigError(f"{self._path}: needs far more memory than its size says: not a snapshot") from None
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{self._path}: not a snapshot of the allocator ({type(error).__name__}: {str(error)[:100]})"
            ) from None

    def _snapshot(self, content: Any) -> AllocatorSnapshot:
        if isinstance(content, list):  # torch.cuda.memory_snapshot(): the segments alone
            content = {"segments": content}
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise ConfigError(f"{self._path}: not a snapshot of the allocator (it has no list of segments)")
        segments = tuple(self._segment(segment) for segment in self._each(content["segments"]))
        failures = tuple(
            OomEvent(device, _natural(entry["size"]), _natural(entry.get("device_free", 0)), self._stack(entry), number)
            for device, trace in enumerate(content.get("device_traces") or ())
            for number, entry in enumerate(self._each(trace))
            if entry.get("action") == "oom"
        )
        histories = {
            device: [_change(entry) for entry in trace]
            for device, trace in enumerate(content.get("device_traces") or ())
            if trace
        }
        settings = content.get("allocator_settings")
        recorded = any(block.stack for segment in segments for block in segment.blocks)
        settings = settings if isinstance(settings, dict) else {}
        return AllocatorSnapshot(str(self._path), segments, failures, recorded, settings, histories)

    def _each(self, entries: Any) -> list[Any]:
        if not isinstance(entries, list):
            raise TypeError(f"a list was expected, not {type(entries).__name__}")
        self._budget -= len(entries)
        if self._budget < 0:
            raise ConfigError(f"{self._path}: holds more entries than bytes: not a snapshot")
        return entries

    def _segment(self, segment: dict[str, Any]) -> Segment:
        return Segment(
            device=_natural(segment.get("device", 0)),
            address=_natural(segment.get("address", 0)),
            size=_natural(segment["total_size"]),
            large=segment.get("segment_type") == "large",
            private=any(segment.get("segment_pool_id") or ()),
            expandable=bool(segment.get("is_expandable", False)),
            stream=_natural(segment.get("stream", 0)),
            blocks=tuple(self._block(block) for block in self._each(segment["blocks"])),
        )

    def _block(self, block: dict[str, Any]) -> Block:
        size = _natural(block["size"])
        state = _STATES.get(block["state"], "free")
        return Block(size, _natural(block.get("requested_size", size)), state, self._stack(block))

    def _stack(self, holder: dict[str, Any]) -> Stack:
        frames = holder.get("frames")
        if not frames:
            return ()
        # Blocks of one stack share its list in the file, and so in memory, where it lives as long as this reading.
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = self._name_frames(self._each(frames)[:_DEEPEST])
        return self._stacks[id(frames)]

    def _name_frames(self, frames: list[Any]) -> Stack:
        return tuple(f"{_text(f['filename'])}:{_natural(f['line'])} {_text(f['name'])}" for f in frames)


def _change(entry: dict[str, Any]) -> AllocatorEvent:
    return AllocatorEvent(
        sys.intern(_text(entry["action"])), _natural(entry.get("addr", 0)), _natural(entry.get("size", 0))
    )


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r:.40} where a size or an address was expected")
    return value


def _text(value: Any) -> str:
    """Return a name without control characters, which a terminal would obey."""
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {type(value).__name__}")
    return "".join(character for character in value[:300] if character.isprintable())
