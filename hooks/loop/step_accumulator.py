"""Adds up what happened since the last optimizer step: backward passes, clipping, and where the time went.

It also counts how far the training loader has come. The loader of an evaluation does not count."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.loop.loop_locator import LoopLocator
from sentinel.hooks.torch_interop.tensors import Scalar, sum_of
from sentinel.wire.heartbeat_page import Work

# Looked up once: in a fast loop, the lookup of an enumeration's member at every step is measurable.
_STEP, _BACKWARD = Work.STEP, Work.BACKWARD
RIVALS_STEPS = 256
"""Steps for which a run counts as one of two rivals after it was found to be one: a critic may take 100 steps per step
of the generator (Arjovsky et al. 2017, arXiv:1701.07875). Where that was an error, the run is judged again later."""


class LoaderPass:
    """One iterator over a loader; where its workers persist, its passes one after another."""

    def __init__(self, source: Any) -> None:
        self.source = weakref.ref(source)
        self.sampler = _refer_weakly(_sampler_of(source))
        self.batches, self.exhausted = 0, False
        self.length = _length(source)


class LoaderProgress:
    """All sources of batches. The training source is the one of the last batch before a step."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self.last: LoaderPass | None = None
        """The source of the last batch."""
        self.training: LoaderPass | None = None
        """The source of the last batch before the exit of the last step."""
        self._whole = -1

    @property
    def batches(self) -> int:
        """Batches that the training loader gave since it started over; -1: no training loader was seen."""
        return self.training.batches if self.training is not None else -1

    @property
    def exhausted(self) -> bool:
        """Whether the training loader has given its last batch."""
        return self.training is not None and self.training.exhausted

    @property
    def length(self) -> int:
        """Batches of a whole pass, by the sampler or by the last pass; -1: not known."""
        said = self.training.length if self.training is not None else -1
        return said if said >= 0 else self._whole

    def begins_iteration(self, source: object, *, trains: bool) -> bool:
        """Whether the loop is done with its last step as it asks `source` for a batch (`trains`: one to train on).

        It is not at the end of an epoch, after which a scheduler may step, nor in an evaluation: that has another
        loader.
        """
        feed = self.training
        if feed is not None and feed.source() is source:
            return feed.exhausted or feed.batches != self.length
        return trains or (feed is not None and feed.sampler() is not None and feed.sampler() is _sampler_of(source))

    def count_batch(self, source: object) -> bool:
        """Count a batch of an iterator; return whether the same one gave the last batch, too."""
        feed = self.last
        same = feed is not None and feed.source() is source
        if feed is None or not same:
            self.last = feed = self._find_feed(source)
        if feed.exhausted:
            feed.batches, feed.exhausted = 0, False
        feed.batches += 1
        return same

    def record_end(self, source: object) -> None:
        """Record that an iterator has no more batches."""
        feed = self._find_feed(source)
        feed.batches, feed.exhausted = (0 if feed.exhausted else feed.batches), True
        if feed is self.training:
            self._whole = feed.batches

    def _find_feed(self, source: object) -> LoaderPass:
        if source not in self._known:
            self._known[source] = LoaderPass(source)
        return self._known[source]


def _sampler_of(source: object) -> Any:
    """Return what a DataLoader's iterators have in common, from one epoch to the next; None for other iterators."""
    return getattr(source, "_index_sampler", None)


def _refer_weakly(one: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(one)
    except TypeError:  # None, or a list of batches
        return lambda: None


def _length(source: object) -> int:
    """Return the batches of a DataLoader's pass by torch's own samplers; -1: not known. A sampler of the user's is not
    asked: it may draw random numbers to answer."""
    sampler = _sampler_of(source)
    inner = sampler
    while inner is not None:
        if not type(inner).__module__.startswith("torch.utils.data."):
            return -1
        inner = getattr(inner, "sampler", None)
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # there is no sampler, or its data have no length
        return -1


@dataclass(slots=True)
class StepTotals:
    """Sums over the passes that lead to one optimizer step; times are sums over all `steps` since the last `take`, in
    seconds on the host: on CUDA, of launching."""

    loss: Scalar | None = None
    backwards: int = 0
    batches: int = 0
    forwards: int = 0
    steps: int = 1
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer in the steps before the last one."""
    fp16: bool = False
    """Whether a forward pass with gradients ran under fp16 autocast."""
    weighted: bool = False
    """Whether a backward pass was given factors of its roots."""
    clipped_scaled: bool = False
    """Whether gradients were clipped that were still multiplied by the loss scale."""
    evaluating: bool = False
    """Whether a forward pass with gradients ran in a model in evaluation mode."""
    rivals: bool = False
    """Whether another optimizer steps on a loss that plays against this one."""
    reinforcement: bool = False
    """Whether the run is judged as reinforcement learning."""
    batch: dict[str, float] | None = None
    """Signals of the last batch that was examined (`batches.py`)."""
    loader_batches: int = -1
    """Batches of a whole pass over the training loader; -1: not known."""
    logged: dict[str, Scalar] = field(default_factory=dict)
    """Values from `monitor.log`; they win over values that were seen."""

    @property
    def passes_seconds(self) -> float:
        """Seconds in forward and backward passes, and waiting for data."""
        return self.data_seconds + self.forward_seconds + self.backward_seconds


class StepAccumulator:
    """The totals that are being filled, and how far the run has come. Only the training thread adds data and forward
    times: loaders and evaluations of other threads do not hold the step up."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.fast_path_loss_limit = -math.inf
        """Highest loss at which only the losses of the present steps are wanted: as long as a loss is finite and no
        higher, the code that sees it writes it here, and calls nothing else. Minus infinity: all of a step is wanted.
        `allow_fast_path` sets it, and `disturb` resets it."""
        self.disturbed = False
        """Whether `disturb` was called since this was last set to False."""
        self.sees_forwards = False
        """Whether forward passes of the model are seen: inside a compiled graph they are not."""
        self.progress = self.steps = 0
        """Number of signs of life so far, and how many of them were optimizer steps."""
        self.work = Work.NONE
        """Kind of the last sign of life."""
        self.paused = False
        """Whether the loop is in a phase that it declared."""
        self.captured = False
        """Whether the last step was captured into a CUDA graph: when that is replayed, nothing is seen."""
        self.when_captured: Callable[[], None] = lambda: None
        self.when_next: weakref.WeakMethod[Callable[[], None]] | None = None
        """Called once, when the loop is done with the last step: it fetches its next batch, or trains on it. Held
        weakly: the method's owner holds the model, and must die with the optimizer, not with the session."""
        self.loader_progress = LoaderProgress()
        self.in_last_pass = False
        """Whether the last backward pass of this process may have reached the model."""
        self._rivals_until = 0
        self.reinforcement = False
        """Whether the run is judged as reinforcement learning: copied into each step's totals."""
        self._with_loss: set[int] = set()
        self.thread, self.native = get_ident(), threading.get_native_id()
        self._ran_on: dict[int, int] = {}
        """Another thread -> the number of steps when it last ran the model."""
        self.loop_locator = LoopLocator()
        self.unseen = Unseen()

    def disturb(self) -> None:
        """Ask for more than the losses of the present step. On any thread."""
        self.disturbed = True
        self.fast_path_loss_limit = -math.inf

    def allow_fast_path(self, limit: float) -> None:
        """Want only the losses from now on, up to `limit`, unless `disturbed` has become true meanwhile."""
        self.fast_path_loss_limit = limit
        if self.disturbed:
            self.fast_path_loss_limit = -math.inf

    def is_training_thread(self) -> bool:
        """Whether the calling thread is the training thread."""
        return get_ident() == self.thread

    def record_run_elsewhere(self) -> None:
        """Record that the calling thread, which is not the training thread, runs the model with gradients."""
        self._ran_on[get_ident()] = self.steps

    def may_train_here(self) -> bool:
        """Whether backward passes of the calling thread may be of the model: it is the training thread, or ran the
        model since the step before the last. A pool may have another thread for each step, or one for the optimizer."""
        here = get_ident()
        return here == self.thread or self.steps - self._ran_on.get(here, -2) < 2

    def take(self) -> StepTotals:
        """Close the totals of a step that is over, begin the next, and return them."""
        if get_ident() != self.thread:  # the thread that steps becomes the training thread
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
        """Whether another run of this process trained through this run's model, or this one through its model, within
        the last `RIVALS_STEPS` steps: their losses play against each other."""
        return self.steps < self._rivals_until

    def record_rival(self) -> None:
        """Record that another run stepped on a pass through both models, and its leftovers in one were cleared."""
        self._rivals_until = self.steps + RIVALS_STEPS

    def record_owner(self, stream: int, totals: StepTotals) -> None:
        """Record which optimizer these totals belong to: losses that play against each other have one each."""
        if totals.loss is not None:
            self._with_loss.add(stream)
        totals.rivals = self.has_rivals or len(self._with_loss) > 1

    def end_fast_step(self, seconds: float) -> None:
        """End a step of which only the loss is wanted, and whose optimizer took `seconds`: the totals go on to the
        next."""
        totals = self.totals
        totals.loss = totals.batch = None
        totals.backwards = totals.batches = totals.forwards = 0
        totals.evaluating = False  # of the last step alone: an evaluation in between is no training in that mode
        totals.steps += 1
        totals.optimizer_seconds += seconds
        self.steps += 1
        self.captured = False
        self.progress += 1
        self.work = _STEP
        self.loader_progress.training = self.loader_progress.last

    def capture(self) -> None:
        """Record that a step is being captured into a CUDA graph."""
        if not self.captured:
            self.captured = True
            self.when_captured()

    def defer(self, method: Callable[[], None]) -> None:
        """Call `method` once, when the loop is done with the present iteration."""
        self.when_next = weakref.WeakMethod(method)

    def request_batch(self, source: object, *, trains: bool = False) -> None:
        """Note that the loop asks an iterator for a batch. `trains`: it is known to be one to train on."""
        if self.when_next is not None and self.loader_progress.begins_iteration(source, trains=trains):
            self.next_iteration()

    def next_iteration(self) -> None:
        """Note that the loop fetches a batch to train on, or trains on one. A thread that fetches ahead does not call
        this."""
        method = self.when_next
        if method is not None and self.is_training_thread():
            self.when_next = None
            function = method()
            if function is not None:
                function()

    def record_progress(self, work: Work) -> None:
        """Record a sign of life."""
        self.progress += 1
        self.work = work

    def phase(self, name: str) -> None:
        """Record that a phase begins, or with the empty name that training goes on; its time begins now either way."""
        self.paused = bool(name)
        self.progress += 1

    def record_logged(self, name: str, value: Scalar) -> None:
        """Record a number that the loop logged. It is a sign of life only on the training thread."""
        self.totals.logged[name] = value
        self.disturb()
        if self.is_training_thread():
            self.record_progress(Work.LOG)

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        """Record that a backward pass from `loss` (None: its root is no scalar) took `seconds`."""
        totals = self.totals
        totals.backwards += 1
        totals.backward_seconds += seconds
        if loss is not None:
            totals.loss = loss if totals.loss is None else sum_of(totals.loss, loss)
        self.progress += 1
        self.work = _BACKWARD

    def start_over(self) -> None:
        """Forget the passes of the present step so far, as the loop discarded them."""
        totals = self.totals
        totals.loss = totals.batch = None
        totals.backwards = 0
        totals.clipped_scaled = totals.weighted = False

    def batch_fetched(self, source: object, seconds: float, batch: dict[str, float] | None) -> None:
        """Record that an iterator gave a batch after `seconds`; `batch`: its signals, where it was examined."""
        if self.is_training_thread():
            same = self.loader_progress.count_batch(source)
            if batch is not None or not same:  # signals of, say, an evaluation's batch are not this one's
                self.totals.batch = batch
            self.totals.batches += 1
            self.totals.data_seconds += seconds
            self.record_progress(Work.BATCH)

    def loader_exhausted(self, source: object) -> None:
        """Record that an iterator has no more batches."""
        if self.is_training_thread():
            self.loader_progress.record_end(source)

    def ran_without_gradients(self) -> None:
        """Note that a forward pass without gradients begins: signals of a batch from another loader than the training
        loader do not describe the next step."""
        if self.loader_progress.training is not None and self.loader_progress.last is not self.loader_progress.training:
            self.totals.batch = None
