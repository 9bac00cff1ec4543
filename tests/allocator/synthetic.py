"""Makes allocator snapshots as torch.cuda.memory._snapshot documents them, without a GPU."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MiB = 2**20
Frames = list[dict[str, Any]]


def frames(*places: str) -> Frames:
    """Return a stack of places like `train.py:12 step`, innermost first, below a frame of torch as in real stacks."""
    inner = {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 2400, "name": "linear"}
    named = []
    for place in places:
        where, name = place.split(" ")
        file, line = where.rsplit(":", 1)
        named.append({"filename": file, "line": int(line), "name": name})
    return [inner, *named]


def segment(blocks: list[tuple[int, str, Frames]], *, device: int = 0, address: int = 2**33, **more: Any) -> Any:
    """Return a segment of blocks given as (bytes, state, frames); addresses and sizes follow from them."""
    made, at = [], address
    for size, state, stack in blocks:
        made.append({"address": at, "size": size, "requested_size": size - 100, "state": state, "frames": stack})
        at += size
    live = sum(b["size"] for b in made if b["state"] == "active_allocated")
    return {
        "device": device,
        "address": address,
        "total_size": at - address,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "is_expandable": False,
        "frames": [],
        "blocks": made,
        **more,
    }


def snapshot(segments: list[Any], *, traces: list[Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {
        "segments": segments,
        "device_traces": traces or [[]],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def written(path: Path, content: Any) -> Path:
    with path.open("wb") as file:
        pickle.dump(content, file)  # as _dump_snapshot does
    return path


LAYER = frames("/home/ada/train.py:31 forward", "/home/ada/train.py:80 main")
LOSSES = frames("/home/ada/train.py:44 step", "/home/ada/train.py:80 main")
CACHE = frames("/home/ada/cache.py:7 remember", "/home/ada/train.py:80 main")


def torn() -> dict[str, Any]:
    """Return a fragmented snapshot: half of the memory is free, in pieces of 8 MiB."""
    pattern = [(8 * MiB, "active_allocated", LAYER), (8 * MiB, "inactive", [])]
    return snapshot([segment(pattern * 4, address=2**33 + at * 2**27) for at in range(10)])


def healthy() -> dict[str, Any]:
    return snapshot([segment([(60 * MiB, "active_allocated", LAYER), (4 * MiB, "inactive", [])]) for _ in range(10)])


def growing(step: int) -> dict[str, Any]:
    """Return the snapshot of a step: LOSSES gains a block of 2 MiB per step; CACHE grows and shrinks; LAYER stays."""
    blocks = [(60 * MiB, "active_allocated", LAYER)]
    blocks += [(2 * MiB, "active_allocated", LOSSES)] * step
    blocks += [(2 * MiB, "active_allocated", CACHE)] * (3 if step % 2 else 1)
    return snapshot([segment(blocks)])
