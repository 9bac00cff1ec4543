"""Owns everything that Sentinel attached to the run, from `begin` to `end`, and represents the run to the daemon.

The daemon gets the hello, the layer tables and the steps. `event_router.py` passes on what the patches see,
`command_handler.py` what the daemon sends. Model, optimizers and restorer are held weakly: when the user releases the
optimizers, the session ends by itself.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch.utils.hooks import RemovableHandle

from sentinel import wire
from sentinel._version import __version__
from sentinel.errors import RunStopped
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import Unseen, is_out_of_memory
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.core.identity import RunIdentity, printable
from sentinel.hooks.core.threads import UserCallbacks, start_thread
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.evidence.oom_report import post_mortem
from sentinel.hooks.loop import patches
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.session.backward_passes import Succession
from sentinel.hooks.session.closing_line import ClosingLine
from sentinel.hooks.session.command_handler import CommandHandler
from sentinel.hooks.session.event_router import EventRouter, OptimizerMonitors
from sentinel.hooks.session.logged_signals import NAMES, LoggedSignals
from sentinel.hooks.session.meeting_finder import MeetingFinder
from sentinel.hooks.step.optimizer_in_backward import BackwardGathering
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop.tensors import Scalar
from sentinel.hooks.trackers.tracker_threads import RunTrackers
from sentinel.hooks.transport.daemon_launcher import DaemonLocator
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter
from sentinel.hooks.transport.records import Record
from sentinel.hooks.transport.sender import HANGS, Sender

if TYPE_CHECKING:
    from sentinel.hooks.rollback.restorer import Restorer
    from sentinel.hooks.rollback.step_guard import StepGuard

PATIENCE_STEPS = 20
"""Steps after which the user of a run whose loss was not seen gets a line on how to show it."""
EARLY_STEPS = range(3)
"""Steps that are sent without delay, and shown by the heartbeat.

A process that holds the GIL without end in its first half second would otherwise look as if it had not begun.
"""
_STEPS = "optimizer steps"
"""What is reported as not seen where no steps are made."""
PHASE_LETTERS = 200
STOPPING = "stop"
"""Name of the phase between the step at which a run is stopped and its end."""
GOODBYE_SECONDS = 0.4
"""Longest time that `detach`, and a process about to end, wait for the daemon to take what is queued.

With what is written to disk after that (`Sender._leave_record`) the end is delayed by less than half a second.
"""
LINES = 256
"""Most lines printed on the terminal of a run, besides the daemon's notices."""


class RunSession:
    """What Sentinel attached to one run. `attach` makes it and adds monitors, restorer and handles."""

    def __init__(
        self,
        who: RunIdentity,
        *,
        accumulator: StepAccumulator,
        governor: Governor,
        batches: Batches,
        daemon_locator: DaemonLocator,
        kind: str | None = None,
    ) -> None:
        """`kind`: how the user says that losses are judged (`LoggedSignals`)."""
        self.who, self.accumulator, self.governor, self.batches = who, accumulator, governor, batches
        self.hello: dict[str, Any] = {}
        """The fields of the hello, except those that `whole_hello` adds."""
        self.sender = Sender(
            self,
            daemon_locator=daemon_locator,
            receive=CommandHandler(self).receive,
            governor=governor,
            unseen=accumulator.unseen,
        )
        self.meeting_finder = MeetingFinder(self.identify, self.send)
        accumulator.unseen.changed = self.sender.greet_again
        batches.announce = self.sender.greet_again
        self._monitors = OptimizerMonitors()
        self._listening: EventRouter | None = None
        self._succession: Succession | None = None
        self._guard: weakref.ref[StepGuard] | None = None
        self._restorer: weakref.ref[Restorer] | None = None
        self.stop_on: tuple[str, ...] = ()
        """Names of the alerts that stop this run, as given to `attach`."""
        self.collector: EvidenceCollector | None = None
        self._post_mortem = False
        self.handles: list[RemovableHandle] = []
        """Those of the hooks on models and optimizers, each added as soon as its hook is registered."""
        self.signals = LoggedSignals(kind)
        accumulator.reinforcement = self.signals.reinforcement
        self._told: set[str] = set()
        self._rank = 0
        """As in the last hello."""
        self.trackers = RunTrackers()
        self.closing_line = ClosingLine(who.name, self.sender, self.trackers)
        self.ended = self._optimizers_gone = False
        """Whether it is over; whether the sender ended it, because the optimizers were deleted."""
        self.unasked = False
        """Whether it was attached at the first step (`sentinel run`): an attach in the script takes its place."""

    def begin(
        self,
        monitors: Sequence[OptimizerMonitor],
        guard: StepGuard,
        restorer: Restorer | None,
        gathering: BackwardGathering,
        collector: EvidenceCollector,
        succession: Succession,
    ) -> None:
        """Start: listen to the patches, and let the sender look for the daemon, once all else is in place.

        `restorer` is the `guard` where rollback is armed. Raises RuntimeError if no thread can be started.
        """
        self._monitors, self.collector = OptimizerMonitors(monitors, gathering), collector
        self._guard = weakref.ref(guard)
        self._restorer = weakref.ref(restorer) if restorer is not None else None
        self._succession = succession
        self.accumulator.when_captured = self._announce_capture
        if len(monitors) == 1:
            monitors[0].is_only_optimizer = True
        self._listening = EventRouter(self, self._monitors, collector, succession)
        patches.listen(self._listening)
        start_thread(self.sender)

    def end(self, goodbye: wire.Goodbye, timeout: float) -> None:
        """Remove hooks and patches, send what is queued and the goodbye, which is sent once. On the training thread."""
        ended, monitors = self.ended, (*self._monitors.all_monitors, *self.monitors)  # these call the user's functions
        self._let_go()
        conclude = functools.partial(self._conclude, broken=goodbye.reason == "exception")
        if not ended:
            conclude()  # before the monitors let go of anything
            if (
                goodbye.reason != "exception"
                and (first := next(iter(self._monitors.active_monitors), None)) is not None
            ):
                first.report_logged()
        for monitor in monitors:
            monitor.retire()
        self.unhook()
        if not ended:
            self.sender.stop(goodbye, timeout, conclude)
            self.sender.state = "detached"
        if not self.closing_line.is_due:  # another session goes on with the run
            self.trackers.end(None)

    def leave(self, goodbye: wire.Goodbye, timeout: float) -> None:
        """End the session because the run is over, and print the closing line."""
        self.trackers.look(last=True)
        if not self.ended:
            self.closing_line.note_end(goodbye)
        self.end(goodbye, timeout)
        self.say_closing()

    def say_closing(self) -> None:
        """Print the closing line, if the run is over and that was not said."""
        self.closing_line.say(self.hello.get("step_offset", 0))

    def _conclude(self, *, broken: bool) -> None:
        """Answer now the requests that wait for a step, as no step will come. On the training thread.

        `broken`: the run ended by an exception, after which a device may not answer any more.
        """
        if self.collector is None:
            return
        with faults.swallow_faults("the evidence at the end", "without it"):
            first = next(iter(self._monitors.all_monitors), None)
            optimizer = first.optimizer() if first is not None else None
            if first is None or optimizer is None:
                self.collector.decline(self.sender.queue.next_seq - 1)
            else:
                self.collector.conclude(optimizer, first.layers, first.seq - 1, broken=broken)

    def call_off(self) -> None:
        """Undo a session that could not be set up: leave nothing behind."""
        self._let_go()
        self.unhook()
        self.sender.abandon()

    def abandon(self) -> None:
        """Stop in a forked child, which is not the run. Takes no lock: another thread of the parent may have held
        one."""
        self.ended = True
        self.trackers.abandon()
        self.sender.abandon()
        if self.collector is not None:
            self.collector.close()  # it holds the last batch
        for monitor in (*self._monitors.all_monitors, *self.monitors):
            monitor.stop()

    def _let_go(self) -> None:
        """End what any thread may end: all but the hooks."""
        self.ended = True
        self.meeting_finder.close()
        if self._listening is not None:
            patches.unlisten(self._listening)
        if self.collector is not None:
            self.collector.close()

    def unhook(self) -> None:
        """Remove the hooks. On the training thread only: PyTorch iterates over them while it calls them.

        Inside a step, as in `on_rollback`, they stay, and do nothing.
        """
        if any(monitor.inside for monitor in self.monitors):
            return
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self._succession is not None:
            self._succession.close()

    @property
    def monitors(self) -> list[OptimizerMonitor]:
        """The monitors whose optimizer still exists; one for all optimizers that step inside the backward pass."""
        return self._monitors.active_monitors

    @property
    def unseen(self) -> Unseen:
        """Records what fails in our hooks, and what the run is not watched for."""
        return self.accumulator.unseen

    @property
    def guard(self) -> StepGuard | None:
        """Does what was promised at the exits of steps; None if steps are in the backward pass, or no more come."""
        return self._guard() if self._guard is not None else None

    @property
    def restorer(self) -> Restorer | None:
        """Takes snapshots and rolls back; None where rollback is not armed."""
        return self._restorer() if self._restorer is not None else None

    @property
    def alerts(self) -> UserCallbacks | None:
        """The functions that the user wants called on alerts, as long as the first optimizer lives."""
        first = next(iter(self._monitors.all_monitors), None)
        return first.alerts if first is not None else None

    def watches(self, optimizer: object) -> bool:
        """Whether this optimizer is one of ours."""
        return any(monitor.watches(optimizer) for monitor in self._monitors.all_monitors)

    def gather(self) -> None:
        """Watch the optimizers through one monitor from now on, as they step inside the backward pass."""
        restorer, guard = self.restorer, self.guard
        self._restorer = self._guard = None
        if guard is not None:
            guard.close()
        for monitor in self._monitors.all_monitors:
            monitor.guard = None
        self.hello = {**self.hello, "rollback": None}
        self._not_seen(
            "what only a step as a whole has: clipping, rollback (the optimizers step inside the backward pass)"
        )
        self.say_once(
            "the optimizers step inside the backward pass"
            + ("; rollback cannot be had there, and is not armed" if restorer is not None else "")
        )

    def tell_idle(self, passes: int) -> None:
        """Report that so many backward passes came after the last step, and no step; 0: a step came after all."""
        if not passes:
            self.unseen.restore(_STEPS)
            return
        kinds = " and ".join(type(monitor.optimizer()).__name__ for monitor in self._monitors.all_monitors)
        self.unseen.lose(_STEPS, f"{passes} backward passes, and no step of {kinds}")
        self.say_once(
            f"{passes} backward passes, and no step of {kinds}: nothing is watched without steps; update the "
            "parameters by optimizer.step(), and attach the optimizer that does"
        )

    def disarm(self, reason: str) -> None:
        """Report that rollback is not, or no longer, available: the daemon need not wait for it."""
        self.hello = {**self.hello, "rollback": None}
        self.unseen.lose("rollback", f"disarmed: {reason}")

    def _announce_capture(self) -> None:
        what = "the steps that a CUDA graph replays, and whether they hang"
        self._not_seen(what)
        self.say_once(f"a step is recorded into a CUDA graph; not seen: {what}")

    def _not_seen(self, what: str) -> None:
        if what not in self.hello["unseen"]:
            self.hello = {**self.hello, "unseen": (*self.hello["unseen"], what)}
            self.sender.greet_again()

    @property
    def whole_hello(self) -> dict[str, Any]:
        """The fields of the hello, with what is not seen at present and the kind of run that it is judged as."""
        facts, judged_as = self.hello["facts"], self.signals.judged_as
        return {
            **self.hello,
            "facts": {**facts, **self.batches.facts, **({"judged_as": judged_as} if judged_as else {})},
            "unseen": (*self.hello["unseen"], *self.unseen.texts),
        }

    @property
    def next_seq(self) -> int:
        """Sequence number of the next step of the first optimizer."""
        monitors = self.monitors
        return monitors[0].seq if monitors else self.sender.queue.next_seq

    @property
    def stopped(self) -> RunStopped | None:
        """The stop that ended the run, where Sentinel stopped it; else None."""
        return next((monitor.stopped for monitor in self.monitors if monitor.stopped is not None), None)

    def stage(self) -> None:
        """Begin another stage of the training with the next step. On the training thread."""
        self.accumulator.disturb()
        for monitor in self.monitors:
            monitor.begin_stage()

    def log(self, name: str, value: Scalar) -> None:
        """Add a number to the present step."""
        if not self.signals.knows(name):
            if not self.signals.add(name):
                self.say_once(f"log: more than {NAMES} names, or a name that is not a string: new names are left out")
                return
            self.sender.greet_again()
        self.accumulator.record_logged(name, value)

    def _announce_kind(self) -> None:
        self.accumulator.reinforcement = True
        self.sender.greet_again()
        self.say_once(
            f"run {self.who.name!r} is judged as {self.signals.judged_as}: a loss that jumps or climbs is a warning, "
            'without rollback; attach(kind="supervised") turns that off'
        )

    def say_once(self, text: str) -> None:
        """Print a line on the terminal, unless it was printed before."""
        if text not in self._told and len(self._told) < LINES:
            self._told.add(text)
            faults.say(text)

    @property
    def queued(self) -> deque[Record]:
        """The records that wait to be sent."""
        return self.sender.queue.records

    def submit(self, record: Record, urgent: bool) -> None:
        """Queue the record of a step of one monitor, which is over."""
        self.sender.submit(record, urgent=urgent or record.seq in EARLY_STEPS)
        if self.signals.recognise_kind():
            self._announce_kind()
        if record.stream:
            return
        self.trackers.look()
        if record.seq == PATIENCE_STEPS - 1 and not self.monitors[0].loss_seen:
            self.say_once(
                f"no loss was seen in {PATIENCE_STEPS} steps (no backward() through torch.autograd.backward): "
                "call monitor.log(loss=...) in the loop to have it watched"
            )
        if self.sender.done:  # it will never be read: measuring would be wasted
            self._let_go()
            for monitor in self.monitors:
                monitor.retire()

    def send(self, message: wire.Message) -> None:
        """Send a message. After a rollback, call the user's functions."""
        self.sender.post(message)
        if isinstance(message, wire.RolledBack) and message.ok:
            for monitor in self.monitors:
                monitor.probes.forget()
            if self.collector is not None:
                self.collector.rewound()
            restorer = self.restorer
            for function in restorer.functions if restorer is not None else ():
                _call(function, message.to, message.at)

    def enter_phase(self, name: str) -> None:
        """Begin a phase that is not training; the phase with the empty name ends it."""
        self.accumulator.phase(name)
        said = printable(name)[:PHASE_LETTERS]
        self.sender.post(wire.PhaseChanged(name=said, seq=self.next_seq, time=time.time()))

    def expect_trial_passes(self) -> None:
        """Expect trial passes before the first step: those whose gradients are cleared again before it."""
        if self._listening is not None:
            self._listening.expect_trial_passes()

    def find_directory(self) -> Path | None:
        """Return the run's runtime directory; None as long as it is not known."""
        return self.who.find_directory()

    def defer(self, method: Callable[[], None]) -> None:
        """Call `method` once the loop is done with the present iteration, if that is seen before the next step."""
        self.accumulator.defer(method)

    @property
    def is_cut_off(self) -> bool:
        """Whether no daemon judges the steps at present."""
        return self.sender.is_cut_off

    def begin_stop(self) -> None:
        """Begin the phase after training is over on all ranks: time that passes before the end is no hang."""
        self.enter_phase(STOPPING)

    def say_goodbye(self, stop: RunStopped) -> None:
        """Tell the daemon that the run is stopped: the process is about to be ended. On any thread."""
        self.sender.stop(self.make_goodbye(stop), GOODBYE_SECONDS)

    def make_goodbye(self, stop: RunStopped) -> wire.Goodbye:
        """Return the goodbye of a run that Sentinel stopped."""
        return wire.Goodbye(reason="stopped", next_seq=self.next_seq, detail=stop.reason, status=stop.status)

    def report_failure(self, error: BaseException, *, backward: bool = True) -> None:
        """Report an exception of the loop, as far as seen: if memory ran out, send what it was used for."""
        with faults.swallow_faults("the post mortem of memory", "without it"):
            if self.collector is not None and not self._post_mortem and is_out_of_memory(error):
                self._post_mortem = True
                optimizers = [
                    one for monitor in self._monitors.all_monitors if (one := monitor.optimizer()) is not None
                ]
                models = self.collector.object_growth.models()
                found = post_mortem(error, self.next_seq, models, optimizers, backward=backward)
                content = msgspec.to_builtins(found)
                self.send(wire.Collected(what="out_of_memory", seq=found.seq, content=content))

    def prepare_capture(self) -> None:
        """Prepare for the capture of a CUDA graph: nothing of ours may be under way then."""
        if self.ended or not self.accumulator.is_training_thread():
            return
        for monitor in self.monitors:
            monitor.probes.capturing()
        guard = self.guard
        if guard is not None:
            guard.pause()

    def make_heartbeat_writer(self) -> HeartbeatWriter | None:
        """Return a new heartbeat writer; None where there can be no heartbeat, which is reported."""
        unseen = self.unseen
        try:
            made = HeartbeatWriter(self.accumulator)
        except OSError as error:  # macOS, or no descriptor left
            unseen.lose(HANGS, str(error))
            return None
        unseen.restore(HANGS)
        return made

    # Towards the daemon, on the sender's thread.

    def identify(self) -> wire.Identity | None:
        """Return who this rank is; None as long as that is not known."""
        return self.who.resolve()

    def make_farewell(self) -> wire.Goodbye | None:
        """Return the goodbye of a run whose optimizers were deleted; else None. `end` has its own goodbye."""
        if self.ended or any(monitor.alive() for monitor in self.monitors):
            return None
        self._let_go()
        self._optimizers_gone = True
        self.say_once(f"run {self.who.name!r} is watched no more: its optimizer is gone; a new one wants a new attach")
        goodbye = wire.Goodbye(reason="detach", next_seq=self.sender.queue.next_seq)
        self.closing_line.note_end(goodbye)
        return goodbye

    def greet(self, identity: wire.Identity, first: int | None) -> Iterator[wire.Message]:
        """Yield the hello and the layer tables. `first`: seq of the first queued record, if there is one."""
        restorer, guard, monitors = self.restorer, self.guard, self.monitors
        self._rank = identity.rank
        self.closing_line.identify(identity)
        yield wire.Hello(
            version=__version__,
            identity=identity,
            next_seq=self.next_seq if first is None else first,
            streams=tuple(type(monitor.optimizer()).__name__ for monitor in monitors),
            snapshots=restorer.held if restorer is not None else (),
            promise=guard.promised if guard is not None else 0,
            takes_stop=guard is not None,
            writes_parts=restorer is not None,
            stop_on=self.stop_on,
            began=self.closing_line.began,
            signals=dict(self.signals.scopes),
            takes_closing=self.closing_line.wanted,
            **self.whole_hello,
        )
        for monitor in monitors:
            yield monitor.layers.table

    def open_trackers(self, names: Sequence[str]) -> None:
        """Open the trackers that the settings name: the first rank does, and then asks for the alerts."""
        if self._rank == 0 and self.trackers.open(names):
            self.sender.greet_again()

    def decline_if_optimizers_gone(self) -> None:
        """If the optimizers were deleted, answer that evidence cannot be given, so that the daemon does not wait."""
        if self._optimizers_gone and self.collector is not None:
            self.collector.decline(self.sender.queue.next_seq - 1)


def _call(function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except Exception as error:
        faults.let_through(error)
        faults.log.warning("sentinel: %r raised", function, exc_info=True)
