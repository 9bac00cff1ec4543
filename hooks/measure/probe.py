"""Base class of probes. One probe, one file; other packages add theirs by the entry point group `sentinel.probes`.

    class GradientMean(Probe):
        tier = 2
        signals = {"grad_mean": "layer"}

        def before(self, step):
            step.layers["grad_mean"] = torch.stack([g.mean() for g in step.gradients.tensors])

A probe launches kernels and never waits for the device: what it measures there it leaves as a tensor, to be read later.
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

from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.loop.grad_clipping import Clip
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import Scalar
from sentinel.signals import Scope

ENTRY_POINTS = "sentinel.probes"
UNSEEN_SECONDS = 1.0
"""Seconds to the next glance after a probe failed at one."""
EARLY, OCCASION = 32, 64
"""An occasion is a step at which some probes look at more than its end: each of the first 32, and every 64th."""
CONFIRMING = 4
"""Most steps right after such an occasion that are occasions too, where a probe asks to look again: the rule
GradientsNotCleared asks for five in a row."""


@dataclass(slots=True)
class Step:
    """One optimizer step, which probes read and add their values to."""

    seq: int
    optimizer: Any
    totals: StepTotals
    """What happened since the previous step."""
    gradients: Gradients | None = None
    """The step's gradients; None where it is not sampled beyond tier 0."""
    thorough: bool = False
    """Whether tier 2 is sampled."""
    gradients_missing: bool = False
    """Whether tier 2 is due, but the gradients could not be sampled."""
    rare: bool = False
    """Whether tier 3 is sampled; if so, tier 2 is, too."""
    parameters: Layers | None = None
    """The optimizer's parameters, and their names."""
    values: dict[str, Scalar] = field(default_factory=dict)
    """Signal of scope `rank` -> its value."""
    layers: dict[str, torch.Tensor | bytes] = field(default_factory=dict)
    """Signal of scope `layer` -> float32, one value per row of `gradients.rows`; bytes where packed already."""
    skipped: Scalar = 0.0
    """1 where the scaler withheld the step; a tensor where only the device knows it."""
    scale: Scalar | None = None
    """GradScaler's scale, as used by the backward pass."""
    clip: Clip | None = None
    """What the loop clipped; None where it did not."""
    passes_before: float | None = None
    """Seconds in passes before a step with a closure, inside which the other passes run. None: all came before."""
    previous_exit: float | None = None
    entered: float = 0.0
    left: float = 0.0
    """Host times (`time.perf_counter`): exit of the step before the first one in the totals, entry to
    `optimizer.step`, exit from it."""

    urgent: bool = False
    """Whether the measurement must be sent without delay."""
    look_again: bool = False
    """Whether a probe saw something on this occasion that the next step must confirm."""
    own_seconds: float = 0.0
    """Seconds between these exits that our own measuring took."""

    def release(self) -> None:
        """Hold neither the optimizer nor its gradients while it steps: a step that raises is never closed."""
        self.optimizer = None
        if self.gradients is not None:
            self.gradients.release()

    def reclaim(self, optimizer: Any) -> None:
        """Hold them again, as `optimizer` has stepped."""
        self.optimizer = optimizer
        if self.gradients is not None:
            self.gradients.reclaim()

    @property
    def blind(self) -> bool:
        """Name of `gradients_missing` in 0.1."""
        warnings.warn("Step.blind is called gradients_missing now", DeprecationWarning, stacklevel=2)
        return self.gradients_missing

    @property
    def optimizer_seconds(self) -> float:
        """Seconds in `optimizer.step`, without the forward and backward passes inside it."""
        own = self.left - self.entered
        if self.passes_before is not None:
            own = max(own - (self.totals.passes_seconds - self.passes_before), 0.0)
        return own

    @property
    def is_withheld(self) -> bool:
        """Whether the step is known on the host to be withheld: a value on a device is not read."""
        return isinstance(self.skipped, float) and self.skipped == 1.0

    @property
    def in_fp16(self) -> bool:
        """Whether the step's forward passes ran under fp16 autocast, or a group's first parameter is fp16. (Frameworks
        that keep fp32 masters pass those to the optimizer.)"""
        if self.totals.fp16:
            return True
        for group in self.optimizer.param_groups:
            if group["params"] and group["params"][0].dtype is torch.float16:
                return True
        return False


@dataclass(slots=True)
class Glance:
    """A step on the fast path, for probes that look there too."""

    now: float
    """The step's exit, by `time.perf_counter`."""
    values: dict[str, float]
    """Signal of scope `rank` -> its value."""
    due: float
    """Time at which the next glance is due."""
    whole: bool = False
    """Whether the step must be measured in full after all."""


_FORMER = {"over": "disarm", "spared": "skipped_on_fast_path", "blind": "needs_no_gradients"}
"""Name of an attribute of `Probe` in 0.1 -> its present name."""


class Probe:
    """Base of all probes. Override `before`, `after` or both."""

    tier: ClassVar[int] = 0
    """0: called at every step. 1, 2 and 3: every k steps, as the governor allows; `step.gradients` is set."""
    relaxed: ClassVar[bool] = False
    """For tier 0: in a loop of a few milliseconds the probe is called less often, but at least at every 64th step, with
    the totals of the steps since."""
    skipped_on_fast_path: ClassVar[bool] = False
    """For tier 0: the probe is not called on the fast path, where the optimizer monitor records what it would."""
    needs_no_gradients: ClassVar[bool] = False
    """For tier 2: `after` is called even where the gradients could not be sampled."""
    signals: ClassVar[Mapping[str, Scope]] = {}
    """Signals that it measures and that are not in `sentinel.signals`, with their scopes."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for former, name in _FORMER.items():  # a probe may define the former name, or read it on a base class
            defining = next(base for base in cls.__mro__ if {former, name} & vars(base).keys())
            if name not in vars(defining):
                warnings.warn(f"{defining.__name__}.{former} is called {name} now", DeprecationWarning, stacklevel=2)
                setattr(cls, name, vars(defining)[former])
            elif former not in vars(defining):
                setattr(cls, former, vars(defining)[name])

    def arm(self, step: Step) -> None:
        """Called when `step` is over and the next one is an occasion: one of the first `EARLY`, every 64th, or a step
        after an occasion at which a probe asked to look again."""

    def pass_begins(self, roots: Any) -> None:
        """Called when a backward pass of an occasion begins, from `roots`, as given to autograd; it may be another
        optimizer's."""

    def pass_ended(self) -> None:
        """Called when that backward pass is over."""

    def disarm(self, step: Step) -> None:
        """Called when `step` is over, the occasion for which it was armed."""

    over, spared, blind = disarm, skipped_on_fast_path, needs_no_gradients

    def capturing(self) -> None:
        """Called before a CUDA graph is captured: nodes of autograd that are held would become part of it."""

    def enter(self, step: Step) -> None:
        """Called at tier 3 alone, when `optimizer.step` begins. With a closure the gradients are still to come."""

    def before(self, step: Step) -> None:
        """Called when gradients are complete and, except with a closure, not applied yet."""

    def after(self, step: Step) -> None:
        """Called when the optimizer is done, or the scaler withheld the step."""

    def forget(self) -> None:
        """Called after a rollback and when a stage begins: what was seen so far says nothing of what comes."""

    def glance(self, glance: Glance) -> None:
        """Called on a probe of tier 0 with `skipped_on_fast_path` when a step there is over and a glance is due. It may
        take microseconds only, and sets when the next one is due."""


class ProbeCall(NamedTuple):
    """A method of a probe that is called at one moment of a step."""

    call: Callable[..., None]
    where: str
    what: str
    """What the probe measures, as reported to the user."""


_RELAXED, _OCCASIONS = -1, -2
"""Keys used in place of a tier."""


class Probes:
    """The probes of one optimizer, grouped by the moment at which they are called."""

    def __init__(self, probes: list[Probe], unseen: Unseen) -> None:
        """`unseen` records the probes that fail."""
        self._unseen = unseen
        self._resting: set[str] = set()
        """What is not measured for a while after a passing error: does not change within a step."""
        self._trying: set[str] = set()
        self._tried: set[str] = set()
        """What is being tried again, and the part of it that was measured in the present step."""
        self.signals = {name: scope for probe in probes for name, scope in probe.signals.items()}
        self._before, self._after = _moments(probes, "before"), _moments(probes, "after")
        self._after_without_gradients = _moments([probe for probe in probes if probe.needs_no_gradients], "after")
        self._enter = _moments(probes, "enter")
        self._arm, self._disarm = _moments(probes, "arm", _OCCASIONS), _moments(probes, "disarm", _OCCASIONS)
        self._begins, self._ended = (_moments(probes, name, _OCCASIONS) for name in ("pass_begins", "pass_ended"))
        self._capturing = _moments(probes, "capturing", _OCCASIONS)
        self._forget = _moments(probes, "forget", _OCCASIONS)
        self._glances = _moments(probes, "glance", _OCCASIONS)
        self.glance_at = 0.0 if self._glances else math.inf
        """Time at which a glance is due, by `time.perf_counter`."""
        self.all_skippable = all(probe.skipped_on_fast_path or probe.relaxed for probe in probes if probe.tier == 0)
        """Whether there are steps at which no probe needs to be called."""
        self.awake = True
        """Whether the present step is an occasion."""

    def pass_begins(self, roots: Any) -> None:
        """Call the probes that look at backward passes. Only needed while `awake`."""
        self._call(self._begins, _OCCASIONS, roots)

    def pass_ended(self) -> None:
        """Call them at the end of the pass. Only needed while `awake`."""
        self._call(self._ended, _OCCASIONS)

    def capturing(self) -> None:
        """Call the probes before a CUDA graph is captured."""
        self._call(self._capturing, _OCCASIONS, always=True)

    def forget(self) -> None:
        """Call the probes when what they saw so far says nothing of what comes."""
        self._call(self._forget, _OCCASIONS, always=True)

    def end_step(self, step: Step) -> None:
        """End a step when all else of it is measured: close an occasion, begin another."""
        if self.awake:
            self._call(self._disarm, _OCCASIONS, step, always=True)
        if self._resting or self._trying:
            self._rouse()
        coming = step.seq + 1
        self.awake = coming < EARLY or coming % OCCASION <= (CONFIRMING if step.look_again else 0)
        if self.awake:
            self._call(self._arm, _OCCASIONS, step)

    def enter(self, step: Step) -> None:
        """Call the probes of tier 3 at the entry to `optimizer.step`."""
        self._call(self._enter, 3, step)

    def before(self, step: Step, tier: int) -> None:
        """Call the probes of one tier when gradients are complete."""
        self._call(self._before, tier, step)

    def after(self, step: Step, tier: int) -> None:
        """Call the probes of one tier when the step is over."""
        without = tier == 2 and step.gradients_missing
        self._call(self._after_without_gradients if without else self._after, tier, step)

    def glance(self, now: float, values: dict[str, float]) -> bool:
        """Call the probes that look at the fast path; return whether this step must be measured in full."""
        glance = Glance(now, values, due=now + UNSEEN_SECONDS)
        self._call(self._glances, _OCCASIONS, glance)
        self.glance_at = glance.due
        return glance.whole

    def call_relaxed_probes(self, step: Step) -> None:
        """Call the probes of tier 0 that are not needed at every step, when this step is over."""
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
        """Try what rested long enough again from the next step on; not within a step, whose first moment the probe has
        missed."""
        for what in self._tried - self._resting:
            self._unseen.restore(what)
        self._trying -= self._tried
        self._tried.clear()
        roused = {what for what in self._resting if not self._unseen.is_paused(what)}
        self._resting -= roused
        self._trying |= roused


def _moments(probes: list[Probe], name: str, whenever: int | None = None) -> dict[int, tuple[ProbeCall, ...]]:
    """Return tier -> calls of the method `name`, or all under `whenever`, so that a step iterates over its own only."""
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
    """Return the entry points of other packages' probes. It takes some ms: once for all optimizers of a run."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def load_probes(points: Sequence[importlib.metadata.EntryPoint]) -> list[Probe]:
    """Load a probe from each entry point. A probe that cannot be loaded is logged and left out."""
    found = []
    for point in points:
        try:
            found.append(point.load()())
        except Exception:
            faults.swallow(f"the probe {point.name} ({point.value})", "without this probe")
    return found
