"""The stock probes, one a file."""

from __future__ import annotations

from sentinel.hooks.probe import Probe
from sentinel.hooks.probes.accumulation import Accumulation
from sentinel.hooks.probes.adapters import Adapters
from sentinel.hooks.probes.checksums import Checksums
from sentinel.hooks.probes.clearing import Clearing
from sentinel.hooks.probes.communication import Communication
from sentinel.hooks.probes.depth import Depth
from sentinel.hooks.probes.half import LostGradients
from sentinel.hooks.probes.layers import LayerStatistics
from sentinel.hooks.probes.loader import LoaderLength
from sentinel.hooks.probes.loop import LoopScalars, Outcome
from sentinel.hooks.probes.memory import Memory
from sentinel.hooks.probes.norm import GradientNorm
from sentinel.hooks.probes.normalisation import Normalisation
from sentinel.hooks.probes.state import StateSize
from sentinel.hooks.probes.structure import Structure
from sentinel.hooks.probes.times import StepTimes
from sentinel.hooks.probes.updates import Updates
from sentinel.hooks.probes.wrapping import Wrapping


def stock() -> list[Probe]:
    """A fresh set. A probe keeps state: each optimizer has its own."""
    often = [Outcome(), LoopScalars(), StepTimes(), Clearing(), Normalisation(), Accumulation(), Communication()]
    sampled = [GradientNorm(), LayerStatistics(), LostGradients(), Depth(), LoaderLength(), Memory()]
    return [*often, *sampled, Updates(), Checksums(), StateSize(), Structure(), Wrapping(), Adapters()]
