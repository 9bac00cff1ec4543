"""Explain memory that is not given back: how much per step, since when, and how long until none is left."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.diagnose.holders import add_holders
from sentinel.engine.windows.steady import Steady, count_steady_samples
from sentinel.runs.steps import RunStep
from sentinel.text import format_bytes

_WINDOW = 192
"""Newest samples that are used where no straight rise is left among those in memory."""
_LEAST = 12
"""Samples that are needed for a line."""
_OTHERS = 1.5
"""Factor of a process's own rise from which on what is left falls because of others, too: ranks with the same leak."""
_PAIRS = 128
"""Low-water marks that the slope is made of, at most: all their pairs are used."""

_KEPT = (
    "find what is kept from step to step: losses.append(loss) keeps the graph of each loss, and "
    "total = total + loss all of them in a chain (write loss.item()); lists of outputs, caches without a limit"
)


class _Source(NamedTuple):
    """A kind of memory that may run out."""

    signals: tuple[str, ...]
    """Signals of its use; the first that has samples is taken."""
    name: str
    left: str
    """Signal of what is left of it."""
    limit: str
    """Name of the fact with its total, which is used where no signal says what is left."""
    limited_by: str
    """Name of the fact with what sets the limit."""


_SOURCES = (
    _Source(("memory_allocated_bytes",), "device memory in live tensors", "device_memory_left_bytes",
            "device_memory_bytes", "device"),
    _Source(("memory_held_bytes", "rss_bytes"), "the resident set", "memory_left_bytes",
            "memory_limit_bytes", "memory_limited_by"),
)  # fmt: skip


@explains("MemoryCreep")
def creep(evidence: Evidence) -> Finding:
    """Measure bytes per step (Theil-Sen over the samples of the rise), and when none are left."""
    rank = evidence.ranks[0] if evidence.ranks else None
    rises = [
        (source, rise)
        for source in _SOURCES
        if (rise := _Rise.measure_rise(_first_series(evidence, source.signals, rank))) is not None
    ]
    if not rises:
        return add_holders(evidence, Finding("memory rises and does not fall back", "medium", _KEPT, (_HOLDER,)), None)
    source, rise = max(rises, key=lambda found: found[1].share)
    name = source.name
    fact = (
        f"{_name_rank(rank)}{name} was {format_bytes(rise.low)} at step {evidence.step(rise.first)} and never under "
        f"{format_bytes(rise.high)} in the last {rise.stretch} samples up to step {evidence.step(rise.last)}"
    )
    until = _until_full(evidence, rise, source, rank)
    found = Finding(
        f"something keeps what each step makes: {name} grows by {format_bytes(rise.bytes_per_step)} a step{until}",
        "medium",
        _KEPT,
        (_HOLDER,),
        (fact,),
        since=evidence.step(_find_beginning(_first_series(evidence, source.signals, rank), rise)),
    )
    return add_holders(evidence, found, rise.bytes_per_step)


_UNJUDGED = 2e8
"""Bytes of a rise up to the run's end that are not mentioned: a healthy run's rise is less, or levels out. Our
judgement."""


def measure_unjudged_rise(steps: Sequence[RunStep], problems: Collection[str]) -> float:
    """Return the bytes by which host memory rose in a straight line up to the last of a run's `steps`, over at least
    half of them: a shorter rise may be one tooth of many. 0 where that is little, where one of the run's `problems` is
    memory, or where a buffer fills (reinforcement learning)."""
    rise, length = Steady("rise"), Steady("steps")
    found = 0.0
    for step in steps:
        if "memory_held_bytes" in step.run:
            held = step.run["memory_held_bytes"]
            risen, risen_for = rise.push(step.seq, held) or 0.0, length.push(step.seq, held) or 0.0
            found = risen if 2 * risen_for >= step.seq - steps[0].seq else 0.0
    told = "memory" in problems or any("reinforcement_learning" in step.run for step in steps)
    return found if found > _UNJUDGED and not told else 0.0


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
        self.bytes_per_step = _measure_slope(samples)
        self.newest = values[-1]

    @property
    def share(self) -> float:
        """The rise as a share of the memory at its start."""
        return (self.high - self.low) / max(self.low, 1.0)

    @classmethod
    def measure_rise(cls, samples: Sequence[tuple[int, float]]) -> _Rise | None:
        """Return the rise of the newest samples that rise in a line. None where there are too few, or where they do not
        rise."""
        samples = samples[-(count_steady_samples(value for _, value in samples) or _WINDOW) :]
        rise = cls(samples) if len(samples) >= _LEAST else None
        return rise if rise is not None and rise.bytes_per_step > 0 and rise.high > rise.low else None


def _measure_slope(samples: Sequence[tuple[int, float]]) -> float:
    """Return the median slope of pairs of samples (Theil-Sen), per step."""
    pairs = itertools.combinations(samples[:: max(1, len(samples) // _PAIRS)], 2)
    return statistics.median((b - a) / (n - m) for (m, a), (n, b) in pairs)


def _name_rank(rank: int | None) -> str:
    return f"rank {rank}: " if rank else ""


def _find_beginning(samples: Sequence[tuple[int, float]], rise: _Rise) -> int:
    """Return the step at which a level became the rise: among the samples of the rise and as many before it, the one
    with the least absolute deviations from the level. A rise longer than what is in memory begins with the oldest
    sample there."""
    looked_at = samples[-8 * rise.stretch :]
    thinned = looked_at[:: max(1, len(looked_at) // _PAIRS)]
    return min((seq for seq, _ in thinned), key=lambda seq: _measure_misfit(thinned, seq, rise.bytes_per_step))


def _measure_misfit(samples: Sequence[tuple[int, float]], begin: int, bytes_per_step: float) -> float:
    """Return the misfit of a level that rises by `bytes_per_step` from step `begin` on."""
    levels = [value - bytes_per_step * max(seq - begin, 0) for seq, value in samples]
    usual = statistics.median(levels)
    return sum(abs(level - usual) for level in levels)


def _first_series(evidence: Evidence, signals: Sequence[str], rank: int | None) -> list[tuple[int, float]]:
    return next((series for signal in signals if (series := evidence.series(signal, rank))), [])


def _until_full(evidence: Evidence, rise: _Rise, source: _Source, rank: int | None) -> str:
    """Return words for when none is left. Others take of it, too, so its own fall counts where that is faster."""
    left, limit = evidence.series(source.left, rank), evidence.facts.get(source.limit)
    if left:
        by = evidence.facts.get(source.limited_by)
        during = [sample for sample in left if sample[0] >= rise.first]
        taken = max(rise.bytes_per_step, -_measure_slope(during) if len(during) >= _LEAST else 0.0)
        alone = taken <= _OTHERS * rise.bytes_per_step
        others = "" if alone else f", of which all together take {format_bytes(taken)} a step,"
        there = f"the {format_bytes(left[-1][1])} that are left{f' ({by})' if by else ''}{others} are gone"
        steps = left[-1][1] / taken
    elif isinstance(limit, int | float) and limit > rise.newest:
        there, steps = f"{format_bytes(limit)} are full", (limit - rise.newest) / rise.bytes_per_step
    else:
        return ""
    times = [step.run["step_seconds"] for step in evidence.steps if "step_seconds" in step.run][-_WINDOW:]
    when = f", {_duration(steps * statistics.median(times))}" if times else ""
    return f", and {there} in {_count(steps)} steps{when}"


@explains("Fragmentation")
def fragmentation(evidence: Evidence) -> Finding:
    """Quote how much lies idle in pieces, and whether it already cost cache flushes."""
    rank = evidence.ranks[0] if evidence.ranks else None  # the run's figures are each of another rank
    names = ("memory_reserved_bytes", "memory_allocated_bytes", "memory_inactive_split_bytes")
    reserved, allocated, idle = (evidence.latest(name, rank) or 0.0 for name in names)
    retries = evidence.series("allocation_retries", rank)[-50:]
    flushed = retries[-1][1] - retries[0][1] if retries else 0.0
    facts = [
        f"{_name_rank(rank)}reserved {format_bytes(reserved)}, of which {format_bytes(allocated)} in live tensors "
        f"after the step and {format_bytes(idle)} in free pieces of split blocks ({idle / reserved:.0%})"
        if reserved else "",
        f"{flushed:.0f} cache flushes (failed cudaMalloc) in the last {len(retries)} samples" if flushed else "",
    ]  # fmt: skip
    return Finding(
        "the caching allocator's free memory lies in pieces that fit no request: sizes change from step to step",
        "high" if flushed else "medium",
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts (PYTORCH_CUDA_ALLOC_CONF before "
        "torch 2.10); pad batches to a few sizes; run the largest batch first",
        ("the sizes that were asked for: torch.cuda.memory._record_memory_history()",),
        tuple(fact for fact in facts if fact),
    )


@explains("MemoryPressure")
def pressure(evidence: Evidence) -> Finding:
    """Compare the batch of that step with the others, and predict which one would fill the device."""
    rank = evidence.ranks[0] if evidence.ranks else None
    sizes = evidence.series("batch_elements", rank)
    near = [(seq, size) for seq, size in sizes if evidence.since - _NEAR <= seq <= evidence.since]
    if len(sizes) < _LEAST or not near:
        return report_unknown(
            "the shape of that batch: batches are looked at now and then",
            command="monitor.log(batch_elements=inputs.numel()) at each step",
        )
    at, elements = max(near, key=lambda found: found[1])
    usual = statistics.median(size for _, size in sizes)
    if elements < _LONGER * usual:
        missing = ("what else took the memory: fragmentation, another process, an evaluation",)
        fact = (f"the batch had {elements:.0f} elements, the median is {usual:.0f}: it was none of the larger ones",)
        return report_unknown(*missing, command="torch.cuda.memory._snapshot() there, and nvidia-smi", evidence=fact)
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
"""Steps before the alert in which the batch is searched for: memory is sampled at every 8th."""
_LONGER = 1.2


def _largest_batch(evidence: Evidence, rank: int | None, sizes: Sequence[tuple[int, float]]) -> str:
    """Predict by a line through (largest batch so far, peak so far)."""
    limit, points = evidence.facts.get("device_memory_bytes"), list[tuple[float, float]]()
    for seq, peak in evidence.series("memory_peak_bytes", rank):
        points.append((max((size for at, size in sizes if at <= seq), default=0.0), peak))
    (first, low), (last, high) = (points[0], points[-1]) if points else ((0.0, 0.0), (0.0, 0.0))
    if last <= first or high <= low:
        return ""
    each = (high - low) / (last - first)
    text = f"; the peak grows by {format_bytes(each)} an element, to {format_bytes(high)}"
    if not isinstance(limit, int | float) or limit <= low:
        return text
    return f"{text}: about {first + (limit - low) / each:.0f} elements fill the device's {format_bytes(limit)}"


def _count(number: float) -> str:
    digits = max(0, len(str(int(number))) - 2)  # two digits, as it is an estimate
    return f"{round(number, -digits):,.0f}"


def _duration(seconds: float) -> str:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
