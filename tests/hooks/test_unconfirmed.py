"""Messages that the daemon has not confirmed are held for the next daemon; their memory is freed once it has them."""

from __future__ import annotations

import mmap
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.hooks.core.host_memory import resident_bytes
from sentinel.hooks.transport.connection import DaemonConnection

FRAMES, LETTERS = 35, 110_000
TEXT = "x" * LETTERS


class Reader:
    """Takes all that comes, and keeps only the ids of the replies."""

    def __init__(self, path: Path) -> None:
        self.path, self.ids = path, list[int]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            frames = wire.Frames()
            with peer:
                while chunk := peer.recv(65536):
                    for reply in map(wire.from_rank, frames.feed(chunk)):
                        assert isinstance(reply, wire.Reply)
                        assert reply.content == {"text": TEXT}
                        self.ids.append(reply.id)

    def close(self) -> None:
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join(10)
        self._listener.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path / "s")
    yield made
    made.close()


def flushed(connection: DaemonConnection) -> None:
    while connection.backlog:
        select.select([], [connection.socket], [], 10)
        connection.flush()


def handed_over(connection: DaemonConnection, frames: int) -> list[bytes]:
    """Send frames, and return objects that lie between them in the heap, as a training loop's own small ones do."""
    between: list[bytes] = []
    for number in range(frames):
        connection.send(wire.Reply(id=number, ok=True, content={"text": TEXT}))
        flushed(connection)
        between.append(bytes(LETTERS + 5000))
    return between


def test_memory_of_confirmed_messages_is_given_back_to_the_system(reader: Reader) -> None:
    connection = DaemonConnection(reader.path)
    between = handed_over(connection, FRAMES)
    before = resident_bytes()
    connection.confirm(FRAMES)
    assert before - resident_bytes() > 0.7 * FRAMES * LETTERS
    connection.close()
    assert len(between) == FRAMES


def test_unconfirmed_messages_are_sent_on_the_next_connection(reader: Reader) -> None:
    first = DaemonConnection(reader.path)
    handed_over(first, 3)
    first.confirm(1)
    second = DaemonConnection(reader.path)
    second.adopt(first.close())
    flushed(second)
    assert [type(frame.data) for frame in second.close()] == [mmap.mmap, mmap.mmap]
    reader.close()
    assert reader.ids == [0, 1, 2, 1, 2]


def test_a_process_that_may_have_no_more_mappings(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def __new__(cls, *_: object, **__: object) -> Refused:
            raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", Refused)
    connection = DaemonConnection(reader.path)
    handed_over(connection, 2)
    assert [type(frame.data) for frame in connection.close()] == [bytes, bytes]
