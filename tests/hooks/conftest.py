"""A daemon made of one thread, and the rule that a fault of ours that was swallowed is a failed test."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from sentinel import wire
from sentinel._version import __version__
from sentinel.hooks.core import fault_guard, governor, opening
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.loop import forward_passes
from sentinel.hooks.measure import probe
from sentinel.hooks.session import registry
from sentinel.hooks.step import loss_outliers
from sentinel.hooks.transport.sender import Sender

WAIT = 20.0
M = TypeVar("M", bound=wire.Message)


class FakeDaemon:
    """Listens on a Unix socket, welcomes every hello and keeps what it is sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answer: Callable[[wire.Hello], bytes] = lambda _: wire.frame(wire.Welcome(version=__version__))
        """What a hello is answered with."""
        self.reading = threading.Event()
        """Cleared: it accepts connections and never reads."""
        self.reading.set()
        self.messages: list[wire.FromRank] = []
        self.hung_up = False
        """A connection came to its end."""
        self._changed = threading.Condition()
        self._peers: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def send(self, message: wire.Message) -> None:
        """To the rank that connected last."""
        self._peers[-1].sendall(wire.frame(message))

    def hang_up(self) -> None:
        """Break all connections."""
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:  # its thread has closed it
                pass

    def close(self) -> None:
        self.reading.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._threads[0].join(WAIT)  # a connection that it accepts at the last moment is to be closed too
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(WAIT)

    def wait(self, condition: Callable[[], object]) -> None:
        """Until a message makes `condition` true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT), f"got {[type(m).__name__ for m in self.messages]}"

    def ended(self) -> wire.Goodbye:
        """Wait for the goodbye, which is the last message."""
        self.wait(lambda: self.of(wire.Goodbye))
        return self.of(wire.Goodbye)[-1]

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in list(self.messages) if isinstance(message, kind)]

    def series(self, signal: str, stream: int = 0) -> dict[int, float]:
        """seq -> value of one signal."""
        found: dict[int, float] = {}
        for batch in self.of(wire.Batch):
            if batch.stream == stream and signal in batch.columns:
                seqs, column = wire.unpack_column("q", batch.seqs), batch.columns[signal]
                rows = wire.unpack_column("H", column.rows) if column.rows else range(len(seqs))
                found.update(
                    {seqs[row]: value for row, value in zip(rows, wire.unpack_column("d", column.values), strict=True)}
                )
        return found

    def layers(self, signal: str, stream: int = 0) -> dict[int, dict[str, float]]:
        """seq -> layer -> value of one layer signal."""
        tables = {table.digest: table for table in self.of(wire.LayerTable)}
        found: dict[int, dict[str, float]] = {}
        for batch in self.of(wire.Batch):
            for block in batch.layers if batch.stream == stream else ():
                names = [layer.name for layer in tables[block.table].layers]
                rows = wire.unpack_column("I", block.layers) if block.layers else range(len(names))
                values = wire.unpack_column("f", block.stats[signal])
                found[block.seq] = {names[row]: value for row, value in zip(rows, values, strict=True)}
        return found

    def seqs(self, stream: int = 0) -> list[int]:
        return [s for b in self.of(wire.Batch) if b.stream == stream for s in wire.unpack_column("q", b.seqs)]

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,), daemon=True))
            self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        frames = wire.Frames()
        with peer:
            try:
                while self.reading.wait() and (chunk := peer.recv(65536)):
                    for body in frames.feed(chunk):
                        self._take(peer, wire.from_rank(body))
            except OSError:
                pass
        with self._changed:
            self.hung_up = True
            self._changed.notify_all()

    def _take(self, peer: socket.socket, message: wire.FromRank) -> None:
        if isinstance(message, wire.Hello):  # before anybody who waits for it can send something else
            try:
                peer.sendall(self.answer(message))
            except OSError:  # a short run has hung up by now; what it sent is still there to be read
                pass
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()


@pytest.fixture
def daemon(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A daemon that `attach` finds."""
    made = FakeDaemon(private_places / "d.sock")
    monkeypatch.setenv("SENTINEL_ADDRESS", f"unix:{made.path}")
    yield made
    made.close()


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "governed: decides how often to sample from the first steps on, as users do")
    config.addinivalue_line("markers", "faults: swallows internal faults, which is what it tests")


@pytest.fixture(autouse=True)
def known_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 50 steps are sampled as `FIRST` says: what a busy machine measures does not decide a test."""
    if request.node.get_closest_marker("governed") is None:
        monkeypatch.setattr(governor, "DECISIONS", (50,))
        monkeypatch.setattr(governor, "MEASURED", 0)
        monkeypatch.setattr(opening, "SHARE", 0.0)


@pytest.fixture(autouse=True)
def swallowed(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Faults of ours that did not reach the loop. They fail a test that is not marked `faults`."""
    fault_guard._told.clear()
    kept = _Kept()
    logger = logging.getLogger("sentinel.hooks")
    logger.addHandler(kept)
    yield kept.texts
    for session in list(registry._sessions):
        session.end(wire.Goodbye(reason="detach"), 0.0)
    registry._sessions.clear()
    for thread in threading.enumerate():
        if isinstance(thread, Sender):  # the next test's daemon must not hear of this test's runs
            thread.stop(wire.Goodbye(reason="detach"), 0.0)
            thread.join(WAIT)
    logger.removeHandler(kept)
    if request.node.get_closest_marker("faults") is None:
        assert not kept.texts


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth step is looked at whole, whatever it costs, and a model is soon known."""
    monkeypatch.setattr(governor, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
    monkeypatch.setattr(governor, "WHOLE", 4)
    monkeypatch.setattr(probe, "EARLY", 4)
    monkeypatch.setattr(Governor, "_decide", lambda self: None)
    monkeypatch.setattr(forward_passes, "FIRST_CALLS", 6)
    monkeypatch.setattr(loss_outliers, "NONFINITE_STEPS", 4)
    monkeypatch.setattr(forward_passes, "LOOKS", 2)
