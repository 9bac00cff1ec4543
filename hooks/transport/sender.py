"""The thread that talks to the daemon. The training thread only appends to a bounded queue.

It finds or starts the daemon, says hello, sends what was measured in columnar batches, and passes on what comes back.
If the daemon is gone, the queue is kept; when it is full, the oldest step is dropped and counted. After a reconnect the
hello comes first again, then whatever the former daemon had not kept, so that nothing is lost with it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import msgspec

from sentinel import wire
from sentinel.errors import ConfigError, ProtocolError
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import Unseen, is_passing
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.transport.connection import NO_SIGNAL, DaemonConnection, QueuedFrame, Recorder
from sentinel.hooks.transport.daemon_launcher import DaemonLocator
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter
from sentinel.hooks.transport.records import LARGEST, Record, StepQueue, make_batch

INTERVAL_SECONDS = 1.0
"""Seconds between two batches: each wakes two processes, with cold caches. Urgent news is not delayed."""
TOGETHER_SECONDS = 0.5
"""The same if the node has several ranks, which its daemon waits for (`sentinel/runs/step_alignment.py`)."""
ATTENTIVE_SECONDS = 0.1
"""Seconds between two batches while something looks odd."""
BEAT_SECONDS = 0.5
"""Most seconds between two heartbeats, which wake this thread only."""
LAST_WORDS_POLL_SECONDS = 0.02
"""Seconds, at the end, between two checks whether the daemon asks for something."""
FAREWELL_SECONDS = 1.0
"""Time for which a run that ended because its optimizer is gone tries to say so."""
HANGS = "hangs"
"""What is reported as not seen without a heartbeat."""
GREETING, STREAMING, RECORDING = "saying hello", "streaming", "recording to "
"""States: connected, without an answer yet; the daemon has answered; before the name of the file."""
BACKLOG_BYTES = 1024 * 1024
"""Most bytes of frames that wait for a slow reader; above it the steps wait in the queue."""


class SenderSession(Protocol):
    """What the sender asks the run that it sends for, on the sender's thread."""

    def identify(self) -> wire.Identity | None:
        """Return who this rank is; None as long as that is not known."""

    def greet(self, identity: wire.Identity, first: int | None) -> Iterable[wire.Message]:
        """Return the hello and the layer tables. `first`: the first seq that is queued, if there is one."""

    def make_farewell(self) -> wire.Goodbye | None:
        """Return the goodbye once there is nothing left to watch; None before."""

    def make_heartbeat_writer(self) -> HeartbeatWriter | None:
        """Return a new heartbeat writer; None if there can be no heartbeat: then asked again before each connection."""


class Sender(threading.Thread):
    """Sends to the daemon what one run measures.

    Other threads call `submit`, `post`, `wake`, `greet_again` and `stop`, and at a fork `halt` and `abandon`.
    """

    def __init__(
        self,
        session: SenderSession,
        *,
        daemon_locator: DaemonLocator,
        receive: Callable[[wire.ToRank], None],
        governor: Governor,
        unseen: Unseen,
    ) -> None:
        """`receive` gets what the daemon sends; `unseen` records what fails here."""
        super().__init__(name="sentinel-sender", daemon=True)
        self.state = "looking for the daemon"
        """The present state, in words."""
        self.done = False
        """Whether nothing is accepted any more."""
        self.has_answered = False
        """Whether a daemon has taken this run."""
        self.last_state = ""
        """The state in which this thread ended; empty before."""
        self.left_record = False
        """Whether the end of the run is in a file for the daemon."""
        self.is_cut_off = False
        """Whether the daemon that watched the run is gone, and none has answered since."""
        self.queue = StepQueue()
        self._session, self._receive, self._governor, self._unseen = session, receive, governor, unseen
        self.heartbeat_writer = session.make_heartbeat_writer()
        """Writes the heartbeat; None as long as there can be none."""
        self._daemon_locator = daemon_locator
        self._connection: DaemonConnection | None = None
        self._messages: deque[wire.Message] = deque(maxlen=1024)
        self._causes: deque[wire.Message] = deque(maxlen=64)
        self._stages: deque[wire.StageBegan] = deque(maxlen=64)
        self._unsent: list[QueuedFrame] = []
        self._goodbye: wire.Goodbye | None = None
        self._goodbye_said = False
        self._deadline = self._flush_at = 0.0
        self._urgent = self._greet_again = False
        self._together = False
        """Whether the node has other ranks."""
        self._tables: set[str] = set()
        self._pace_sent: wire.Pace | None = None
        """The pace that was sent last."""
        self._wake_sender: socket.socket | None = None
        self._wake_receiver: socket.socket | None = None

    def submit(self, record: Record, *, urgent: bool = False) -> None:
        """Queue a step, unless nothing is accepted any more."""
        if self.done:
            return
        self.queue.put(record)
        if urgent:
            self.wake()

    def post(self, message: wire.Message) -> None:
        """Send a message without delay, after the queued steps.

        A provenance goes before them: so the alert that one of them raises has its cause, also if the daemon came late
        and all of them wait. A stage goes before its first step, whether that is queued by then or not.
        """
        if not self.done:
            first = isinstance(message, wire.Collected) and message.what == "provenance"
            if isinstance(message, wire.StageBegan):
                self._stages.append(message)
            else:
                (self._causes if first else self._messages).append(message)
            self.wake()

    def wake(self) -> None:
        """Send now what is queued."""
        self._urgent = True
        wake_sender = self._wake_sender
        if wake_sender is not None:
            with contextlib.suppress(OSError):  # the thread is awake, or gone
                wake_sender.send(b"!", NO_SIGNAL)

    def greet_again(self) -> None:
        """Send the hello again, as it has changed."""
        self._greet_again = True

    def stop(self, goodbye: wire.Goodbye, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Send what is queued and the goodbye, for at most `timeout` seconds.

        `meanwhile` is called while waiting for the daemon, which may ask for evidence.
        """
        self._deadline = time.monotonic() + timeout
        self._goodbye = goodbye
        self.wake()
        until = self._deadline + INTERVAL_SECONDS
        while self.is_alive() and threading.current_thread() is not self and (left := until - time.monotonic()) > 0:
            meanwhile()
            self.join(min(left, LAST_WORDS_POLL_SECONDS))

    def halt(self) -> None:
        """Stop, before a fork and on the thread that forks, what has a thread of its own in C."""
        heartbeat_writer = self.heartbeat_writer
        if heartbeat_writer is not None:
            heartbeat_writer.stacks.halt()

    def abandon(self) -> None:
        """Close in a forked child: the thread does not exist there, and the sockets are the parent's."""
        self.done, self.state = True, "forked"
        for end in (self._wake_sender, self._wake_receiver):
            if end is not None:
                end.close()
        if self._connection is not None:
            self._connection.close()
        self._daemon_locator.abandon()
        if self.heartbeat_writer is not None:
            self.heartbeat_writer.abandon()

    def run(self) -> None:
        """Run the sender's rounds until the run is over. The body of the thread."""
        try:
            # poll needs no file descriptor, and there are two sockets to wait for.
            with selectors.PollSelector() as selector:
                heard = False
                while self._turn(selector, heard):
                    heard = False
                    if self._wake_receiver is None:
                        self._open_wake_receiver(selector)
                    for key, events in selector.select(self._pause()):
                        if key.fileobj is self._wake_receiver:
                            self._wake_receiver.recv(4096)
                        else:
                            heard = bool(events & selectors.EVENT_READ)
                try:
                    self._leave_record()
                except (OSError, ConfigError) as error:
                    faults.say(f"the last steps are not judged: {error}")
        except Exception:
            self.state = "unmonitored after an internal fault"
            faults.swallow("the sender", "unmonitored")
        finally:
            self._end()

    def _open_wake_receiver(self, selector: selectors.BaseSelector) -> None:
        """Let other threads wake this one. If no descriptor is left, it wakes by itself, and tries again."""
        with contextlib.suppress(OSError):
            wake_sender, self._wake_receiver = socket.socketpair()
            wake_sender.setblocking(False)
            self._wake_receiver.setblocking(False)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            self._wake_sender = wake_sender

    def _pause(self) -> float:
        """Return the longest time to the next round, in seconds."""
        if self._goodbye is not None:  # the daemon may be about to serve, and the deadline is near
            return LAST_WORDS_POLL_SECONDS
        return min(self._interval(), BEAT_SECONDS)

    def _interval(self) -> float:
        if self._governor.attentive:
            return min(ATTENTIVE_SECONDS, INTERVAL_SECONDS)
        return min(TOGETHER_SECONDS, INTERVAL_SECONDS) if self._together else INTERVAL_SECONDS

    def _turn(self, selector: selectors.BaseSelector, heard: bool) -> bool:
        """Do one round; `heard`: the daemon has sent something. Returns False after the last round."""
        self._beat()
        if self._goodbye is None and (goodbye := self._session.make_farewell()) is not None:
            self._goodbye, self._deadline = goodbye, time.monotonic() + FAREWELL_SECONDS
        try:
            if self._connection is None:
                self._connect(selector)
            if self._connection is not None:
                self._exchange(self._connection, heard)
                self._listen(selector, self._connection)
        except (OSError, MemoryError):
            self._lose(selector)
        except (ConfigError, ProtocolError) as error:
            if is_passing(error):
                self._lose(selector)
            else:
                self._give_up(str(error))
        self._governor.record_sender_time(time.thread_time(), time.monotonic())
        return not (self.done or self._is_over())

    def _beat(self) -> None:
        if self.heartbeat_writer is not None:
            try:
                self.heartbeat_writer.beat()
            except Exception:
                if self._unseen.record_failure(HANGS, "the heartbeat", "hangs are not seen"):
                    heartbeat_writer, self.heartbeat_writer = self.heartbeat_writer, None
                    heartbeat_writer.close()  # else it would look as if the GIL were held
            else:
                if self._unseen.pausing:
                    self._unseen.restore(HANGS)

    def _listen(self, selector: selectors.BaseSelector, connection: DaemonConnection) -> None:
        """Wait until the daemon takes more, as long as there is more to send."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlog else 0)
        if selector.get_key(connection.socket).events != wanted:
            selector.modify(connection.socket, wanted)

    def _is_over(self) -> bool:
        if self._goodbye is None:
            return False
        handed_over = self._goodbye_said and self._connection is not None and self._connection.settled
        return handed_over or time.monotonic() >= self._deadline

    def _connect(self, selector: selectors.BaseSelector) -> None:
        identity = self._session.identify()
        last = self._goodbye is not None
        if self.heartbeat_writer is None:
            self.heartbeat_writer = self._session.make_heartbeat_writer()
        connection = self._daemon_locator.dial(identity, last=last) if identity is not None else None
        if connection is None or identity is None:
            return
        self._connection = connection
        self.state = f"{RECORDING}{connection.path}" if isinstance(connection, Recorder) else GREETING
        selector.register(connection.socket, selectors.EVENT_READ)
        if self.heartbeat_writer is not None:
            connection.carry(self.heartbeat_writer.descriptors)
        self._begin(connection, identity)

    def _begin(self, connection: DaemonConnection, identity: wire.Identity, *, ended: bool = False) -> None:
        """Send the hello, and what an earlier connection did not deliver."""
        self._tables.clear()
        self._pace_sent = None
        self._say_hello(connection, identity, ended=ended)
        connection.adopt(self._unsent)
        self._unsent = []

    def _say_hello(self, connection: DaemonConnection, identity: wire.Identity, *, ended: bool = False) -> None:
        self._greet_again = False
        self._together = identity.world_size > 1 and identity.local_world_size != 1
        for message in self._session.greet(identity, self._first_seq()):
            if isinstance(message, wire.LayerTable):
                self._tables.add(message.digest)
            elif ended and isinstance(message, wire.Hello):
                message = msgspec.structs.replace(message, ended=True)
            connection.send(message, lasting=False)

    def _first_seq(self) -> int | None:
        """Return the seq of the first step that will be sent; None: that of the next step that is taken."""
        again = [frame.seq for frame in self._unsent if frame.seq is not None]
        if again:
            return again[0]
        waiting = self.queue.head
        return waiting.seq if waiting is not None and waiting.stream == 0 else None

    def _exchange(self, connection: DaemonConnection, heard: bool) -> None:
        if heard:
            for message in connection.receive():
                self._take(message)
        if self._greet_again and (identity := self._session.identify()) is not None:
            self._say_hello(connection, identity)
        now = time.monotonic()
        if self._urgent or self._goodbye is not None or now >= self._flush_at:
            self._urgent, self._flush_at = False, now + self._interval()
            self._encode(connection)
        connection.flush()

    def _take(self, message: wire.ToRank) -> None:
        if isinstance(message, wire.Refused):
            self.state = f"refused: {message.reason}"
            self._give_up(f"the daemon refused this run: {message.reason}")
            return
        if isinstance(message, wire.Kept):
            if self._connection is not None:
                self._connection.confirm(message.frames)
            return
        if isinstance(message, wire.Welcome):
            self._daemon_locator.record_answer()
            self.state, self.is_cut_off, self.has_answered = STREAMING, False, True
            if self._connection is not None:
                self._connection.keeps = message.keeps
            if self.heartbeat_writer is not None:
                self.heartbeat_writer.unsignalled = not message.signals
        try:
            self._receive(message)
        except Exception:
            name = f"receiving {type(message).__name__}"
            self._unseen.swallow(name, name, "without it")
        else:
            if self._unseen.pausing:
                self._unseen.recover(f"receiving {type(message).__name__}")

    def _encode(self, connection: DaemonConnection) -> None:
        self._send_all(connection, self._causes)
        while connection.backlog < BACKLOG_BYTES and (records := self.queue.take(LARGEST)):
            for record in records:
                if record.block and record.table.digest not in self._tables:
                    self._tables.add(record.table.digest)
                    connection.send(record.table)
            for part in self._by_stage(connection, records):
                batch = make_batch(
                    part, dropped=self.queue.dropped, skipped=self._unseen.skipped, pace=self._new_pace()
                )
                connection.send(batch, seq=part[0].seq if part[0].stream == 0 else None)
        if self.queue.head is None:
            self._send_all(connection, self._stages)
        self._send_all(connection, self._messages)
        waiting = self.queue.head or self._messages or self._causes or self._stages
        if self._goodbye is not None and not waiting and not self._goodbye_said:
            self._goodbye_said = True
            connection.send(self._goodbye, lasting=False)  # sent again if this connection breaks

    def _by_stage(self, connection: DaemonConnection, records: list[Record]) -> Iterator[list[Record]]:
        """Yield `records` in parts, cut where a stage begins; its message is sent between the parts."""
        while self._stages:
            at = next((place for place, record in enumerate(records) if record.seq >= self._stages[0].seq), None)
            if at is None:
                break
            if at:
                yield records[:at]
            connection.send(self._stages.popleft())
            records = records[at:]
        yield records

    def _send_all(self, connection: DaemonConnection, messages: deque[Any]) -> None:
        while messages and connection.backlog < BACKLOG_BYTES:
            message = messages.popleft()
            try:
                # A daemon that comes after this one asks for the meeting point again, and a secret does not wait for
                # it.
                connection.send(message, lasting=not isinstance(message, wire.MeetingFound))
            except Exception:  # too large, or of a type that msgpack cannot encode
                name = f"sending {type(message).__name__}"
                self._unseen.swallow(name, name, "without it")
            else:
                if self._unseen.pausing:
                    self._unseen.recover(f"sending {type(message).__name__}")

    def _new_pace(self) -> wire.Pace | None:
        pace = self._governor.pace
        if pace == self._pace_sent:
            return None
        self._pace_sent = pace
        return pace

    def _leave_record(self) -> None:
        """Write what the daemon lacks into a file, which it reads once it serves.

        Needed if the run ended before its daemon came, or before the daemon took everything.
        """
        goodbye, connection, identity = self._goodbye, self._connection, self._session.identify()
        if goodbye is None or self.done or identity is None:
            return
        if connection is not None:
            if self._goodbye_said and not connection.backlog:  # the kernel has it for the daemon
                return
            self._unsent, self._connection = connection.close(), None
        record = self._daemon_locator.open_record(identity)
        if record is None:
            return
        self._goodbye_said = False
        self._begin(record, identity, ended=True)
        while not self._goodbye_said:
            head = self.queue.head
            self._encode(record)
            record.flush()
            if self.queue.head is head:  # what is on a device may never arrive
                break
        if not self._goodbye_said:
            record.send(goodbye)
            record.flush()
        record.close()
        self._daemon_locator.publish_record(record)
        self.left_record = True

    def _lose(self, selector: selectors.BaseSelector) -> None:
        """Handle a broken connection; what the daemon did not take is kept for the next."""
        if self._connection is None:
            return
        self.done = self._goodbye_said and self._connection.settled
        if self._connection.socket in selector.get_map():  # it may have failed just then
            selector.unregister(self._connection.socket)
        self._unsent = self._connection.close()
        self._connection, self.state, self._goodbye_said = None, "reconnecting", False
        self.is_cut_off = True
        self._governor.clear_orders()
        self._daemon_locator.record_loss()

    def _give_up(self, reason: str) -> None:
        faults.say(f"{reason}; training goes on unmonitored")
        self.done = True
        if not self.state.startswith("refused"):
            self.state = f"unmonitored: {reason}"

    def _end(self) -> None:
        self.done, self.last_state = True, self.state
        if self._goodbye is not None:
            self.state = "detached"
        connection, self._connection = self._connection, None
        self.queue.clear()
        for part in (connection, self._daemon_locator, self._wake_sender, self._wake_receiver, self.heartbeat_writer):
            if part is not None:  # a program that has closed all descriptors has closed ours, too
                with faults.swallow_faults("the end of the sender", "some of it may still be open"):
                    part.close()
