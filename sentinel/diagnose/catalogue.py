"""From evidence to cause. A diagnosis says how sure it is and what is missing: wrong certainty is worse than none.

One function an alert; an alert without one gets what its rule says of it and the cause "not known". The function
decides which cause holds; `causes.yaml` has the words, and where it is known from.

    stability.py   spikes          precision.py   NaN, loss scale          memory.py   creep, pieces, long batches
    drift.py       divergence, moments, clipping                           formats.py  gradients and updates too small
    learning.py    what does not learn                                     throughput.py  where the time goes
    ranks.py       collectives that differ                                 replicas.py parameters that differ
    bugs.py        bugs of the loop                                        depth.py    gradients along depth
    hang.py        no progress     lost.py        a process that died      hardware.py GPUs, host
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sentinel.diagnose import (
    batches,
    bugs,
    depth,
    drift,
    formats,
    hang,
    hardware,
    learning,
    lost,
    memory,
    outofmemory,
    precision,
    ranks,
    replicas,
    stability,
    straggler,
    throughput,
)
from sentinel.diagnose.evidence import NOT_KNOWN, WANTED, Diagnosis, Evidence, Finding, ratio_text
from sentinel.diagnose.moments import out_of_line
from sentinel.diagnose.traced import traced

_CATALOGUE: dict[str, Callable[[Evidence], Finding]] = {
    "LossSpike": stability.loss_spike,
    "GradientSpike": stability.gradient_spike,
    "NonFiniteLoss": precision.nonfinite_loss,
    "NonFiniteGradient": precision.nonfinite_gradient,
    "ScalerCollapse": precision.scaler_collapse,
    "ScalerMissing": precision.scaler_missing,
    "MemoryCreep": memory.creep,
    "Fragmentation": memory.fragmentation,
    "MemoryPressure": memory.pressure,
    "OutOfMemory": outofmemory.out_of_memory,
    "Divergence": drift.divergence,
    "OptimizerStateCorrupt": drift.optimizer_state,
    "AlwaysClipping": drift.always_clipping,
    "GradientUnderflow": formats.gradient_underflow,
    "LostUpdates": formats.lost_updates,
    "ClipBeforeUnscale": formats.clip_before_unscale,
    "LossNotDecreasing": learning.loss_not_decreasing,
    "DeadLayer": learning.dead_layer,
    "ParametersNotUpdated": learning.parameters_not_updated,
    "SchedulerMisused": learning.scheduler_misused,
    "AdapterStarved": learning.adapter_starved,
    "TrainingInEvalMode": learning.training_in_eval_mode,
    "UnusedParameters": learning.unused_parameters,
    "InputBound": throughput.input_bound,
    "SlowStep": throughput.slow_step,
    "LowUtilization": throughput.low_utilization,
    "DataParallelInUse": throughput.data_parallel,
    "Hang": hang.hang,
    "RankLost": lost.rank_lost,
    "CollectiveDesync": ranks.collective_desync,
    "ReplicaDivergence": replicas.divergence,
    "UnevenBatches": batches.uneven,
    "Straggler": straggler.straggler,
    "FrozenParameterChanged": bugs.frozen_changed,
    "GradientsNotCleared": bugs.gradients_not_cleared,
    "DuplicateBatches": bugs.duplicate_batches,
    "AccumulationNotNormalised": bugs.accumulation_not_normalised,
    "LowPrecisionAccumulation": bugs.low_precision_accumulation,
    "ExplodingGradient": depth.exploding,
    "VanishingGradient": depth.vanishing,
    "WarmupMissing": depth.warmup_missing,
    "CommunicationBound": throughput.communication_bound,
    "GpuFault": hardware.gpu_fault,
    "GpuThrottled": hardware.gpu_throttled,
    "GpuWearing": hardware.other,
    "GpuShared": hardware.other,
    "HostMemoryLow": hardware.host_memory,
}
_HARDWARE = frozenset({"GpuFault", "GpuThrottled", "GpuWearing", "GpuShared", "HostMemoryLow"})
_NOT_ABOUT_LAYERS = (
    frozenset({"ScalerMissing", "MemoryCreep", "Fragmentation", "Hang", "RankLost", "CollectiveDesync"})
    | frozenset(
        {
            "ReplicaDivergence",
            "UnevenBatches",
            "TrainingInEvalMode",
            "UnusedParameters",
            "SchedulerMisused",
            "ClipBeforeUnscale",
        }
    )
    | frozenset(
        {"InputBound", "SlowStep", "LowUtilization", "Straggler", "DataParallelInUse", "MemoryPressure", "OutOfMemory"}
    )
    | frozenset({"ParametersNotUpdated", "LossNotDecreasing", "DeadLayer", "LostUpdates", "GradientUnderflow"})
    | frozenset({"OptimizerStateCorrupt", "AlwaysClipping", "AdapterStarved"})
    | frozenset({"FrozenParameterChanged", "DuplicateBatches", "GradientsNotCleared", "AccumulationNotNormalised"})
    | frozenset({"LowPrecisionAccumulation", "CommunicationBound", "WarmupMissing"})
    | _HARDWARE
)


def diagnosed(evidence: Evidence, remedy: str) -> Diagnosis:
    """The diagnosis of an incident. `remedy` is what the rule itself says to do."""
    explain = _CATALOGUE.get(evidence.alert)
    found = explain(evidence) if explain else Finding(NOT_KNOWN, "none")
    if "provenance" in WANTED.get(evidence.alert, ()):
        found = traced(evidence, found)
    facts, missing = found.evidence + out_of_line(evidence), found.missing
    if evidence.alert not in _NOT_ABOUT_LAYERS:
        facts += _gradient_facts(evidence)
        if not evidence.layers:
            missing += ("layer statistics of these steps: they are sampled, and none fell here",)
    return Diagnosis(found.cause, found.confidence, facts, found.remedy or remedy, missing, found.confirm)


def _gradient_facts(evidence: Evidence) -> tuple[str, ...]:
    lines = [
        f"{sign.signal} left its past at step {evidence.step(sign.seq)}: {sign.value:.4g}, usually {sign.usual:.4g}"
        if not math.isnan(sign.usual)
        else f"{sign.signal} is {sign.value:.4g} at step {evidence.step(sign.seq)}, and has no past"
        for sign in evidence.signs
    ]
    broken = [layer for layer in evidence.layers if layer.nonfinite]
    if broken:
        names = ", ".join(layer.name for layer in broken[:5])
        lines.append(f"{len(broken)} layer(s) with non-finite gradients: {names}{', ...' if len(broken) > 5 else ''}")
    elif evidence.layers:
        top = ", ".join(f"{layer.name} ({ratio_text(layer.ratio)})" for layer in evidence.layers[:5])
        lines.append(f"{len(evidence.layers)} layer(s) grew over their own past, most of all {top}")
    scale = evidence.last.run.get("loss_scale")
    if scale is not None:
        lines.append(f"loss scale {scale:g}")
    if "clip_limit" in evidence.last.run:
        lines.append(f"gradients are clipped to {evidence.last.run['clip_limit']:g}")
    return tuple(lines)
