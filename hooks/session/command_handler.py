"""Dispatches what the daemon sends to a rank. On the sender's thread.

Notices go to the terminal, spacings and costs to the governor, questions to the part that can answer them, and orders
for the exit of a step to the guard.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from sentinel import wire
from sentinel._version import __version__
from sentinel.hooks.core.threads import Task, Worker
from sentinel.hooks.torch_interop import internals
from sentinel.hooks.transport.heartbeat_writer import format_stacks
from sentinel.text import write_lines

if TYPE_CHECKING:
    from sentinel.hooks.session.session import RunSession

NOTICES = 512
"""Number of ids of the last notices that are kept: a daemon that was restarted may send these again."""


class CommandHandler:
    """Carries out what the daemon sends to one run, on the sender's thread."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._noticed: deque[str] = deque(maxlen=NOTICES)
        self._reader = Worker("sentinel-flight")
        self._reading: Task | None = None
        """The reading of the flight recorder that was started last."""
        self._flight_asked = 0
        """Id of the last question for the flight recorder: the daemon takes no answer to an earlier one."""

    def receive(self, message: wire.ToRank) -> None:
        """Carry out a message, or pass it to the part that does."""
        session = self._session
        match message:
            case wire.Notice():
                self._notice(message)
            case wire.Welcome():
                self._welcome(message)
            case wire.Closing():
                session.closing_line.closing = message
            case wire.Attend():
                session.governor.attend(session.next_seq, message.steps, rare=message.rare)
                session.accumulator.disturb()
            case wire.DaemonCost():
                session.governor.record_daemon_share(message.share)
            case wire.Spacing():
                session.governor.order(message.at, {int(tier): every for tier, every in message.tiers.items()})
                session.accumulator.disturb()
            case wire.Ask():
                self._ask(message)
            case wire.FindMeeting():
                session.meeting_finder.find(message)
        session.decline_if_optimizers_gone()
        self._hand_to_guard(message)

    def _hand_to_guard(self, message: wire.ToRank) -> None:
        session, guard = self._session, self._session.guard
        if guard is not None:
            guard.receive(message)
        elif isinstance(message, wire.Prepare):
            reason = "it is not watched step by step: its optimizer is gone, or steps inside the backward pass"
            session.send(wire.Prepared(id=message.id, ok=False, seq=session.next_seq, reason=reason))

    def _ask(self, message: wire.Ask) -> None:
        session, collector = self._session, self._session.collector
        match message.what:
            case "stacks":
                session.send(wire.Reply(id=message.id, ok=True, content={"text": format_stacks()}))
            case "collectives":
                self._tell_collectives(message)
            case what if collector is not None and collector.ask(what):
                if what != "provenance":  # a step that is not finite leaves the fast path by itself
                    session.accumulator.disturb()
                session.send(wire.Reply(id=message.id, ok=True))
            case what:
                session.send(wire.Reply(id=message.id, ok=False, reason=f"{what}: this version cannot answer that"))

    def _tell_collectives(self, message: wire.Ask) -> None:
        """Send the flight recorder's content, from a separate thread.

        NCCL's recorder queries CUDA events, and such a query may wait for a loop that itself waits for the device
        (ProcessGroupNCCL.cpp says so of its watchdog). The heartbeat goes on meanwhile if the dump releases the GIL, as
        that of torch's general recorder does.
        """
        session, self._flight_asked = self._session, message.id

        def tell() -> None:
            with session.accumulator.unseen.swallow_faults("the flight recorder", "collectives are not compared"):
                loader = session.accumulator.loader_progress
                flight = msgspec.structs.replace(
                    internals.read_flight_record(), batches=loader.batches, exhausted=loader.exhausted
                )
                content = msgspec.to_builtins(flight)
                session.send(wire.Reply(id=self._flight_asked, ok=True, content=content))

        if self._reading is None or self._reading.over:
            self._reading = self._reader.submit(tell)

    def _welcome(self, message: wire.Welcome) -> None:
        session = self._session
        session.open_trackers(message.trackers)
        for note in message.notes:
            session.say_once(note)
        if session.stop_on and not message.heeds_stop_on:
            session.say_once(
                f"attach(stop_on=...): the daemon is training-sentinel {message.version}, which does not know it: no "
                "alert stops this run; install the same version of training-sentinel on both sides"
            )
        if message.version != __version__:
            session.say_once(
                f"the daemon is training-sentinel {message.version}, this process {__version__}: they work together, "
                "and what only one of them knows is left out"
            )

    def _notice(self, message: wire.Notice) -> None:
        if message.id in self._noticed:
            return
        if message.id:
            self._noticed.append(message.id)
        if message.text:
            write_lines(message.text, sys.stderr)
        alerts = self._session.alerts
        if message.alert and alerts is not None:
            alerts.put(message.alert)
        if message.alert:
            self._session.trackers.put(message.alert)
