"""What a diagnosis is made from, and what it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sentinel.collected import Census, Moments, OutOfMemory, Provenance
from sentinel.devices import Devices, Gpu
from sentinel.diagnose.signs import GrownLayer, Sign
from sentinel.runs import Rank
from sentinel.steps import LayerStats, Step
from sentinel.wire import Layer

Confidence = Literal["high", "medium", "low", "none"]
SURENESS: Mapping[Confidence, int] = {"none": 0, "low": 1, "medium": 2, "high": 3}

NOT_KNOWN = "not known"

WANTED: Mapping[str, tuple[str, ...]] = {
    "NonFiniteLoss": ("provenance",),
    "NonFiniteGradient": ("provenance",),
    "ScalerCollapse": ("provenance", "moments"),
    "LossSpike": ("moments",),
    "Divergence": ("moments",),
    "OptimizerStateCorrupt": ("moments",),
    "GradientUnderflow": ("moments",),
    "MemoryCreep": ("census",),
    "OutOfMemory": ("out_of_memory",),
}
"""Alert -> the evidence that ranks collect for it (`sentinel.collected`)."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an incident when it fires. Steps are seqs."""

    alert: str
    since: int
    until: int
    signs: Sequence[Sign] = ()
    layers: Sequence[GrownLayer] = ()
    last: Step
    """The step at which it fired; an empty one before the first."""
    before: Step | None = None
    """The step before the first sign."""
    steps: Sequence[Step] = ()
    """The last steps, the one at which it fired with them."""
    ranks: Sequence[int] = ()
    """Whom it fired for, where the rule is about ranks."""
    members: Sequence[str] = ()
    """Layers that it fired for, where the rule is about layers."""
    blocks: Sequence[tuple[int, LayerStats]] = ()
    """(seq, statistics of all layers) of the last steps that sampled them."""
    table: Sequence[Layer] = ()
    """All parameters, in the model's order."""
    facts: Mapping[str, Any] = {}
    """What the run said of itself in its hello."""
    unseen: Sequence[str] = ()
    """What the hooks cannot see, as the hello says."""
    step_offset: int = 0
    live: Mapping[int, Rank] = {}
    """All ranks, as they are now."""
    differing: Mapping[int, tuple[str, ...]] = {}
    """Step -> layers that were not the same on ranks that hold replicas."""
    gpus: Sequence[Gpu] = ()
    """Whom it fired for, where the rule is about GPUs."""
    devices: Devices = msgspec.field(default_factory=Devices)
    """GPUs and host of this node, as they were read last."""

    census: Mapping[int, Census] = {}
    """Rank -> who holds what grows."""
    out_of_memory: Mapping[int, OutOfMemory] = {}
    """Rank -> what it held when an allocation failed."""
    moments: Mapping[int, Moments] = {}
    """Rank -> second moments against gradients, and the exponents of these."""
    provenance: Mapping[int, Provenance] = {}
    """Rank -> where the first value that is not finite came from, for the alerts that want it."""

    @property
    def onset(self) -> int:
        """The first step of the first sign."""
        return min([self.since, *(sign.seq for sign in self.signs)])

    def rank(self, number: int) -> Rank | None:
        """One of them."""
        return self.live.get(number)

    def sign(self, signal: str) -> Sign | None:
        """The onset of one signal."""
        return next((sign for sign in self.signs if sign.signal == signal), None)

    def step(self, seq: int) -> int:
        """The user's step of a seq."""
        return seq + self.step_offset

    def series(self, signal: str, rank: int | None = None) -> list[tuple[int, float]]:
        """(seq, value) of a signal up to the step at which it fired: the run's, or a rank's own."""
        found = []
        for step in self.steps:
            values = step.run if rank is None else step.ranks.get(rank, {})
            if signal in values and step.seq <= self.until:
                found.append((step.seq, values[signal]))
        return found

    def unsampled(self, signal: str, seq: int) -> bool:
        """Whether a step was taken of which the run's signal is not known."""
        taken = next((step for step in self.steps if step.seq == seq), None)
        return taken is not None and signal not in taken.run

    def latest(self, signal: str) -> float | None:
        """The newest value of a signal."""
        found = self.series(signal)
        return found[-1][1] if found else None

    def usual(self, signal: str, before: int | None = None, most: int = 50) -> float | None:
        """Median of the last finite values of a signal, up to the alert, or before a step. None: there are none."""
        values = [value for seq, value in self.series(signal) if before is None or seq < before]
        finite = [value for value in values[-most:] if math.isfinite(value)]
        return statistics.median(finite) if finite else None

    def column(self, signal: str) -> dict[str, float]:
        """Layer -> value of a signal, at the newest step that sampled it."""
        for seq, layers in reversed(self.blocks):
            if seq <= self.until and signal in layers.stats:
                return {name: stats[signal] for name, stats in layers.items()}
        return {}


class Finding(msgspec.Struct, frozen=True):
    """What a function of the catalogue makes of the evidence."""

    cause: str
    confidence: Confidence
    remedy: str = ""
    """Empty: what the rule says to do."""
    missing: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    confirm: str = ""
    """What somebody can do to see that it is so."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Cause, how sure, the numbers that say so, what to do, and what would be needed to know more."""

    cause: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    missing: tuple[str, ...] = ()
    confirm: str = ""
    """What somebody can do to see that it is so."""


def times_usual(sign: Sign) -> str:
    """How far a sign is out of its past, in words."""
    return ratio_text(sign.value / sign.usual) if sign.usual > 0 else f"{sign.value:.3g} against {sign.usual:.3g},"


def ratio_text(ratio: float) -> str:
    """A growth, in words."""
    return f"{ratio:.1f}x" if math.isfinite(ratio) else "out of all proportion to"
