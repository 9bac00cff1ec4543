"""Memory that is not given back: how much a step, since when, and how long until there is none."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding
from sentinel.diagnose.holders import held

_WINDOW = 180
"""Samples over which MemoryCreep judges."""
_LEAST = 16
"""Samples for a line. The rule has seen 180; where they are far apart, fewer of them are still in memory."""
_PAIRS = 128
"""Low-water marks that the slope is made of, at most: their pairs are all looked at."""

_KEPT = (
    "find what is kept from step to step: losses.append(loss) keeps the graph of each loss, and "
    "total = total + loss all of them in a chain (write loss.item()); lists of outputs, caches without a limit"
)


def creep(evidence: Evidence) -> Finding:
    """Bytes a step (Theil-Sen over the window's samples), and when the limit is reached."""
    rank = evidence.ranks[0] if evidence.ranks else None
    rises = [
        (name, limit, rise)
        for signal, name, limit in (
            ("memory_allocated_bytes", "device memory in live tensors", "device_memory_bytes"),
            ("rss_bytes", "the resident set", "memory_limit_bytes"),
        )
        if (rise := _Rise.of(evidence.series(signal, rank)[-_WINDOW:])) is not None
    ]
    if not rises:
        return held(evidence, Finding("memory rises and does not fall back", "medium", _KEPT, (_HOLDER,)), None)
    name, limit, rise = max(rises, key=lambda found: found[2].share)
    whose = f"rank {rank}: " if rank and rank > 0 else ""
    fact = (
        f"{whose}{name} was {readable(rise.low)} at step {evidence.step(rise.first)} and never under "
        f"{readable(rise.high)} in the last {rise.stretch} samples up to step {evidence.step(rise.last)}"
    )
    until = _until_full(evidence, rise, evidence.facts.get(limit))
    found = Finding(
        f"something keeps what each step makes: {name} grows by {readable(rise.bytes_per_step)} a step{until}",
        "medium",
        _KEPT,
        (_HOLDER,),
        (fact,),
    )
    return held(evidence, found, rise.bytes_per_step)


_HOLDER = (
    "who holds it: take collections.Counter(type(o).__name__ for o in gc.get_objects()) twice, 100 steps apart, and "
    "look at what grew; on CUDA also torch.cuda.memory._dump_snapshot()"
)


class _Rise:
    """A robust line through samples of memory."""

    def __init__(self, samples: Sequence[tuple[int, float]]) -> None:
        values = [value for _, value in samples]
        self.first, self.last = samples[0][0], samples[-1][0]
        self.stretch = len(values) // 4
        self.low, self.high = min(values[: self.stretch]), min(values[-self.stretch :])
        thinned = samples[:: max(1, len(samples) // _PAIRS)]
        pairs = itertools.combinations(thinned, 2)
        self.bytes_per_step = statistics.median((b - a) / (n - m) for (m, a), (n, b) in pairs)
        self.newest = values[-1]

    @property
    def share(self) -> float:
        """Of the rise in what there was."""
        return (self.high - self.low) / max(self.low, 1.0)

    @classmethod
    def of(cls, samples: Sequence[tuple[int, float]]) -> _Rise | None:
        """None where there are too few, or where it does not rise."""
        rise = cls(samples) if len(samples) >= _LEAST else None
        return rise if rise is not None and rise.bytes_per_step > 0 and rise.high > rise.low else None


def _until_full(evidence: Evidence, rise: _Rise, limit: object) -> str:
    if not isinstance(limit, int | float) or limit <= rise.newest:
        return ""
    steps = (limit - rise.newest) / rise.bytes_per_step
    times = [step.run["step_seconds"] for step in evidence.steps if "step_seconds" in step.run][-_WINDOW:]
    when = f", {_duration(steps * statistics.median(times))}" if times else ""
    return f"; at this rate {readable(limit)} are full in {_count(steps)} steps{when}"


def fragmentation(evidence: Evidence) -> Finding:
    """How much lies idle in pieces, and whether it already cost cache flushes."""
    values = next((step.run for step in reversed(evidence.steps) if "memory_reserved_bytes" in step.run), {})
    reserved, allocated = values.get("memory_reserved_bytes", 0.0), values.get("memory_allocated_bytes", 0.0)
    idle, retries = values.get("memory_inactive_split_bytes", 0.0), evidence.series("allocation_retries")[-50:]
    flushed = retries[-1][1] - retries[0][1] if retries else 0.0
    facts = [
        f"reserved {readable(reserved)}, of which {readable(allocated)} in live tensors after the step and "
        f"{readable(idle)} in free pieces of split blocks ({idle / reserved:.0%})" if reserved else "",
        f"{flushed:.0f} cache flushes (failed cudaMalloc) in the last {len(retries)} samples" if flushed else "",
    ]  # fmt: skip
    return Finding(
        "the caching allocator's free memory lies in pieces that fit no request: sizes change from step to step",
        "high" if flushed else "medium",
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts (PYTORCH_CUDA_ALLOC_CONF before "
        "torch 2.9); pad batches to a few sizes; run the largest batch first",
        ("the sizes that were asked for: torch.cuda.memory._record_memory_history()",),
        tuple(fact for fact in facts if fact),
    )


def pressure(evidence: Evidence) -> Finding:
    """The batch of that step against the others, and which one would fill the device."""
    rank = evidence.ranks[0] if evidence.ranks else None
    sizes = evidence.series("batch_elements", rank)
    near = [(seq, size) for seq, size in sizes if evidence.since - _NEAR <= seq <= evidence.since]
    if len(sizes) < _LEAST or not near:
        return Finding(NOT_KNOWN, "none", missing=("the shape of that batch: batches are looked at now and then",))
    at, elements = max(near, key=lambda found: found[1])
    usual = statistics.median(size for _, size in sizes)
    if elements < _LONGER * usual:
        missing = ("what else took the memory: fragmentation, another process, an evaluation",)
        fact = (f"the batch had {elements:.0f} elements, the median is {usual:.0f}: it was none of the larger ones",)
        return Finding(NOT_KNOWN, "none", "", missing, fact)
    lengths = dict(evidence.series("batch_length", rank))
    length = f", of length {lengths[at]:.0f}," if at in lengths else ""
    sampled = [seq for seq, _ in evidence.series("memory_reserved_bytes", rank) if seq < evidence.since]
    first = max(sampled, default=evidence.since - 1) + 1
    unseen = [seq for seq in range(first, evidence.since + 1) if seq not in dict(sizes)]
    found = finding(
        evidence.alert, "long-batch", elements=elements, length=length, step=evidence.step(at), times=elements / usual,
        predicted=_largest_batch(evidence, rank, sizes),
    )  # fmt: skip
    if not unseen:
        return found
    missing = (f"the batches of {len(unseen)} of the steps in which it happened: they were not looked at",)
    return msgspec.structs.replace(found, confidence="low", missing=(*found.missing, *missing))


_NEAR = 8
"""Steps before the alert in which the batch is looked for: memory is sampled at every 8th."""
_LONGER = 1.2


def _largest_batch(evidence: Evidence, rank: int | None, sizes: Sequence[tuple[int, float]]) -> str:
    """By a line through (largest batch so far, peak so far)."""
    limit, points = evidence.facts.get("device_memory_bytes"), list[tuple[float, float]]()
    for seq, peak in evidence.series("memory_peak_bytes", rank):
        points.append((max((size for at, size in sizes if at <= seq), default=0.0), peak))
    (first, low), (last, high) = (points[0], points[-1]) if points else ((0.0, 0.0), (0.0, 0.0))
    if last <= first or high <= low:
        return ""
    each = (high - low) / (last - first)
    text = f"; the peak grows by {readable(each)} an element, to {readable(high)}"
    if not isinstance(limit, int | float) or limit <= low:
        return text
    return f"{text}: about {first + (limit - low) / each:.0f} elements fill the device's {readable(limit)}"


def readable(size: float) -> str:
    """Bytes, in words."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


def _count(number: float) -> str:
    digits = max(0, len(str(int(number))) - 2)  # two digits: it is an estimate
    return f"{round(number, -digits):,.0f}"


def _duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
