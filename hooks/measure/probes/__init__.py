"""The stock probes, one a file."""

from __future__ import annotations

from sentinel.hooks.measure.probe import Probe
from sentinel.hooks.measure.probes.bf16_accumulation import Bf16Accumulation
from sentinel.hooks.measure.probes.checksums import Checksums
from sentinel.hooks.measure.probes.fp16_underflow import Fp16Underflow
from sentinel.hooks.measure.probes.frozen_statistics import FrozenStatistics
from sentinel.hooks.measure.probes.gradients import GradientDepth, GradientNorm, LayerStatistics
from sentinel.hooks.measure.probes.loop import LoopScalars, StepOutcome, StepTimes
from sentinel.hooks.measure.probes.lora import LoraAdapters
from sentinel.hooks.measure.probes.loss_reduction import LossReduction
from sentinel.hooks.measure.probes.memory import MemoryProbe, StateSize
from sentinel.hooks.measure.probes.topology import Communication, LoaderLength, Structure, Wrapping
from sentinel.hooks.measure.probes.weight_updates import WeightUpdates
from sentinel.hooks.measure.probes.zero_grad import ZeroGrad


def stock() -> list[Probe]:
    """A fresh set. A probe keeps state: each optimizer has its own."""
    often = [
        StepOutcome(),
        LoopScalars(),
        StepTimes(),
        ZeroGrad(),
        LossReduction(),
        Bf16Accumulation(),
        Communication(),
    ]
    sampled = [GradientNorm(), LayerStatistics(), Fp16Underflow(), GradientDepth(), LoaderLength(), MemoryProbe()]
    rare = [WeightUpdates(), Checksums(), FrozenStatistics(), StateSize(), Structure(), Wrapping(), LoraAdapters()]
    return [*often, *sampled, *rare]
