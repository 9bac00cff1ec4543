"""The findings in snapshots of the allocator, and what to do about them."""

from __future__ import annotations

from typing import Any

from sentinel.text import format_bytes
from sentinel.toolkit.advice import Advice, Severity, sort_advice
from sentinel.toolkit.memory.occupancy import Occupancy, occupancies
from sentinel.toolkit.memory.reading import AllocatorSnapshot
from sentinel.toolkit.memory.stacks import Growth, place
from sentinel.toolkit.memory.timeline import TimelineMoment, before, peaks

TORN = 0.2
"""Least share of the reserved memory in free pieces that is a finding: the limit of the rule Fragmentation."""
_LEAST = 64 * 1024**2
"""Least bytes that are worth a finding."""
_ROUNDED = 0.1
_WAITING = 0.1


def findings(snapshots: list[AllocatorSnapshot], growth: list[Growth]) -> list[Advice]:
    """Return the findings in the last snapshot, and on what grew up to it, the most severe first."""
    last = snapshots[-1]
    held = peaks(last)
    found = [
        finding
        for occupancy in occupancies(last)
        for finding in _of_device(occupancy, held.get(occupancy.device), last.settings)
    ]
    found += _failures(last)
    found += _leaks(growth, len(snapshots))
    if not last.recorded:
        found.append(
            Advice(
                "info",
                "no stacks were recorded, so no code can be named",
                "torch.cuda.memory._record_memory_history(max_entries=100_000) at the start of the script",
            )
        )
    found += _names(last.settings)
    return sort_advice(found)


def _of_device(gpu: Occupancy, peak: TimelineMoment | None, settings: dict[str, Any]) -> list[Advice]:
    found = []
    if (decides := peak or gpu).fragmentation >= TORN and decides.pieces >= _LEAST:
        found.append(_fragmentation(gpu, peak, settings))
    elif peak is not None and gpu.fragmentation >= TORN and gpu.pieces >= _LEAST:
        found.append(
            Advice(
                "info",
                f"GPU {gpu.device}: {format_bytes(gpu.pieces)} ({gpu.fragmentation:.0%}) are free in pieces "
                "now, but at the "
                f"peak {format_bytes(peak.live)} of {format_bytes(peak.reserved)} "
                f"({peak.live / max(peak.reserved, 1):.0%}) were in use",
                "nothing: what is free now is what the peak needs; less memory at the peak is in the largest stacks",
            )
        )
    if gpu.whole >= max(_LEAST, gpu.reserved / 2):
        found.append(
            Advice(
                "info",
                f"GPU {gpu.device}: {format_bytes(gpu.whole)} of {format_bytes(gpu.reserved)} are cached whole: "
                "a peak that is over",
                "nothing, unless another process needs it: torch.cuda.empty_cache() once after the peak",
            )
        )
    if gpu.waiting >= max(_LEAST, gpu.reserved * _WAITING):
        found.append(
            Advice(
                "warning",
                f"GPU {gpu.device}: {format_bytes(gpu.waiting)} are freed but wait for another stream (record_stream)",
                "let the side stream finish before the tensors go; for FSDP1 limit_all_gathers=True, or FSDP2, which "
                "needs no record_stream; in DDP and c10d TORCH_NCCL_AVOID_RECORD_STREAMS=1 before torch 2.8",
            )
        )
    if gpu.rounding >= max(_LEAST, gpu.live * _ROUNDED):
        found.append(
            Advice(
                "info",
                f"GPU {gpu.device}: {format_bytes(gpu.rounding)} of {format_bytes(gpu.live)} live were not "
                "asked for, but rounded up",
                "if PYTORCH_ALLOC_CONF has roundup_power2_divisions, raise it or leave it out",
            )
        )
    return found


def _fragmentation(gpu: Occupancy, peak: TimelineMoment | None, settings: dict[str, Any]) -> Advice:
    then = peak or gpu
    when = "at the peak" if peak is not None else "at the moment of the snapshot, which has no history of its peak,"
    what = (
        f"GPU {gpu.device}: {when} {format_bytes(then.pieces)} of {format_bytes(then.reserved)} "
        f"({then.fragmentation:.0%}) are free in "
        f"pieces, the largest {format_bytes(then.largest_free)}"
    )
    if gpu.expandable or settings.get("expandable_segments"):
        do = "expandable segments are on: pad batches to a few sizes, run the largest batch first"
    else:
        do = (
            "PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts (PYTORCH_CUDA_ALLOC_CONF before "
            "torch 2.10); if it can't be, max_split_size_mb:512 and batches padded to a few sizes"
        )
    return Advice("warning", what, do)


def _failures(snapshot: AllocatorSnapshot) -> list[Advice]:
    found = []
    for failure in snapshot.failures[-3:]:
        where = place(failure.stack)
        then = before(snapshot, failure.device, failure.entry)
        idle = then.pieces + then.whole if then is not None else 0
        torn = then is not None and idle >= failure.size
        what = (
            f"GPU {failure.device}: out of memory: {format_bytes(failure.size)} were asked for"
            + (f" at {where}" if where else "")
            + f", the driver had {format_bytes(failure.free)}"
            + (
                f" and the cache {format_bytes(idle)}, in pieces of at most {format_bytes(then.largest_free)}"
                if then and torn
                else ""
            )
        )
        do = (
            "fragmentation, not size: PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before "
            "torch 2.10)"
            if torn
            else "it is too much, not torn: see `sentinel plan` for what fits, and the largest holders"
        )
        found.append(Advice("warning", what, do))
    return found


def _leaks(growth: list[Growth], snapshots: int) -> list[Advice]:
    found = []
    for grown in growth[:5]:
        gained = grown.bytes[-1] - grown.bytes[0]
        blocks = grown.blocks[-1] - grown.blocks[0]
        severity: Severity = "warning" if snapshots > 2 else "info"
        sure = f"over {snapshots} snapshots" if snapshots > 2 else "between two snapshots (take a third to be sure)"
        found.append(
            Advice(
                severity,
                f"{grown.place} holds {format_bytes(gained)} more in {blocks} more blocks {sure}",
                "find who keeps what is made there: losses.append(loss) keeps its graph (write loss.item()); lists of "
                "outputs, caches without a limit",
            )
        )
    return found


def _names(settings: dict[str, Any]) -> list[Advice]:
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    if not isinstance(conf, str) or "max_split_size_mb" not in conf or "expandable_segments" in conf:
        return []
    return [
        Advice(
            "info",
            "the allocator ran with max_split_size_mb, the older answer to fragmentation",
            "expandable_segments:True does without a size to guess",
        )
    ]
