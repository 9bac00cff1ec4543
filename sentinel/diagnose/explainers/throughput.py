"""Explain where the time of a step goes."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import ALL_STEPS, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains

_PARTS = {
    "data_seconds": ("waiting for data", "see InputBound: workers, storage, what is decoded for each sample"),
    "forward_seconds": (
        "the forward pass",
        "look for longer batches, a recompilation, a branch that was not taken before",
    ),
    "backward_seconds": (
        "the backward pass",
        "with several ranks it waits for the slowest one: see Straggler; alone, look for longer batches",
    ),
    "optimizer_seconds": ("the optimizer", "look for state that moved to the host, and for swapping (HostMemoryLow)"),
    "other_seconds": (
        "the loop's own code between the passes",
        "look for logging, .item(), evaluation, checkpoints or a list that grows, in what was added there",
    ),
}
"""Signal -> the part in words -> what to do."""
_MOST = 0.6
"""Share of the growth from which on one part is the cause."""
_MOSTLY = 0.5
"""Share of a step from which on a part is its main part: all other parts together are less."""
_FULL = 0.9
"""Share of all CPUs in use from which on more workers do not help."""
_COMPUTED = ("forward_seconds", "backward_seconds", "optimizer_seconds")
"""Parts that all take somewhat longer where other programs use the processors."""
_CONTENDED = 1.5
"""Processes and threads that want to run, per CPU, from which on steps wait for one. Our judgement."""
_TOLD = 0.1
"""Share of a step's added time that may be in none of its parts without being mentioned."""
_NOW, _BASE = 50, 200
"""Steps that SlowStep's two medians cover: 10 and 40 samples, of every 5th step."""
_RECENT = 10
_RETURNED = 2 * _RECENT
"""Surplus of quick steps over slow ones, going back, that ends the search for the change."""
_PROFILE = "torch.profiler.profile(...) over ten steps, and key_averages()"
_SAME_PASS = 1.3
"""Factor up to which a pass that takes longer is the same pass: with more passes the optimizer's share falls."""


@explains("InputBound")
def input_bound(evidence: Evidence) -> Finding:
    """Quote the share, the workers, the CPUs of the host."""
    quoted = evidence.quote("wait", "whole")
    if quoted is None:
        return report_unknown("the times that the rule went by", command=ALL_STEPS)
    wait, step = quoted
    known: dict[str, Any] = {"share": wait / step, "wait": wait * 1e3}
    workers, cpu = evidence.facts.get("loader", {}).get("num_workers"), evidence.devices.host.get("host_cpu_ratio")
    shown = f"CPUs of the host {cpu:.0%} busy" if cpu is not None else "CPUs of the host: not read yet"
    facts = (f"{known['share']:.0%} of the step, {known['wait']:.1f} ms; {_workers(workers)}; {shown}",)
    if workers == 0:
        if cpu is not None and cpu > _FULL:
            return finding(evidence.alert, "no-free-cpu", facts, cpu=cpu, **known)
        return finding(evidence.alert, "no-workers", facts, **known)
    if workers is None or cpu is None:
        missing = ["how many workers the loader has"] if workers is None else []
        missing += ["how busy the host's CPUs are"] if cpu is None else []
        command = "attach(loader=...)" if workers is None else "sentinel incidents show, some seconds later"
        return report_unknown(*missing, command=command, evidence=facts)
    name = "cpus-full" if cpu > _FULL else "storage"
    return finding(evidence.alert, name, facts, workers=workers, cpu=cpu, **known)


@explains("SlowStep")
def slow_step(evidence: Evidence) -> Finding:
    """Find what grew, and since when, which is before the rule's median shows it."""
    change = _change(evidence)
    first = evidence.since if change is None else change
    return msgspec.structs.replace(_explain_growth(evidence, change, first), since=evidence.step(first))


def _explain_growth(evidence: Evidence, change: int | None, first: int) -> Finding:
    """Explain by more backward passes per step than before; else by the part of it that grew, pass by pass."""
    before_it = evidence.since - 5 * _RECENT if change is None else change
    had, has = _passes(evidence.usual("micro_batches", before_it)), _passes(_after(evidence, "micro_batches", change))
    factor = has / had
    if factor > 1 and (found := _explain_accumulation(evidence, before_it, change, had, has)) is not None:
        return found
    grown = {}
    for part in _PARTS:
        if (compared := _compare(evidence, part, change)) is not None:
            before, now = compared
            grown[part] = (before * (1 if part == "optimizer_seconds" else factor), now)
    total = sum(now - before for before, now in grown.values())
    if total <= 0:
        return report_unknown("the parts of the steps before it", command=ALL_STEPS)
    gain = _measure_gain(evidence, factor, total, change)
    facts = tuple(
        f"{_PARTS[part][0]}: {before * 1e3:.1f} to {now * 1e3:.1f} ms" for part, (before, now) in grown.items()
    )
    if factor != 1:
        facts += (f"a step has {has:.3g} backward passes, it had {had:.3g}: the times before are of so many passes",)
    if gain - total > _TOLD * gain:
        facts += (f"{(gain - total) * 1e3:.0f} of the {gain * 1e3:.0f} ms that a step gained are in none of these",)
    known: dict[str, Any] = {"since": evidence.step(first), "gain": gain * 1e3, "host": _host(evidence)}
    part = max(grown, key=lambda part: grown[part][1] - grown[part][0])
    before, now = grown[part]
    explained, load = now - before >= _MOST * gain, _find_load(evidence)
    if load and (part in _COMPUTED or not explained):
        return finding(evidence.alert, "contended", facts, load=load, **known)
    if explained:
        name, advice = _PARTS[part]
        told: dict[str, Any] = {"part": name, "before": before * 1e3, "now": now * 1e3, "advice": advice}
        found = finding(evidence.alert, "part", facts, grew=min(now - before, gain) * 1e3, **told, **known)
        return msgspec.structs.replace(found, problem="input") if part == "data_seconds" else found
    factors = [now / before for before, now in grown.values() if before > 1e-4]
    if len(factors) > 1 and min(factors) > 1.2:
        return finding(evidence.alert, "machine", facts, factor=statistics.median(factors), **known)
    missing = "a profile of the step: several parts grew, and not alike"
    return report_unknown(missing, command=_PROFILE, evidence=facts)


def _compare(evidence: Evidence, signal: str, change: int | None) -> tuple[float, float] | None:
    """Return (median before, median now) of steps outside the opening examination: split at the change, or else by the
    windows of the rule's medians."""
    opening = {seq for seq, value in evidence.series("opening_step") if value}
    series = [(seq, v) for seq, v in evidence.series(signal) if seq not in opening and math.isfinite(v)]
    count = _NOW if change is None else sum(seq >= change for seq, _ in series)
    values = [value for _, value in series]
    before, now = values[:-count][-_BASE:], values[-count:]
    return (statistics.median(before), statistics.median(now)) if before and count else None


def _measure_gain(evidence: Evidence, factor: float, total: float, change: int | None) -> float:
    """Return by how many seconds a step of as many passes takes longer, as in the summary; `total`: the same, summed
    over its parts."""
    quoted = evidence.quote("base", "now") or _compare(evidence, "step_seconds", change)
    gain = quoted[1] - quoted[0] * factor if quoted is not None else total
    return gain if gain > 0 else total


def _find_load(evidence: Evidence) -> float:
    """Return the processes and threads that want to run per CPU, where these are too many and no CPU is idle; else
    0."""
    host = evidence.devices.host
    load = host.get("host_load_ratio", 0.0)
    return load if load >= _CONTENDED and host.get("host_cpu_ratio", 0.0) > _FULL else 0.0


def _change(evidence: Evidence) -> int | None:
    """Return the first of the slow steps: the rule fires only once they are half of its window. None: steps before or
    since have no times."""
    base = evidence.usual("step_seconds", evidence.since - 5 * _RECENT)
    now = evidence.usual("step_seconds", most=_RECENT)
    if base is None or now is None or now <= base:
        return None
    change, score, best = None, 0, 0
    for seq, value in reversed(evidence.series("step_seconds")):  # the split with the most steps on the right side
        score += 1 if value > (base + now) / 2 else -1
        if score > best:
            change, best = seq, score
        elif score <= best - _RETURNED:  # an earlier slow stretch is over, however long it was
            break
    return change


def _after(evidence: Evidence, signal: str, change: int | None) -> float | None:
    """Return the median of the last values, only of those since the change if there is one."""
    values = [value for seq, value in evidence.series(signal) if change is None or seq >= change][-_RECENT:]
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _passes(count: float | None) -> float:
    return count if count is not None and count >= 1 else 1.0


def _explain_accumulation(
    evidence: Evidence, before_it: int, change: int | None, had: float, has: float
) -> Finding | None:
    """Explain by more passes, each of which takes about as long as before; None where that does not hold."""
    step, was = _after(evidence, "step_seconds", change), evidence.usual("step_seconds", before_it)
    if step is None or was is None or step / has > _SAME_PASS * was / had:
        return None
    ranks = evidence.rank_count  # the signal is their sum
    since = evidence.step(evidence.since if change is None else change)
    told: dict[str, Any] = {"since": since, "had": f"{had / ranks:.3g}", "has": f"{has / ranks:.3g}"}
    told |= {"before": was / had * ranks * 1e3, "now": step / has * ranks * 1e3}
    facts = (f"a step took {was * 1e3:.1f} ms, and takes {step * 1e3:.1f} ms",)
    return finding(evidence.alert, "accumulation", facts, **told)


@explains("LowUtilization")
def low_utilization(evidence: Evidence) -> Finding:
    """Decide between input, other ranks and host, as far as host times show."""
    step, quoted = evidence.usual("step_seconds"), evidence.quote("busy")
    if not step or quoted is None:
        return report_unknown("step times and kernel times", command=_PROFILE)
    busy = quoted[0]
    data, backward = evidence.usual("data_seconds") or 0.0, evidence.usual("backward_seconds") or 0.0
    world = evidence.world_size
    facts = (
        f"the GPU is busy for {busy:.0%}; of a step of {step * 1e3:.0f} ms {data * 1e3:.0f} ms are waiting for data",
    )
    if data > 0.2 * step:
        return finding(evidence.alert, "input", facts, share=min(data / step, 1.0))
    if world > 1 and backward > 0.5 * step:
        share = min(backward / step, 1.0)
        return finding(evidence.alert, "communication", facts, share=share, world=world, busy=busy)
    passes = [evidence.usual(name) for name in ("forward_seconds", "backward_seconds", "optimizer_seconds")]
    spent, own = sum(part or 0.0 for part in passes), evidence.usual("other_seconds") or 0.0
    known: dict[str, Any] = {"step": step * 1e3, "busy": busy}
    if own > _MOSTLY * step:
        return finding(evidence.alert, "own-code", facts, share=min(own / step, 1.0), **known)
    if None not in passes and spent > _MOSTLY * step:
        size, ranks = evidence.latest("batch_size"), evidence.rank_count  # the signal is their sum
        batch = f", for a batch of {size / ranks:.0f}{' on each rank' if ranks > 1 else ''}" if size else ""
        return finding(evidence.alert, "small-batch", facts, spent=spent * 1e3, batch=batch, **known)
    missing = "kernel times, which tell a small batch from waits for the host"
    return report_unknown(missing, command=_PROFILE, evidence=facts)


@explains("CommunicationBound")
def communication_bound(evidence: Evidence) -> Finding:
    """Quote the share, the passes per step, the ranks."""
    quoted = evidence.quote("spent", "whole")
    if quoted is None:
        return report_unknown("the times that the rule went by", command=ALL_STEPS)
    spent, step = quoted
    size, count = evidence.facts.get("parameters_trainable", 0), evidence.rank_count
    passes = (evidence.latest("micro_batches") or count) / count  # the signal is of all these ranks together
    known: dict[str, Any] = {"share": spent / step, "spent": spent * 1e3, "world": evidence.world_size}
    return finding(evidence.alert, "reduction", passes=f"{passes:.0f}", parameters=f"{size:,}", **known)


@explains("DataParallelInUse")
def data_parallel(evidence: Evidence) -> Finding:
    """Quote how many devices the wrapper splits batches over."""
    count = evidence.latest("data_parallel_devices")
    devices = f"{count:.0f} devices" if count else "the devices"
    return finding(evidence.alert, "wrapped", devices=devices)


def _workers(workers: object) -> str:
    return f"{workers} worker(s)" if workers is not None else "the loader is not known"


def _host(evidence: Evidence) -> str:
    held = [gpu for gpu in evidence.devices.gpus.values() if any(
        gpu.values.get(f"gpu_throttled_{why}") for why in ("thermal", "hardware"))]  # fmt: skip
    if held:
        return f"; clocks of GPU {', '.join(str(gpu.index) for gpu in held)} are held down"
    cpu = evidence.devices.host.get("host_cpu_ratio")
    return f"; CPUs of the host {cpu:.0%} busy" if cpu is not None and cpu > _FULL else ""
