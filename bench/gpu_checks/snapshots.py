"""Checks how `sentinel memory` reads snapshots of the caching allocator: figures, source lines, what grew."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu_checks import Line, equal
from bench.gpu_checks.loops import Loop, settle, toy
from sentinel.toolkit.memory.occupancy import occupancies
from sentinel.toolkit.memory.reading import AllocatorSnapshot, read
from sentinel.toolkit.memory.stacks import growing, holders
from tests.allocator import synthetic

STEPS = 20
MEGABYTES = 4


def check(device: str) -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        if device == "cpu":
            found = [
                read(synthetic.written(Path(folder) / f"{step}.pickle", synthetic.growing(step))) for step in (1, 2, 3)
            ]
            yield Line("made-up snapshots", f"{len(growing(found))} stacks grow", bool(growing(found)))
            return
        yield from _check_record(Path(folder))


def _check_record(folder: Path) -> Iterator[Line]:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    loop, kept, found = Loop("cuda", **toy("cuda")), list[torch.Tensor](), list[AllocatorSnapshot]()
    for part in range(3):
        for _ in range(STEPS):
            loop.step()
            kept.append(torch.zeros(MEGABYTES << 18, device="cuda"))  # the line that leaks
        settle("cuda")
        path = folder / f"{part}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        own = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        found.append(read(path))
    (gpu,) = occupancies(found[-1])
    yield equal("reserved and allocated, beside torch's own", (gpu.reserved, gpu.live), own)
    yield Line("fragmentation", f"{gpu.fragmentation:.1%}, {gpu.segments} segments")
    largest = holders(found[-1])[0]
    yield Line("the largest holder", largest.place, "snapshots.py" in largest.place, "its line")
    grown = growing(found)
    said = f"{grown[0].place}: {grown[0].bytes}" if grown else "nothing"
    yield Line("what grows", said, bool(grown) and "snapshots.py" in grown[0].place, "its line")
