"""What a snapshot says, and what to do."""

from __future__ import annotations

from typing import Any

import msgspec

from sentinel.allocator.occupancy import Occupancy, occupancies
from sentinel.allocator.reading import Snapshot
from sentinel.allocator.stacks import Growth, place

TORN = 0.2
"""Share of the reserved memory in free pieces from which it is a finding: that of the rule Fragmentation."""
_LEAST = 64 * 1024**2
"""Bytes under which nothing is worth a finding."""
_ROUNDED = 0.1
_WAITING = 0.1


class Finding(msgspec.Struct, frozen=True):
    """One thing to know."""

    severity: str
    """`warning` or `info`."""
    what: str
    do: str


def findings(snapshots: list[Snapshot], growth: list[Growth]) -> list[Finding]:
    """Of the last snapshot, and of what grew up to it; the severest first."""
    last = snapshots[-1]
    found = [finding for occupancy in occupancies(last) for finding in _of_device(occupancy, last.settings)]
    found += _failures(last)
    found += _leaks(growth, len(snapshots))
    if not last.recorded:
        found.append(
            Finding(
                "info",
                "no stacks were recorded, so nobody can be named",
                "torch.cuda.memory._record_memory_history(max_entries=100_000) at the start of the script",
            )
        )
    found += _names(last.settings)
    return sorted(found, key=lambda finding: finding.severity, reverse=True)


def _of_device(gpu: Occupancy, settings: dict[str, Any]) -> list[Finding]:
    found = []
    if gpu.fragmentation >= TORN and gpu.pieces >= _LEAST:
        found.append(_fragmentation(gpu, settings))
    if gpu.whole >= max(_LEAST, gpu.reserved / 2):
        found.append(
            Finding(
                "info",
                f"GPU {gpu.device}: {_gb(gpu.whole)} of {_gb(gpu.reserved)} are cached whole: a peak that is over",
                "nothing, unless another process needs it: torch.cuda.empty_cache() once after the peak",
            )
        )
    if gpu.waiting >= max(_LEAST, gpu.reserved * _WAITING):
        found.append(
            Finding(
                "warning",
                f"GPU {gpu.device}: {_gb(gpu.waiting)} are freed but wait for another stream (record_stream)",
                "let the side stream finish before the tensors go; for FSDP1 limit_all_gathers=True, or FSDP2, which "
                "needs no record_stream; in DDP and c10d TORCH_NCCL_AVOID_RECORD_STREAMS=1 before torch 2.8",
            )
        )
    if gpu.rounding >= max(_LEAST, gpu.live * _ROUNDED):
        found.append(
            Finding(
                "info",
                f"GPU {gpu.device}: {_gb(gpu.rounding)} of {_gb(gpu.live)} live were not asked for, but rounded up",
                "if PYTORCH_ALLOC_CONF has roundup_power2_divisions, raise it or leave it out",
            )
        )
    return found


def _fragmentation(gpu: Occupancy, settings: dict[str, Any]) -> Finding:
    what = (
        f"GPU {gpu.device}: {_gb(gpu.pieces)} of {_gb(gpu.reserved)} ({gpu.fragmentation:.0%}) are free in pieces, "
        f"the largest {_gb(gpu.largest_free)}"
    )
    if gpu.expandable or settings.get("expandable_segments"):
        do = "expandable segments are on: pad batches to a few sizes, run the largest batch first"
    else:
        do = (
            "PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts (PYTORCH_CUDA_ALLOC_CONF before "
            "torch 2.9); if it can't be, max_split_size_mb:512 and batches padded to a few sizes"
        )
    return Finding("warning", what, do)


def _failures(snapshot: Snapshot) -> list[Finding]:
    found = []
    gpus = {gpu.device: gpu for gpu in occupancies(snapshot)}
    for failure in snapshot.failures[-3:]:
        where = place(failure.stack)
        gpu = gpus.get(failure.device)
        idle = gpu.pieces + gpu.whole if gpu else 0
        torn = gpu is not None and idle >= failure.size
        what = (
            f"GPU {failure.device}: out of memory: {_gb(failure.size)} were asked for"
            + (f" at {where}" if where else "")
            + f", the driver had {_gb(failure.free)}"
            + (f" and the cache {_gb(idle)}, in pieces of at most {_gb(gpu.largest_free)}" if gpu and torn else "")
        )
        do = (
            "fragmentation, not size: PYTORCH_ALLOC_CONF=expandable_segments:True"
            if torn
            else "it is too much, not torn: see `sentinel plan` for what fits, and the largest stacks below"
        )
        found.append(Finding("warning", what, do))
    return found


def _leaks(growth: list[Growth], snapshots: int) -> list[Finding]:
    found = []
    for grown in growth[:5]:
        gained = grown.bytes[-1] - grown.bytes[0]
        blocks = grown.blocks[-1] - grown.blocks[0]
        severity = "warning" if snapshots > 2 else "info"
        sure = f"over {snapshots} snapshots" if snapshots > 2 else "between two snapshots (take a third to be sure)"
        found.append(
            Finding(
                severity,
                f"{grown.place} holds {_gb(gained)} more in {blocks} more blocks {sure}",
                "find who keeps what is made there: losses.append(loss) keeps its graph (write loss.item()); lists of "
                "outputs, caches without a limit",
            )
        )
    return found


def _names(settings: dict[str, Any]) -> list[Finding]:
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    if not isinstance(conf, str) or "max_split_size_mb" not in conf or "expandable_segments" in conf:
        return []
    return [
        Finding(
            "info",
            "the allocator ran with max_split_size_mb, the older answer to fragmentation",
            "expandable_segments:True does without a size to guess",
        )
    ]


def _gb(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"
