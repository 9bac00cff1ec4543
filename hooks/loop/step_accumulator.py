"""What happened since the last optimizer step: backward passes, the scale, clipping, and where the time went; and how
far the loader that trains has come. The loader of an evaluation does not count."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from sentinel.hooks.core.unseen import Unseen
from sentinel.hooks.loop.loop_locator import LoopLocator
from sentinel.hooks.torch_interop.tensors import Scalar, sum_of
from sentinel.wire.heartbeat_page import Work

# Looked up once: in a fast loop the lookup of an enumeration's member at every step is measurable.
_STEP, _BACKWARD = Work.STEP, Work.BACKWARD
RIVALS_STEPS = 256
"""For which a run is judged as one of two rivals since it was seen to be: a critic may make 100 steps for one of the
generator (Arjovsky et al. 2017, arXiv:1701.07875), and what was taken for one is judged again after it."""


class LoaderPass:
    """One iterator over a loader, and one pass after the other where its workers persist."""

    def __init__(self, source: Any) -> None:
        self.source = weakref.ref(source)
        self.batches, self.exhausted = 0, False
        self.length = _length(source)


class LoaderProgress:
    """All sources of batches. The training one is the source of the last batch before a step."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self.last: LoaderPass | None = None
        """That gave the last batch."""
        self.training: LoaderPass | None = None
        """The same, as it was at the exit of the last step."""
        self._whole = -1

    @property
    def batches(self) -> int:
        """That the loader gave since it started over; -1: none was seen that trains."""
        return self.training.batches if self.training is not None else -1

    @property
    def exhausted(self) -> bool:
        """Whether it has given its last."""
        return self.training is not None and self.training.exhausted

    @property
    def length(self) -> int:
        """Batches of a whole pass: as the sampler says, or as the last pass had; -1: not known."""
        said = self.training.length if self.training is not None else -1
        return said if said >= 0 else self._whole

    def count_batch(self, source: object) -> bool:
        """An iterator gave a batch. Whether it gave the last one, too."""
        feed = self.last
        same = feed is not None and feed.source() is source
        if feed is None or not same:
            self.last = feed = self._find_feed(source)
        if feed.exhausted:
            feed.batches, feed.exhausted = 0, False
        feed.batches += 1
        return same

    def record_end(self, source: object) -> None:
        """An iterator has no more."""
        feed = self._find_feed(source)
        feed.batches, feed.exhausted = (0 if feed.exhausted else feed.batches), True
        if feed is self.training:
            self._whole = feed.batches

    def _find_feed(self, source: object) -> LoaderPass:
        if source not in self._known:
            self._known[source] = LoaderPass(source)
        return self._known[source]


def _length(source: object) -> int:
    """Batches of a DataLoader's pass by torch's own samplers. A sampler of the user's is not asked: it may draw random
    numbers to answer."""
    sampler: Any = getattr(source, "_index_sampler", None)
    inner = sampler
    while inner is not None:
        if not type(inner).__module__.startswith("torch.utils.data."):
            return -1
        inner = getattr(inner, "sampler", None)
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # there is none, or its data have no length
        return -1


@dataclass(slots=True)
class StepTotals:
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
    """Another optimizer steps on a loss that plays against this one."""
    reinforcement: bool = False
    """The run is judged as reinforcement learning."""
    batch: dict[str, float] | None = None
    """What the last batch that was looked at is (`batches.py`)."""
    loader_batches: int = -1
    """Of a whole pass over the loader that trains; -1: not known."""
    logged: dict[str, Scalar] = field(default_factory=dict)
    """By `monitor.log`; wins over what was seen."""

    @property
    def passes_seconds(self) -> float:
        """In forward and backward passes, and waiting for data."""
        return self.data_seconds + self.forward_seconds + self.backward_seconds


class StepAccumulator:
    """The totals that are being filled, and how far the run has come. Only the thread that trains fills in data and
    forward times: loaders and evaluations of other threads do not hold the step up."""

    def __init__(self) -> None:
        self.totals = StepTotals()
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
        self.when_captured: Callable[[], None] = lambda: None
        self.when_next: weakref.WeakMethod[Callable[[], None]] | None = None
        """Called once, when the loop is done with the last step: it fetches its next batch, or computes with it. Held
        weakly: whose method it is has the model, and is to die with the optimizer, and not with the session."""
        self.loader_progress = LoaderProgress()
        self.in_last_pass = False
        """The last backward pass of this process may have reached the model."""
        self._rivals_until = 0
        self.reinforcement = False
        """The run is judged as reinforcement learning: each step says so."""
        self._with_loss: set[int] = set()
        self.thread, self.native = get_ident(), threading.get_native_id()
        self.loop_locator = LoopLocator()
        self.unseen = Unseen()

    def disturb(self) -> None:
        """More is wanted of the step at hand. On any thread."""
        self.disturbed = True
        self.calm_to = -math.inf

    def calm(self, to: float) -> None:
        """No more than the losses is wanted from now on, unless `disturbed` has become true meanwhile."""
        self.calm_to = to
        if self.disturbed:
            self.calm_to = -math.inf

    def is_training_thread(self) -> bool:
        """Whether the calling thread is the training thread."""
        return get_ident() == self.thread

    def take(self) -> StepTotals:
        """A step is over: close the totals and begin the next."""
        if get_ident() != self.thread:  # the thread that steps is the training thread
            self.thread, self.native = get_ident(), threading.get_native_id()
        self.steps += 1
        self.captured = False
        self.progress += 1
        self.work = _STEP
        self.loader_progress.training = self.loader_progress.last
        taken, self.totals = self.totals, StepTotals()
        taken.loader_batches = self.loader_progress.length
        taken.reinforcement, taken.rivals = self.reinforcement, self.has_rivals
        return taken

    @property
    def has_rivals(self) -> bool:
        """Whether another run of this process trained through the model of this one, or this one through its, within
        the last `RIVALS_STEPS` steps: their losses play against each other."""
        return self.steps < self._rivals_until

    def record_rival(self) -> None:
        """Another run stepped on a pass through both models, and what it left in one of them was cleared."""
        self._rivals_until = self.steps + RIVALS_STEPS

    def record_owner(self, stream: int, totals: StepTotals) -> None:
        """Whose step it was that this was taken for: losses that play against each other have one optimizer each."""
        if totals.loss is not None:
            self._with_loss.add(stream)
        totals.rivals = self.has_rivals or len(self._with_loss) > 1

    def end_fast_step(self, seconds: float) -> None:
        """A step is over of which only the loss is wanted, and which took `seconds` of the optimizer: go on with the
        totals."""
        totals = self.totals
        totals.loss = totals.batch = None
        totals.backwards = totals.batches = totals.forwards = 0
        totals.steps += 1
        totals.optimizer_seconds += seconds
        self.steps += 1
        self.captured = False
        self.progress += 1
        self.work = _STEP
        self.loader_progress.training = self.loader_progress.last

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
        if method is not None and self.is_training_thread():
            self.when_next = None
            function = method()
            if function is not None:
                function()

    def record_progress(self, work: Work) -> None:
        """The run came a little further."""
        self.progress += 1
        self.work = work

    def phase(self, name: str) -> None:
        """A phase begins, or with the empty name training goes on: either way its time begins now."""
        self.paused = bool(name)
        self.progress += 1

    def record_logged(self, name: str, value: Scalar) -> None:
        """The loop said a number. Only the thread that trains speaks for its progress."""
        self.totals.logged[name] = value
        self.disturb()
        if self.is_training_thread():
            self.record_progress(Work.LOG)

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        """A backward pass from `loss` (None: its root is no scalar) took `seconds`."""
        totals = self.totals
        totals.backwards += 1
        totals.backward_seconds += seconds
        if loss is not None:
            totals.loss = loss if totals.loss is None else sum_of(totals.loss, loss)
        self.progress += 1
        self.work = _BACKWARD

    def start_over(self) -> None:
        """The loop threw away the passes of the present step so far."""
        totals = self.totals
        totals.loss = totals.batch = None
        totals.backwards = 0
        totals.clipped_scaled = totals.weighted = False

    def batch_fetched(self, source: object, seconds: float, batch: dict[str, float] | None) -> None:
        """An iterator gave a batch after `seconds`; what it is, where it was looked at."""
        if self.is_training_thread():
            same = self.loader_progress.count_batch(source)
            if batch is not None or not same:  # that of an evaluation, say, is not this one's
                self.totals.batch = batch
            self.totals.batches += 1
            self.totals.data_seconds += seconds
            self.record_progress(Work.BATCH)

    def loader_exhausted(self, source: object) -> None:
        """An iterator has no more batches."""
        if self.is_training_thread():
            self.loader_progress.record_end(source)

    def ran_without_gradients(self) -> None:
        """A forward pass begins that nothing is learnt from: what is known of a batch of another loader than the one
        that trains is not about the next step."""
        if self.loader_progress.training is not None and self.loader_progress.last is not self.loader_progress.training:
            self.totals.batch = None
