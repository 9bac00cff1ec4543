"""The evidence that a diagnosis is made from, and its result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sentinel.diagnose.signs import GrownLayer, Sign
from sentinel.runs import Rank
from sentinel.runs.devices import Devices, Gpu
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.signals import OPENING_END
from sentinel.wire import Layer
from sentinel.wire.evidence import Census, Moments, OutOfMemory, Provenance

Confidence = Literal["high", "medium", "low", "none"]
SURENESS: Mapping[Confidence, int] = {"none": 0, "low": 1, "medium": 2, "high": 3}

NOT_KNOWN = "not known"

SAMPLE_MORE = f"attach(overhead=0.1) samples more of the steps after step {OPENING_END}"
"""The setting that brings more of the figures that are taken only at some steps. Before that step a given overhead only
limits the samples."""
ALL_STEPS = "sentinel history export RUN"
"""The command that gets steps that are no longer in memory."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an incident when it fires. Steps are seqs."""

    alert: str = ""
    """Name of the alert; empty if the question comes without an alert (`sentinel hang`)."""
    about_layers: bool = False
    """Whether the rule says that layers matter."""
    since: int
    until: int
    numbers: Mapping[str, Mapping[str, float]] = {}
    """Name of each member that it fired for -> the rule's metrics and lets at that time. The summary is made from those
    of the first member: texts quote these, and compute nothing similar from other steps."""
    signs: Sequence[Sign] = ()
    layers: Sequence[GrownLayer] = ()
    last: RunStep
    """The step at which it fired; an empty one before the first step."""
    steps: Sequence[RunStep] = ()
    """The last steps, including the one at which it fired."""
    ranks: Sequence[int] = ()
    """Ranks that it fired for, where the rule is about ranks."""
    members: Sequence[str] = ()
    """Layers that it fired for, where the rule is about layers."""
    blocks: Sequence[tuple[int, LayerStats]] = ()
    """(seq, statistics of all layers) of the last steps that sampled them."""
    table: Sequence[Layer] = ()
    """All parameters, in the model's order."""
    facts: Mapping[str, Any] = {}
    """Facts about the run from its hello."""
    step_offset: int = 0
    live: Mapping[int, Rank] = {}
    """All ranks, as they are now."""
    unasked: Mapping[int, str] = {}
    """Ranks of which nothing is known because their node could not be asked -> the node, and why."""
    differing: Mapping[int, tuple[str, ...]] = {}
    """Step -> layers that differed between ranks that hold replicas."""
    gpus: Sequence[Gpu] = ()
    """GPUs that it fired for, where the rule is about GPUs."""
    withheld_by: Sequence[str] = ()
    """Rules for which no snapshot is taken now."""
    devices: Devices = msgspec.field(default_factory=Devices)
    """GPUs and host of this node, as they were read last."""

    census: Mapping[int, Census] = {}
    """Rank -> what holds the growing objects."""
    out_of_memory: Mapping[int, OutOfMemory] = {}
    """Rank -> what it held when an allocation failed."""
    moments: Mapping[int, Moments] = {}
    """Rank -> second moments against gradients, and the exponents of the gradients."""
    provenance: Mapping[int, Provenance] = {}
    """Rank -> where the first value that is not finite came from."""

    @property
    def onset(self) -> int:
        """The first step of the first sign, or of the condition."""
        return min([self.since, *(sign.seq for sign in self.signs)])

    def quote(self, *names: str) -> list[float] | None:
        """Return the rule's own numbers, as its summary gives them; None where one of them has no value."""
        values = next(iter(self.numbers.values()), {})
        found = [values[name] for name in names if math.isfinite(values.get(name, math.nan))]
        return found if len(found) == len(names) else None

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, on all nodes."""
        return max((rank.identity.world_size for rank in self.live.values()), default=1)

    @property
    def rank_count(self) -> int:
        """Number of ranks whose values are in the steps: in a job over several nodes, maybe only those of one node."""
        return max([1, *(len(step.ranks) for step in self.steps)])

    def rank(self, number: int) -> Rank | None:
        """Return a rank by its number; None where it is not known."""
        return self.live.get(number)

    def sign(self, signal: str) -> Sign | None:
        """Return the first sign of one signal; None where there is none."""
        return next((sign for sign in self.signs if sign.signal == signal), None)

    def step(self, seq: int) -> int:
        """Return the user's step of a seq."""
        return seq + self.step_offset

    def series(self, signal: str, rank: int | None = None) -> list[tuple[int, float]]:
        """Return (seq, value) of a signal up to the step at which it fired: the run's, or a rank's own."""
        found = []
        for step in self.steps:
            values = step.run if rank is None else step.ranks.get(rank, {})
            if signal in values and step.seq <= self.until:
                found.append((step.seq, values[signal]))
        return found

    def is_unsampled(self, signal: str, seq: int) -> bool:
        """Return whether a step was taken at which the run's signal is not known."""
        taken = next((step for step in self.steps if step.seq == seq), None)
        return taken is not None and signal not in taken.run

    def missing_norm(self, seq: int) -> str:
        """Return words that say that the gradient norm of a step is missing, and which step before it has one."""
        sampled = [at for at, _ in self.series("grad_norm") if at < seq]
        nearest = f"the last before it is of step {self.step(sampled[-1])}" if sampled else "there is none before it"
        return f"the gradient norm of step {self.step(seq)}, which was not sampled ({nearest})"

    def latest(self, signal: str, rank: int | None = None) -> float | None:
        """Return the newest value of a signal, the run's or a rank's own; None where there is none."""
        found = self.series(signal, rank)
        return found[-1][1] if found else None

    def usual(self, signal: str, before: int | None = None, most: int = 50) -> float | None:
        """Return the median of the last finite values of a signal, up to the alert or before a step. None: there are
        none."""
        values = [value for seq, value in self.series(signal) if before is None or seq < before]
        finite = [value for value in values[-most:] if math.isfinite(value)]
        return statistics.median(finite) if finite else None

    def column(self, signal: str) -> dict[str, float]:
        """Return layer -> value of a signal, at the newest step that sampled it."""
        for seq, layers in reversed(self.blocks):
            if seq <= self.until and signal in layers.stats:
                return {name: stats[signal] for name, stats in layers.items()}
        return {}


class Finding(msgspec.Struct, frozen=True):
    """The diagnosis of an incident: the cause, its confidence, the numbers that support it, and the remedy."""

    cause: str
    confidence: Confidence
    remedy: str = ""
    """What to do; empty: what the rule says."""
    missing: tuple[str, ...] = ()
    """What would be needed to know more."""
    evidence: tuple[str, ...] = ()
    confirm: str = ""
    """How a person can verify it."""
    problem: str = ""
    """The problem that this cause is a sign of, where that differs from the rule's (`Rule.problem`)."""
    leads: bool = False
    """Whether this cause stays first where a second run of the batch finds the origin of non-finite values."""
    ranks: tuple[int, ...] = ()
    """Ranks that it names as the ones to look at, where the rule is about the run and has no ranks as members, or where
    ranks of several nodes were compared."""
    since: int | None = None
    """The user's first step of what it explains, where that may be before the rule's condition held."""
    keeper: str = ""
    """What holds memory that is not given back, where that was found."""
    layers: tuple[str, ...] = ()
    """Parameters that it names, where the rule is about the run and has no layers as members."""
    command: str = ""
    """The one command, call or setting that gets what is missing, where the cause is not known. It can be copied; RUN
    stands for the run's name, RANK for a rank, LOG for a file of what ranks print."""


def report_unknown(
    *missing: str, command: str, cause: str = NOT_KNOWN, remedy: str = "", evidence: tuple[str, ...] = ()
) -> Finding:
    """Return a finding without a cause: what is missing, and the command, call or setting that gets it. `cause`: the
    possible causes, if any are known."""
    return Finding(cause, "none", remedy, missing, evidence, command=command)


def times_usual(sign: Sign) -> str:
    """Return words for how far a sign departed from its past."""
    return ratio_text(sign.value / sign.usual) if sign.usual > 0 else f"{sign.value:.3g} against {sign.usual:.3g},"


def ratio_text(ratio: float) -> str:
    """Return words for a growth ratio."""
    if not math.isfinite(ratio):
        return "out of all proportion to"
    return f"{ratio:.1f}x" if ratio < 1000 else f"{ratio:.3g}x"
