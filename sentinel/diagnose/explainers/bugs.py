"""Explain silent bugs of the training loop."""

from __future__ import annotations

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import ALL_STEPS, SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.text import join_names


@explains("FrozenParameterChanged")
def frozen_changed(evidence: Evidence) -> Finding:
    """Find which frozen parameter changed, and whether the optimizer has it."""
    rows = [int(row) for _, row in evidence.series("frozen_changed_row") if row >= 0]
    names = [layer.name for layer in evidence.table]
    if not rows or rows[-1] >= len(names):
        return report_unknown(
            "the names of the layers", command="compare p.detach().clone() of what has no requires_grad over a step"
        )
    looks = [seq for seq, _ in evidence.series("frozen_changed")]
    since = f", after step {evidence.step(looks[-2])}" if len(looks) > 1 else ""
    if evidence.series("frozen_changed")[-1][1] > 0:
        why = "it is in the optimizer, which still moves it: momentum, weight decay, or a gradient that was left"
        return Finding(f"{names[rows[-1]]} is frozen and changed{since}; {why}", "medium")
    why = "it is in no optimizer: something else writes into it"
    return Finding(f"{names[rows[-1]]} is frozen and changed{since}; {why}", "medium")


@explains("GradientsNotCleared")
def gradients_not_cleared(evidence: Evidence) -> Finding:
    """Find the step since which gradients are kept."""
    kept = [seq for seq, value in evidence.series("gradients_kept") if value == 1.0]
    if not kept:
        return report_unknown("the gradients before the backward pass", command=SAMPLE_MORE)
    clear = [seq for seq, value in evidence.series("gradients_kept") if value == 0.0]
    since = next(seq for seq in kept if not clear or seq > clear[-1] or clear[-1] > kept[-1])
    return finding(evidence.alert, "no-zero-grad", since=evidence.step(since))


@explains("DuplicateBatches")
def duplicate_batches(evidence: Evidence) -> Finding:
    """Find whether the loader has workers that may give the same batches."""
    workers, quoted = evidence.facts.get("loader", {}).get("num_workers"), evidence.quote("repeated")
    if not workers or quoted is None:
        missing = ["whether the data set holds the same samples several times"]
        command = "len({x.numpy().tobytes() for x, _ in dataset}) against len(dataset)"
        if workers is None:
            missing, command = [*missing, "how many workers the loader has"], "attach(loader=...)"
        return report_unknown(*missing, command=command)
    return finding(evidence.alert, "workers", repeated=quoted[0], workers=workers)


@explains("RepeatedRandomness")
def repeated_randomness(evidence: Evidence) -> Finding:
    """Name the copied generators, and how many workers have a copy."""
    names, workers = evidence.facts.get("copied_generators"), evidence.facts.get("copying_workers")
    if not names:
        return report_unknown("which attribute of the data set it is", command="vars(loader.dataset)")
    return finding(evidence.alert, "copies", names=join_names(names, 3), workers=workers)


@explains("AccumulationNotNormalised")
def accumulation_not_normalised(evidence: Evidence) -> Finding:
    """Count the passes of a step."""
    passes = evidence.latest("unnormalised_passes")
    if not passes:
        return report_unknown("how many passes make a step", command=ALL_STEPS)
    return finding(evidence.alert, "sum", passes=passes)


@explains("LowPrecisionAccumulation")
def low_precision_accumulation(evidence: Evidence) -> Finding:
    """Quote what is lost, and over how many passes."""
    quoted, passes = evidence.quote("lost"), evidence.latest("micro_batches")
    if quoted is None or not passes:
        return report_unknown("the sum in float32 beside it", command=SAMPLE_MORE)
    passes /= evidence.rank_count  # the signal is of all these ranks together
    return finding(evidence.alert, "bf16-sum", lost=quoted[0], passes=passes)
