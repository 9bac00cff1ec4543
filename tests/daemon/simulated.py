"""A simulated rank that speaks the wire protocol and trains nothing, and a real daemon process for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from sentinel import wire
from sentinel.node import paths
from tests.zygote import DAEMON, ForkedProcess, start_zygote

Message = TypeVar("Message")

DEADLINE_SECONDS = 60.0
"""How long to wait for what should come at once, in seconds: starting a process on a shared machine may take 30 s."""


class SimulatedRank:
    """A rank with one connection to a daemon."""

    def __init__(
        self, path: Path, rank: int = 0, world: int = 1, *, run_id: str = "r1", session: str = "", on_a_node: int = 0
    ) -> None:
        """Connect to the daemon; `on_a_node` is the number of ranks on each node, 0 if all are on one."""
        node = rank // on_a_node if on_a_node else 0
        self.identity = wire.Identity(
            run="train", run_id=run_id, rank=rank, world_size=world, pid=os.getpid(), session=session or f"s{rank}",
            node=node, hostname=f"host{node}" if on_a_node else "",
        )  # fmt: skip
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(DEADLINE_SECONDS)
        self.connection.connect(str(path))
        self._frames = wire.Frames()
        self.arrived: list[wire.ToRank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection without a goodbye, as a killed process does."""
        self.connection.close()

    def say(self, message: wire.Message) -> None:
        self.connection.sendall(wire.frame(message))

    def send_raw(self, data: bytes) -> None:
        self.connection.sendall(data)

    def hello(self, *, rollback: wire.RollbackTerms | None = None, next_seq: int = 0, step_offset: int = 0) -> None:
        self.say(
            wire.Hello(
                version="test", identity=self.identity, rollback=rollback, next_seq=next_seq, step_offset=step_offset
            )
        )
        self.expect(wire.Welcome)

    def steps(self, first: int, losses: list[float], *, began: float = 1e9, **columns: list[float]) -> None:
        """Report steps `first`, `first + 1`, ... with these losses, a second apart; `began` is the time of step 0."""
        seqs = range(first, first + len(losses))
        self.say(
            wire.Batch(
                seqs=array("q", seqs).tobytes(),
                times=array("d", [began + seq for seq in seqs]).tobytes(),
                columns={
                    name: wire.Column(array("d", values).tobytes())
                    for name, values in {"loss": losses, **columns}.items()
                },
            )
        )

    def ask(self, what: str) -> Any:
        """Return the answer that the command line would get."""
        self.say(wire.Query(what=what))
        return self.expect(wire.Answer).content

    def list_arrived(self, kind: type[Message]) -> list[Message]:
        """Return the messages of a kind that have come and that `expect` has not returned."""
        self.ask("status")
        return [message for message in self.arrived if isinstance(message, kind)]

    def expect(self, kind: type[Message]) -> Message:
        """Wait for the next message of a kind, and return it; others that come before it are kept."""
        for index, message in enumerate(self.arrived):
            if isinstance(message, kind):
                del self.arrived[index]
                return message
        deadline = time.monotonic() + DEADLINE_SECONDS
        while chunk := self.connection.recv(65536):
            assert time.monotonic() < deadline, f"no {kind.__name__}; the daemon said {self.arrived}"
            found = [wire.to_rank(body) for body in self._frames.feed(chunk)]
            self.arrived += found
            if any(isinstance(message, kind) for message in found):
                return self.expect(kind)
        raise AssertionError(f"the daemon closed the connection before a {kind.__name__}; it said {self.arrived}")


@contextlib.contextmanager
def daemon_process(*options: str, run_id: str = "r1", **limits: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Run a real daemon; yield its socket's path and its process, and kill it at the end if it is still alive.

    It has normal priority (`--nice 0`) even while tests keep all cores busy, unless `options` say otherwise.
    """
    directory = paths.run_directory(run_id)
    path = paths.socket_path(directory)
    command = [sys.executable, "-m", "sentinel", "daemon", "--nice", "0", "--directory", str(directory), *options]
    how: dict[str, Any] = {"cwd": "/", "stderr": subprocess.PIPE, "env": {**os.environ, **limits}}
    process = (
        subprocess.Popen(command, **how)  # packages there must be found when the daemon imports its own
        if "PYTHONPATH" in limits
        else ForkedProcess(command, zygote=start_zygote(DAEMON), **how)
    )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not _listens(path):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline, "the daemon does not listen"
            time.sleep(0.02)
        yield path, process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that ends by itself, and return its exit status."""
    return process.wait(DEADLINE_SECONDS)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
