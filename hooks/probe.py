"""What measures. One probe, one file; other packages bring theirs by the entry point group `sentinel.probes`.

    class GradientMean(Probe):
        tier = 2
        signals = {"grad_mean": "layer"}

        def before(self, step):
            step.layers["grad_mean"] = torch.stack([g.mean() for g in step.gradients.tensors])

A probe adds kernels and never waits for the device: what it measures there it leaves as a tensor, which is read later.
One that raises is put out of action, the fault is logged once, and training goes on.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sentinel.hooks import faults
from sentinel.hooks.gradients import Gradients
from sentinel.hooks.layers import Layers
from sentinel.hooks.tally import Scalar, Tally
from sentinel.signals import Scope

ENTRY_POINTS = "sentinel.probes"


@dataclass(slots=True)
class Step:
    """One optimizer step, as probes see it and fill it in."""

    seq: int
    optimizer: Any
    tally: Tally
    """What happened since the step before."""
    gradients: Gradients | None = None
    """None where this step is not sampled beyond tier 0."""
    thorough: bool = False
    """Whether tier 2 is sampled."""
    rare: bool = False
    """Whether tier 3 is; tier 2 is then, too."""
    parameters: Layers | None = None
    """The optimizer's parameters, and their names."""
    values: dict[str, Scalar] = field(default_factory=dict)
    """Signal of scope `rank` -> its value."""
    layers: dict[str, torch.Tensor | bytes] = field(default_factory=dict)
    """Signal of scope `layer` -> float32, one a row of `gradients.rows`; bytes: packed already."""
    skipped: Scalar = 0.0
    """1 where the scaler withheld the step; a tensor where only the device knows."""
    scale: Scalar | None = None
    """GradScaler's scale, as the backward pass used it."""
    clip: tuple[Scalar | None, float] | None = None
    """(norm before clipping, limit) where the loop clipped. The norm is None where it did not clip all gradients."""
    passes_before: float | None = None
    """With a closure: seconds in passes before the step; the others are inside it. None: all of them were before."""
    previous_exit: float | None = None
    entered: float = 0.0
    left: float = 0.0
    """Host times (`time.perf_counter`): exit of the step before, entry to `optimizer.step`, exit from it."""

    @property
    def in_fp16(self) -> bool:
        """Whether its forward passes ran under fp16 autocast, or a group's first parameter is fp16. (Frameworks that
        keep fp32 masters hand those to the optimizer.)"""
        if self.tally.fp16:
            return True
        for group in self.optimizer.param_groups:
            if group["params"] and group["params"][0].dtype is torch.float16:
                return True
        return False


class Probe:
    """Base of all probes. Override `before`, `after` or both."""

    tier: ClassVar[int] = 0
    """0: at every step. 1, 2 and 3: every k steps, as the pacing allows; `step.gradients` is there."""
    signals: ClassVar[Mapping[str, Scope]] = {}
    """What it measures that is not in `sentinel.signals`, with its scope."""

    def pass_begins(self, roots: Any) -> None:
        """A backward pass from `roots`, as autograd was given them, begins; it may be another optimizer's."""

    def pass_ended(self) -> None:
        """It is over."""

    def enter(self, step: Step) -> None:
        """Tier 3 alone: `optimizer.step` begins. With a closure the gradients are still to come."""

    def before(self, step: Step) -> None:
        """Gradients are complete and not applied yet; with a closure they are, too."""

    def after(self, step: Step) -> None:
        """The optimizer is done, or the scaler withheld the step."""


Moment = tuple[str, Callable[..., None]]


class Probes:
    """The probes of one optimizer, by the moment at which they are called."""

    def __init__(self, probes: list[Probe]) -> None:
        self.signals = {name: scope for probe in probes for name, scope in probe.signals.items()}
        self._before, self._after = _moments(probes, "before"), _moments(probes, "after")
        self._enter = _moments(probes, "enter")
        self._begins, self._ended = (
            {0: tuple(moment for those in _moments(probes, name).values() for moment in those)}
            for name in ("pass_begins", "pass_ended")
        )

    def pass_begins(self, roots: Any) -> None:
        """Tell the probes that look at backward passes, of whatever tier."""
        self._call(self._begins, 0, roots)

    def pass_ended(self) -> None:
        """As above."""
        self._call(self._ended, 0)

    def enter(self, step: Step) -> None:
        """Call the probes of tier 3, `optimizer.step` being entered."""
        self._call(self._enter, 3, step)

    def before(self, step: Step, tier: int) -> None:
        """Call the probes of one tier, gradients being complete."""
        self._call(self._before, tier, step)

    def after(self, step: Step, tier: int) -> None:
        """Call the probes of one tier, the step being over."""
        self._call(self._after, tier, step)

    def _call(self, moments: dict[int, tuple[Moment, ...]], tier: int, *about: Any) -> None:
        for moment in moments.get(tier, ()):
            try:
                moment[1](*about)
            except Exception:
                moments[tier] = tuple(other for other in moments[tier] if other is not moment)
                faults.swallow(moment[0], "without this probe")


def _moments(probes: list[Probe], name: str) -> dict[int, tuple[Moment, ...]]:
    """By tier: what is called at every step looks at nothing that is not its own."""
    found: dict[int, tuple[Moment, ...]] = {}
    for probe in probes:
        if getattr(type(probe), name) is not getattr(Probe, name):
            moment = f"{type(probe).__name__}.{name}", getattr(probe, name)
            found[probe.tier] = (*found.get(probe.tier, ()), moment)
    return found


def points() -> list[importlib.metadata.EntryPoint]:
    """Where other packages have probes. Looking takes some ms: once for all optimizers of a run."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def installed(points: Sequence[importlib.metadata.EntryPoint]) -> list[Probe]:
    """A probe of each. One that cannot be loaded is logged and left out."""
    found = []
    for point in points:
        try:
            found.append(point.load()())
        except Exception:
            faults.swallow(f"the probe {point.name} ({point.value})", "without this probe")
    return found
