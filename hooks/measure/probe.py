"""What measures. One probe, one file; other packages bring theirs by the entry point group `sentinel.probes`.

    class GradientMean(Probe):
        tier = 2
        signals = {"grad_mean": "layer"}

        def before(self, step):
            step.layers["grad_mean"] = torch.stack([g.mean() for g in step.gradients.tensors])

A probe adds kernels and never waits for the device: what it measures there it leaves as a tensor, which is read later.
`before` and `after` of tiers 1 to 3 are called under `torch.no_grad()`. A probe that raises is switched off, the fault
is logged once, and training goes on. After a passing error of the machine it is only left out for a while.
"""

from __future__ import annotations

import importlib.metadata
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.unseen import Unseen
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import Scalar
from sentinel.signals import Scope

ENTRY_POINTS = "sentinel.probes"
UNSEEN_SECONDS = 1.0
"""To the next glance, where a probe fails at one."""
EARLY, OCCASION = 32, 64
"""Occasions are the steps at which some probes look at more than the end: the first ones, and every so many."""
CONFIRMING = 4
"""Most steps right after such an occasion that are occasions too, where a probe asks for another look: the rule
GradientsNotCleared asks for five in a row."""


@dataclass(slots=True)
class Step:
    """One optimizer step, as probes see it and fill it in."""

    seq: int
    optimizer: Any
    totals: StepTotals
    """What happened since the step before."""
    gradients: Gradients | None = None
    """None where this step is not sampled beyond tier 0."""
    thorough: bool = False
    """Whether tier 2 is sampled."""
    blind: bool = False
    """Tier 2 is due, and the gradients could not be looked at."""
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
    """Host times (`time.perf_counter`): exit of the step before the first one of the totals, entry to `optimizer.step`,
    exit from it."""

    urgent: bool = False
    """Whether the measurement must be sent without delay."""
    look_again: bool = False
    """Whether a probe saw on this occasion what the next step is to confirm."""
    own_seconds: float = 0.0
    """Between these exits, seconds that took our own measuring."""

    @property
    def optimizer_seconds(self) -> float:
        """Seconds in `optimizer.step`, without the forward and backward passes inside it."""
        own = self.left - self.entered
        if self.passes_before is not None:
            own = max(own - (self.totals.passes_seconds - self.passes_before), 0.0)
        return own

    @property
    def is_withheld(self) -> bool:
        """Known to be withheld, on the host: what is still on a device is not read."""
        return isinstance(self.skipped, float) and self.skipped == 1.0

    @property
    def in_fp16(self) -> bool:
        """Whether its forward passes ran under fp16 autocast, or a group's first parameter is fp16. (Frameworks that
        keep fp32 masters hand those to the optimizer.)"""
        if self.totals.fp16:
            return True
        for group in self.optimizer.param_groups:
            if group["params"] and group["params"][0].dtype is torch.float16:
                return True
        return False


@dataclass(slots=True)
class Glance:
    """A step on the fast path, as a probe sees it that looks there too."""

    now: float
    """Its exit, by `time.perf_counter`."""
    values: dict[str, float]
    """Signal of scope `rank` -> its value."""
    due: float
    """When the next glance is due."""
    whole: bool = False
    """Whether the step is to be looked at whole after all."""


class Probe:
    """Base of all probes. Override `before`, `after` or both."""

    tier: ClassVar[int] = 0
    """0: at every step. 1, 2 and 3: every k steps, as the governor allows; `step.gradients` is there."""
    relaxed: ClassVar[bool] = False
    """Of tier 0: in a loop of a few milliseconds it is called at every 64th step at least, with the totals of the steps
    since."""
    spared: ClassVar[bool] = False
    """Of tier 0: where no more is wanted of a step, the stream tells what it would."""
    blind: ClassVar[bool] = False
    """Of tier 2: its `after` needs no gradients, and is called where they could not be looked at, too."""
    signals: ClassVar[Mapping[str, Scope]] = {}
    """What it measures that is not in `sentinel.signals`, with its scope."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # In 0.1 `disarm` was called `over`, and probes may define it, or call it of the class above.
        defining = next(base for base in cls.__mro__ if {"over", "disarm"} & vars(base).keys())
        if "disarm" not in vars(defining):
            warnings.warn(f"{defining.__name__}.over is called disarm now", DeprecationWarning, stacklevel=2)
            cls.disarm = vars(defining)["over"]  # type: ignore[method-assign]
        elif "over" not in vars(defining):
            cls.over = vars(defining)["disarm"]

    def arm(self, step: Step) -> None:
        """`step` is over, and the next one is an occasion: one of the first `EARLY`, every 64th, or a step after
        an occasion at which a probe asked to look again."""

    def pass_begins(self, roots: Any) -> None:
        """A backward pass of an occasion begins, from `roots`, as autograd was given them; it may be another
        optimizer's."""

    def pass_ended(self) -> None:
        """It is over."""

    def disarm(self, step: Step) -> None:
        """`step` is over, for which it was armed."""

    over = disarm

    def capturing(self) -> None:
        """A CUDA graph is about to be captured: what is held of autograd's graph would become part of it."""

    def enter(self, step: Step) -> None:
        """Tier 3 alone: `optimizer.step` begins. With a closure the gradients are still to come."""

    def before(self, step: Step) -> None:
        """Gradients are complete and not applied yet; with a closure they are, too."""

    def after(self, step: Step) -> None:
        """The optimizer is done, or the scaler withheld the step."""

    def forget(self) -> None:
        """What was seen so far says nothing of what comes: a rollback was done, or a stage begins."""

    def glance(self, glance: Glance) -> None:
        """Of tier 0 and spared: a step on the fast path is over, and a glance is due. It is to cost microseconds, and
        says when the next one is due."""


class ProbeCall(NamedTuple):
    """A call of a probe."""

    call: Callable[..., None]
    where: str
    what: str
    """What the probe measures, in words."""


_RELAXED, _OCCASIONS = -1, -2
"""In the place of a tier."""


class Probes:
    """The probes of one optimizer, by the moment at which they are called."""

    def __init__(self, probes: list[Probe], unseen: Unseen) -> None:
        """`unseen` records the probes that fail."""
        self._unseen = unseen
        self._resting: set[str] = set()
        """What is not measured for a while, for an error that passes: from step to step the same."""
        self._trying: set[str] = set()
        self._tried: set[str] = set()
        """What is tried again since, and of that what was measured in the present step."""
        self.signals = {name: scope for probe in probes for name, scope in probe.signals.items()}
        self._before, self._after = _moments(probes, "before"), _moments(probes, "after")
        self._blind = _moments([probe for probe in probes if probe.blind], "after")
        self._enter = _moments(probes, "enter")
        self._arm, self._disarm = _moments(probes, "arm", _OCCASIONS), _moments(probes, "disarm", _OCCASIONS)
        self._begins, self._ended = (_moments(probes, name, _OCCASIONS) for name in ("pass_begins", "pass_ended"))
        self._capturing = _moments(probes, "capturing", _OCCASIONS)
        self._forget = _moments(probes, "forget", _OCCASIONS)
        self._glances = _moments(probes, "glance", _OCCASIONS)
        self.glance_at = 0.0 if self._glances else math.inf
        """When a glance is due, by `time.perf_counter`."""
        self.spared = all(probe.spared or probe.relaxed for probe in probes if probe.tier == 0)
        """Whether there are steps at which no probe need be called."""
        self.awake = True
        """Whether the present step is an occasion."""

    def pass_begins(self, roots: Any) -> None:
        """Tell the probes that look at backward passes. Needs to be called while `awake` alone."""
        self._call(self._begins, _OCCASIONS, roots)

    def pass_ended(self) -> None:
        """Tell them that the pass is over. Needs to be called while `awake` alone."""
        self._call(self._ended, _OCCASIONS)

    def capturing(self) -> None:
        """Tell the probes that a CUDA graph is about to be captured."""
        self._call(self._capturing, _OCCASIONS, always=True)

    def forget(self) -> None:
        """Tell the probes that what they saw so far says nothing of what comes."""
        self._call(self._forget, _OCCASIONS, always=True)

    def end_step(self, step: Step) -> None:
        """A step is over, and all else of it is measured: close an occasion, begin another."""
        if self.awake:
            self._call(self._disarm, _OCCASIONS, step, always=True)
        if self._resting or self._trying:
            self._rouse()
        coming = step.seq + 1
        self.awake = coming < EARLY or coming % OCCASION <= (CONFIRMING if step.look_again else 0)
        if self.awake:
            self._call(self._arm, _OCCASIONS, step)

    def enter(self, step: Step) -> None:
        """Call the probes of tier 3, `optimizer.step` being entered."""
        self._call(self._enter, 3, step)

    def before(self, step: Step, tier: int) -> None:
        """Call the probes of one tier, gradients being complete."""
        self._call(self._before, tier, step)

    def after(self, step: Step, tier: int) -> None:
        """Call the probes of one tier, the step being over."""
        self._call(self._blind if tier == 2 and step.blind else self._after, tier, step)

    def glance(self, now: float, values: dict[str, float]) -> bool:
        """Call the probes that look at steps on the fast path; answer whether this one is to be looked at whole."""
        glance = Glance(now, values, due=now + UNSEEN_SECONDS)
        self._call(self._glances, _OCCASIONS, glance)
        self.glance_at = glance.due
        return glance.whole

    def call_relaxed_probes(self, step: Step) -> None:
        """Call those of tier 0 that need not be called at every step, the step being over."""
        self._call(self._after, _RELAXED, step)

    def _call(self, moments: dict[int, tuple[ProbeCall, ...]], tier: int, *about: Any, always: bool = False) -> None:
        for moment in moments.get(tier, ()):
            if self._resting and moment.what in self._resting and not always:
                continue
            try:
                moment.call(*about)
            except Exception:
                self._tried.discard(moment.what)
                if self._unseen.record_failure(moment.what, moment.where, "without this probe"):
                    moments[tier] = tuple(other for other in moments[tier] if other is not moment)
                else:
                    self._resting.add(moment.what)
            else:
                if self._trying and moment.what in self._trying:
                    self._tried.add(moment.what)

    def _rouse(self) -> None:
        """A step is over: what rested long enough is tried again from the next one on, and not in the middle of a step,
        whose first moment the probe has not seen."""
        for what in self._tried - self._resting:
            self._unseen.restore(what)
        self._trying -= self._tried
        self._tried.clear()
        roused = {what for what in self._resting if not self._unseen.is_paused(what)}
        self._resting -= roused
        self._trying |= roused


def _moments(probes: list[Probe], name: str, whenever: int | None = None) -> dict[int, tuple[ProbeCall, ...]]:
    """By tier, or all of them under `whenever`: what is called at every step looks at nothing that is not its own."""
    found: dict[int, tuple[ProbeCall, ...]] = {}
    for probe in probes:
        if getattr(type(probe), name) is not getattr(Probe, name):
            kind = type(probe).__name__
            moment = ProbeCall(getattr(probe, name), f"{kind}.{name}", f"what the probe {kind} measures")
            tier = _RELAXED if probe.relaxed else probe.tier
            place = tier if whenever is None else whenever
            found[place] = (*found.get(place, ()), moment)
    return found


def points() -> list[importlib.metadata.EntryPoint]:
    """Where other packages have probes. Looking takes some ms: once for all optimizers of a run."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def load_probes(points: Sequence[importlib.metadata.EntryPoint]) -> list[Probe]:
    """Load a probe from each entry point. A probe that cannot be loaded is logged and left out."""
    found = []
    for point in points:
        try:
            found.append(point.load()())
        except Exception:
            fault_guard.swallow(f"the probe {point.name} ({point.value})", "without this probe")
    return found
