"""What happened since the last optimizer step: backward passes, the scale, clipping, and where the time went."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident

import torch

from sentinel.heartbeat import Work
from sentinel.hooks.fast_path_native import learned
from sentinel.hooks.feeds import Feeds
from sentinel.hooks.sample import meeting_place
from sentinel.hooks.whereabouts import Whereabouts

# Looked up once: in a fast loop the lookup of an enumeration's member at every step is measurable.
_STEP, _BACKWARD = Work.STEP, Work.BACKWARD

Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor on a device, which is read later: reading it now would wait for the device."""


def scalar(tensor: torch.Tensor) -> Scalar:
    """The value of a one-element tensor: at once on the CPU, a copy that nobody changes on a device."""
    if tensor.is_cpu:  # and not its device's name, which takes as long as the value
        return float(tensor.item())
    return tensor.detach().reshape(()).to(torch.float32, copy=True)


def on_one_device(values: Sequence[Scalar]) -> Sequence[Scalar]:
    """The same, for arithmetic: tensors of two devices do not add up. (A model over several has its loss, and with it
    GradScaler's scale, on the last.)"""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return values
    device = meeting_place(tensors)
    return [value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values]


def sum_of(one: Scalar, other: Scalar) -> Scalar:
    """Wherever they are."""
    if type(one) is float is type(other):
        return one + other
    one, other = on_one_device((one, other))
    return one + other


def is_finite(value: Scalar | None) -> bool:
    """False only where it is known that the value is NaN or infinite: one that is still on a device is not."""
    return not isinstance(value, float) or math.isfinite(value)


@learned
@dataclass(slots=True)
class Tally:
    """Sums over the passes that lead to one optimizer step; times are sums over all `steps` since it was taken last,
    in host seconds: on CUDA, of launching."""

    loss: Scalar | None = None
    backwards: int = 0
    batches: int = 0
    forwards: int = 0
    steps: int = 1
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    """In the steps before the last one."""
    fp16: bool = False
    """A forward pass with gradients ran under fp16 autocast."""
    weighted: bool = False
    """A backward pass was given factors of its roots."""
    clipped_scaled: bool = False
    """Gradients were clipped that were still multiplied by the loss scale."""
    evaluating: bool = False
    """A forward pass with gradients ran in a model in evaluation mode."""
    rivals: bool = False
    """Another optimizer of the run steps on a loss of its own."""
    batch: dict[str, float] | None = None
    """What the last batch that was looked at is (`contents.py`)."""
    loader_batches: int = -1
    """Of a whole pass over the loader that trains; -1: not known."""
    logged: dict[str, Scalar] = field(default_factory=dict)
    """By `monitor.log`; wins over what was seen."""

    @property
    def passes_seconds(self) -> float:
        """In forward and backward passes, and waiting for data."""
        return self.data_seconds + self.forward_seconds + self.backward_seconds


def _nothing() -> None:
    pass


@learned
class Ledger:
    """The tally that is being filled, and how far the run has come. Only the thread that trains fills in data and
    forward times: loaders and evaluations of other threads do not hold the step up."""

    __slots__ = (
        "__weakref__", "_with_loss", "calm_to", "captured", "disturbed", "feeds", "native", "paused", "progress",
        "sees_forwards", "steps", "tally", "thread", "when_captured", "when_next", "whereabouts", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tally = Tally()
        self.calm_to = -math.inf
        """As long as the losses are finite and no higher, no more than they is wanted of the steps at hand: what sees
        one writes it here, and calls nothing else. Minus infinity: all of a step is wanted. `calm` sets it, and
        `disturb` takes it back."""
        self.disturbed = False
        """Whether it was, since this was set to False last."""
        self.sees_forwards = False
        """Whether forward passes of the model are seen: inside a compiled graph they are not."""
        self.progress = self.steps = 0
        """Signs of life so far, and how many of them were optimizer steps."""
        self.work = Work.NONE
        """The last of them."""
        self.paused = False
        """In a phase that the loop declared."""
        self.captured = False
        """The last step was recorded into a CUDA graph: when that is replayed, nothing is seen."""
        self.when_captured: Callable[[], None] = _nothing
        self.when_next: weakref.WeakMethod[Callable[[], None]] | None = None
        """Called once, when the loop is done with the last step: it fetches its next batch, or computes with it. Held
        weakly: whose method it is has the model, and is to die with the optimizer, and not with the session."""
        self.feeds = Feeds()
        self._with_loss: set[int] = set()
        self.thread, self.native = get_ident(), threading.get_native_id()
        self.whereabouts = Whereabouts()

    def disturb(self) -> None:
        """More is wanted of the step at hand. On any thread."""
        self.disturbed = True
        self.calm_to = -math.inf

    def calm(self, to: float) -> None:
        """No more than the losses is wanted from now on, unless `disturbed` has become true meanwhile."""
        self.calm_to = to
        if self.disturbed:
            self.calm_to = -math.inf

    def here(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return get_ident() == self.thread

    def take(self) -> Tally:
        """A step is over: close the tally and begin the next."""
        self._stepped()
        taken, self.tally = self.tally, Tally()
        taken.loader_batches = self.feeds.length
        return taken

    def owned(self, stream: int, tally: Tally) -> None:
        """Whose step it was that this was taken for: losses that play against each other have one optimizer each."""
        if tally.loss is not None:
            self._with_loss.add(stream)
        tally.rivals = len(self._with_loss) > 1

    def passed(self, seconds: float) -> None:
        """A step is over of which only the loss is wanted, and which took `seconds` of the optimizer: go on with the
        tally."""
        tally = self.tally
        tally.loss = tally.batch = None
        tally.backwards = tally.batches = tally.forwards = 0
        tally.steps += 1
        tally.optimizer_seconds += seconds
        self.steps += 1
        self.captured = False
        self.progress += 1
        self.work = _STEP
        self.feeds.training = self.feeds.last

    def _stepped(self) -> None:
        """The thread that steps is the one that trains."""
        if get_ident() != self.thread:
            self.thread, self.native = get_ident(), threading.get_native_id()
        self.steps += 1
        self.captured = False
        self.progress += 1
        self.work = _STEP
        self.feeds.training = self.feeds.last

    def capture(self) -> None:
        """A step is being recorded into a CUDA graph."""
        if not self.captured:
            self.captured = True
            self.when_captured()

    def defer(self, method: Callable[[], None]) -> None:
        """Call it once, when the loop is done with the present iteration."""
        self.when_next = weakref.WeakMethod(method)

    def next_iteration(self) -> None:
        """The loop fetches a batch, or computes with one. A thread that fetches ahead of it does not."""
        method = self.when_next
        if method is not None and self.here():
            self.when_next = None
            function = method()
            if function is not None:
                function()

    def progressed(self, work: Work) -> None:
        """The run came a little further."""
        self.progress += 1
        self.work = work

    def phase(self, name: str) -> None:
        """A phase begins, or with the empty name training goes on: either way its time begins now."""
        self.paused = bool(name)
        self.progress += 1

    def logged(self, name: str, value: Scalar) -> None:
        """The loop said a number. Only the thread that trains speaks for its progress."""
        self.tally.logged[name] = value
        self.disturb()
        if self.here():
            self.progressed(Work.LOG)

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        """A backward pass from `loss` (None: its root is no scalar) took `seconds`."""
        tally = self.tally
        tally.backwards += 1
        tally.backward_seconds += seconds
        if loss is not None:
            tally.loss = loss if tally.loss is None else sum_of(tally.loss, loss)
        self.progress += 1
        self.work = _BACKWARD

    def start_over(self) -> None:
        """The loop threw away the passes of the present step so far."""
        tally = self.tally
        tally.loss = tally.batch = None
        tally.backwards = 0
        tally.clipped_scaled = tally.weighted = False

    def batch_fetched(self, source: object, seconds: float, batch: dict[str, float] | None) -> None:
        """An iterator gave a batch after `seconds`; what it is, where it was looked at."""
        if self.here():
            if batch is not None or not self.feeds.is_last(source):  # that of an evaluation, say, is not this one's
                self.tally.batch = batch
            self.tally.batches += 1
            self.tally.data_seconds += seconds
            self.feeds.gave(source)
            self.progressed(Work.BATCH)

    def loader_exhausted(self, source: object) -> None:
        """An iterator has no more batches."""
        if self.here():
            self.feeds.ended(source)

    def ran_in_fp16(self) -> None:
        """A forward pass with gradients begins under fp16 autocast."""
        if self.here():
            self.tally.fp16 = True

    def ran_without_gradients(self) -> None:
        """A forward pass begins that nothing is learnt from: what is known of a batch of another loader than the one
        that trains is not about the next step."""
        if self.feeds.training is not None and self.feeds.last is not self.feeds.training:
            self.tally.batch = None

    def ran_in_evaluation(self) -> None:
        """A forward pass with gradients begins in evaluation mode."""
        if self.here():
            self.tally.evaluating = True
