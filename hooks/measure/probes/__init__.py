"""The stock probes, one file per subject."""

from __future__ import annotations

from sentinel.hooks.measure.probe import Probe
from sentinel.hooks.measure.probes.accumulation import Bf16Accumulation, LossReduction, ZeroGrad
from sentinel.hooks.measure.probes.gradients import Fp16Underflow, GradientDepth, GradientNorm, LayerStatistics
from sentinel.hooks.measure.probes.loop import LoopScalars, StepOutcome, StepTimes
from sentinel.hooks.measure.probes.memory import MemoryProbe, StateSize
from sentinel.hooks.measure.probes.topology import (
    Communication,
    FrozenStatistics,
    LoaderLength,
    OutsideOptimizer,
    Structure,
    Wrapping,
)
from sentinel.hooks.measure.probes.weights import (
    Checksums,
    LastUpdate,
    LoraAdapters,
    SecondMomentGrowth,
    SecondMoments,
    WeightUpdates,
)


def stock() -> list[Probe]:
    """Return a new set of probes. A probe keeps state: each optimizer has its own."""
    often = [
        StepOutcome(),
        LoopScalars(),
        StepTimes(),
        ZeroGrad(),
        LossReduction(),
        Bf16Accumulation(),
        Communication(),
    ]
    sampled = [
        GradientNorm(),
        LayerStatistics(),
        Fp16Underflow(),
        GradientDepth(),
        LoaderLength(),
        MemoryProbe(),
        SecondMoments(),
        LastUpdate(),
        SecondMomentGrowth(),
    ]
    rare = [
        WeightUpdates(),
        Checksums(),
        OutsideOptimizer(),
        FrozenStatistics(),
        StateSize(),
        Structure(),
        Wrapping(),
        LoraAdapters(),
    ]
    return [*often, *sampled, *rare]
