"""Explain lasting trouble: a climbing loss, optimizer moments out of line, clipping at every step."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import msgspec

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import ALL_STEPS, SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.text import join_names

_RISE = 1.5
"""Factor of a rise of the rate that may be a cause."""
_BEFORE = 300
"""Steps before the climb in which a rise of the rate counts."""
_JUMP = 3.0
"""Factor of the rate from one sample to the next that no warm-up reaches after its first steps."""
_JUST_BEFORE = 20
"""Steps in which an update at such a rate shows. In a fast loop rates are sampled at every 64th step."""
_HUGE = 20.0
"""A gradient norm over the usual norm. Adam's second moment keeps its square for hundreds of steps."""
_LEAST = 50
"""Norms that are needed for a usual norm."""
_BETWEEN = 1024
"""Steps before the alert that may hold the huge gradient: updates are sampled at every 256th step or more rarely."""
_GROWN = 100.0
"""Growth of the second moments after which updates are a tenth of their former size: Adam divides by the root."""
_OUT_OF_LINE = 3.0
_MOMENTS = "optimizer.state_dict() of this run and of a checkpoint from before, exp_avg_sq by layer"


@explains("Divergence")
def divergence(evidence: Evidence) -> Finding:
    """Find since when, the rate by then, and how many gradients were clipped."""
    loss, gradient = evidence.sign("loss"), evidence.sign("grad_norm")
    since = loss.seq if loss is not None else evidence.since
    rates = [(seq, rate) for seq, rate in evidence.series("learning_rate") if since - _BEFORE <= seq <= since]
    facts, told = _course(evidence, since), evidence.step(since)
    if (jump := rate_jump(evidence, since)) is not None:
        return finding(evidence.alert, "rate-jumped", facts, since=told, **jump)
    if rates:
        low, (at, high) = min(rate for _, rate in rates), max(rates, key=lambda found: found[1])
        if low > 0 and high > _RISE * low and at >= rates[-1][0] - 50:
            return finding(evidence.alert, "rate-rose", facts, low=low, high=high, at=evidence.step(at), since=told)
    if (outlier := huge_gradient(evidence, since)) is not None:
        return finding(evidence.alert, "moments", facts, since=told, **outlier)
    jumped = loss is not None and loss.value > 1.2 * abs(loss.usual) and (gradient is None or gradient.seq >= loss.seq)
    if loss is not None and jumped and _stays(evidence, loss.seq, loss.usual):
        return finding(evidence.alert, "data-changed", facts, since=told, usual=loss.usual, value=loss.value)
    missing = ("the update norm at every step", "whether the data changed", "a run at a lower rate")
    return report_unknown(*missing, command=SAMPLE_MORE, evidence=facts)


@explains("LearningRateJump")
def learning_rate_jump(evidence: Evidence) -> Finding:
    """Find the rates before and after the jump, and its step."""
    jump = rate_jump(evidence, evidence.since + 1)
    if jump is None:
        return report_unknown("the rate before it: those steps are not in memory any more", command=ALL_STEPS)
    return finding(evidence.alert, "jumped", **jump)


@explains("OptimizerStateCorrupt")
def optimizer_state(evidence: Evidence) -> Finding:
    """Look for a huge gradient before it, and for the layers whose updates differ most."""
    sizes = [(seq, r / rate) for seq, r in evidence.series("update_ratio") if (rate := _rate(evidence, seq)) > 0]
    now = [size for seq, size in sizes if seq >= evidence.since] or [size for _, size in sizes[-3:]]
    past = [size for seq, size in sizes if seq < evidence.since][-20:]
    if not past or not now or statistics.median(past) <= 0:
        filled = _filled_moments(evidence)
        if filled is not None:  # the samples before it are no longer in memory
            return finding(evidence.alert, "filled-moments", effect="", **filled)
        return report_unknown("the size of updates before it", command=SAMPLE_MORE)
    quoted = evidence.quote("size", "base")
    size, base = quoted if quoted and quoted[1] > 0 else (statistics.median(now), statistics.median(past))
    ratio = size / base
    layers = _odd_layers(evidence, ratio)
    told = f", most of all in {join_names(layers, 3)}" if layers else ""
    outlier = huge_gradient(evidence, evidence.until + 1)
    if ratio < 1 and outlier is not None:
        made = finding(evidence.alert, "huge-gradient", ratio=ratio, layers=told, **outlier)
        return msgspec.structs.replace(made, since=outlier["at"])  # the alert comes with the next sample of updates
    if ratio < 1 and (filled := _filled_moments(evidence)) is not None:
        effect = f", and updates are {ratio:.2g} times what they were{told}"
        return finding(evidence.alert, "filled-moments", effect=effect, **filled)
    has_moments = "Adam" in str(evidence.facts.get("optimizer", "")) or bool(evidence.series("second_moment_growth"))
    if ratio > 1 and outlier is None and has_moments and evidence.usual("grad_norm") is not None:
        return finding(evidence.alert, "lost-moments", ratio=ratio, layers=told)
    facts = (f"updates are {ratio:.3g} times what they were, for the rate",)
    return report_unknown("the optimizer's second moments, by layer", command=_MOMENTS, evidence=facts)


def _filled_moments(evidence: Evidence) -> dict[str, Any] | None:
    """Return the sample at which the second moments grew most, at least a hundredfold, as numbers for the words; else
    None."""
    samples = evidence.series("second_moment_growth")[-4:]
    at, growth = max(samples, key=lambda sample: sample[1], default=(0, 0.0))
    if growth < _GROWN:
        return None
    before = [seq for seq, _ in samples if seq < at]
    when = f"by step {evidence.step(at)}"
    if before:
        when = f"between steps {evidence.step(before[-1])} and {evidence.step(at)}"
    return {
        "growth": growth, "when": when, "at": evidence.step(at), "optimizer": str(evidence.facts.get("optimizer", "")),
    }  # fmt: skip


@explains("OptimizerStateLost")
def lost_state(evidence: Evidence) -> Finding:
    """Find the two samples between which something wrote into the state."""
    before = [seq for seq, _ in evidence.series("second_moment_kept") if seq < evidence.since]
    when = f"between steps {evidence.step(before[-1])} and {evidence.step(evidence.since)}" if before else (
        f"before step {evidence.step(evidence.since)}"
    )  # fmt: skip
    return finding(evidence.alert, "overwritten", when=when)


def rate_jump(evidence: Evidence, before: int) -> dict[str, Any] | None:
    """Return a rise of the rate right before a step's update, as numbers for the words; None: there is none. Where the
    rate is sampled rarely and the step lies between two samples, the rise may have come after the step; it is taken as
    the cause, too."""
    for (last, low), (seq, high) in reversed(list(itertools.pairwise(evidence.series("learning_rate")))):
        if seq < before - _JUST_BEFORE:
            break
        if last < before - 1 and (seq < before or seq - last > 1) and high > _JUMP * low > 0:
            when = f"at step {evidence.step(seq)}" if seq == last + 1 else (
                f"between steps {evidence.step(last)} and {evidence.step(seq)}"
            )  # fmt: skip
            return {"low": low, "high": high, "when": when, "back": evidence.step(last)}
    return None


def huge_gradient(evidence: Evidence, before: int, within: int = _BETWEEN) -> dict[str, Any] | None:
    """Return the largest gradient of so many steps before a step, as numbers for the words, if it is so large that
    Adam's moments still have it; else None."""
    optimizer = str(evidence.facts.get("optimizer", ""))
    norms = [(seq, norm) for seq, norm in evidence.series("grad_norm") if seq < before and math.isfinite(norm)]
    limit = evidence.latest("clip_limit")
    if "Adam" not in optimizer or len(norms) < _LEAST:
        return None
    if limit is not None:
        norms = [(seq, min(norm, limit)) for seq, norm in norms]
    usual = statistics.median(norm for _, norm in norms)
    near = [found for found in norms if found[0] > before - within]
    at, norm = max(near, key=lambda found: found[1], default=(0, 0.0))
    if usual <= 0 or norm < _HUGE * usual:
        return None
    known: dict[str, Any] = {"norm": norm, "at": evidence.step(at), "times": norm / usual, "usual": usual}
    return known | {"optimizer": optimizer}


@explains("AlwaysClipping")
def always_clipping(evidence: Evidence) -> Finding:
    """Find how many gradients were clipped, and the usual norm."""
    limit = evidence.latest("clip_limit")
    norms = [norm for _, norm in evidence.series("grad_norm")[-200:] if math.isfinite(norm)]
    if limit is None or not norms:
        return report_unknown("the norms before clipping", command=SAMPLE_MORE)
    if (loss := evidence.sign("loss")) is not None:  # such norms do not tell which limit a healthy run needs
        return finding(evidence.alert, "loss-left", since=evidence.step(loss.seq), value=loss.value, usual=loss.usual)
    if (quoted := evidence.quote("clipped")) is None:
        return report_unknown("the numbers that the rule went by", command=ALL_STEPS)
    usual = statistics.median(norms)
    return finding(
        evidence.alert, "under-usual", limit=limit, norm=usual, clipped=quoted[0], factor=limit / usual,
        wanted=2.5 * usual,
    )  # fmt: skip


def _course(evidence: Evidence, since: int) -> tuple[str, ...]:
    rate, steps = evidence.latest("learning_rate"), evidence.until - since + 1
    facts = [f"the loss has been up for {steps} steps, since step {evidence.step(since)}"]
    if rate is not None:
        facts.append(f"the learning rate is {rate:.3g}, {_phase(evidence)}")
    if (limit := evidence.latest("clip_limit")) is not None:
        norms = [norm for seq, norm in evidence.series("grad_norm") if seq >= since]
        facts.append(f"{sum(norm > limit for norm in norms)} of {len(norms)} gradients since then were clipped")
    return tuple(facts)


def _phase(evidence: Evidence) -> str:
    """Return words for the phase of the schedule."""
    rates = evidence.series("learning_rate")
    present = rates[-1][1]
    constant = list(itertools.takewhile(lambda found: found[1] == present, reversed(rates)))
    since = evidence.step(constant[-1][0])
    if len(constant) == len(rates):
        return f"and has been since step {since} at least"
    before = rates[-len(constant) - 1][1]
    if len(constant) > 1:
        return f"and has been since step {since}, after {before:.3g}"
    at, peak = max(rates, key=lambda found: found[1])
    if present == peak:
        return "and still rises: a warm-up"
    course = "falls" if present < before else "rises again"
    return f"and {course} since its peak of {peak:.3g} at step {evidence.step(at)}"


def _stays(evidence: Evidence, since: int, usual: float) -> bool:
    """Return whether at least nine in ten losses since then are above the usual one."""
    losses = [loss for seq, loss in evidence.series("loss") if seq >= since]
    return sum(loss > usual for loss in losses) >= 0.9 * len(losses)


def _rate(evidence: Evidence, seq: int) -> float:
    """Return the rate at a step: in a fast loop it is not sampled at every step."""
    return next((rate for at, rate in reversed(evidence.series("learning_rate")) if at <= seq), 0.0)


def _odd_layers(evidence: Evidence, ratio: float) -> list[str]:
    """Return layers whose updates changed more than those of the whole model, the largest change first."""
    series: dict[str, list[float]] = {}
    for seq, layers in evidence.blocks:
        if seq <= evidence.until and "layer_update_ratio" in layers.stats:
            for name, stats in layers.items():
                series.setdefault(name, []).append(stats["layer_update_ratio"])
    changed = {
        name: values[-1] / usual
        for name, values in series.items()
        if len(values) > 3 and (usual := statistics.median(values[:-3])) > 0
    }
    way = 1 if ratio > 1 else -1
    odd = [name for name, by in changed.items() if by > 0 and by**way > _OUT_OF_LINE]
    return sorted(odd, key=lambda name: -(changed[name] ** way))
