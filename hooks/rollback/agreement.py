"""How the ranks agree to roll back, or to leave: all at the exit of one step, or none, whichever process fails.

    daemon -> Prepare(id, at, to)     each rank binds itself to stop at the exit of step `at`, or says it is late; it
                                      is silent while it is bound by another
    daemon -> Commit(id)              all did: restore, or leave
              Abort(id)               not all did: go on as if nothing had been asked
    rank r     each rank that has the commit writes what it is about to restore, and whether its snapshot is sound
    decided    `go` once all have, or why not: written once, by the first rank that gets there; later ones read it

The promise (`TwoPhaseCommit`) costs the loop one comparison per step. Without it, ranks that are a step apart would
restore at different steps and then wait for each other without end in a collective.

The daemon's commit goes out rank by rank, and the daemon may die between two of them. So neither it nor any process
decides (`RankConsensus`): what is written is kept where it outlives its writer, on one node in the run's runtime
directory (`DirectoryBallot`). No collective is used: it may end on one rank and time out on another, and making its
group waits for each lost rank in turn. The ranks of several nodes share no such directory. They write into the process
group's store (`StoreBallot`), which ends with its host. If that happens just after `go`, some ranks have read it, and
others can never learn of it: these do not train on (`InDoubt`).

A rank that has waited too long, for the verdict or for the others, writes why; if `go` was written before, it restores
with the rest. `go` needs the word of every rank: a rank that could not write it cannot be left behind.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core.identity import place, spans_nodes
from sentinel.hooks.core.store_client import StoreClient, StoreLost
from sentinel.node import locks, paths

NOWHERE = -1


class TwoPhaseCommit:
    """The promise of one rank to stop at a step; at most one at a time.

    `prepare` and `decide` are called on the receiving thread, the rest on the training thread.
    """

    def __init__(self) -> None:
        self.exited = NOWHERE
        """The last step whose exit was reached."""
        self._target = NOWHERE
        self._prepare: wire.Prepare | None = None
        self._in_time = False
        """Whether the daemon got the answer that the promise can be kept."""
        self._verdict: wire.Commit | None = None
        self._changed = threading.Condition()

    @property
    def bound(self) -> bool:
        """Whether there is a promise."""
        return self._prepare is not None

    @property
    def id(self) -> int:
        """Id of the promise; 0: there is none."""
        prepare = self._prepare
        return prepare.id if prepare is not None else 0

    def prepare(self, message: wire.Prepare) -> wire.Prepared | None:
        """Bind this rank to an order; return the answer.

        A refusal without a reason: the step is over already, ask for a later one. None: the rank is bound by another
        order, of a coordinator that no longer exists. The daemon asks again after a time-out; a refusal would be final.
        """
        with self._changed:
            if self._prepare is not None:
                return None
            self._prepare, self._verdict, self._in_time = message, None, False
        # The order of these operations matters. Here the target is written and then `exited` is read; `reach_step`
        # writes `exited` and then reads the target. Whatever the interleaving, one of the two sees what the other
        # wrote: a rank that finds here that it is in time cannot run past `at` unseen. If `exited` were read first, the
        # loop could pass between.
        self._target = message.at
        in_time = self._in_time = self.exited < message.at
        if not in_time:
            self._release(message.id)  # the loop may have seen the target at the last moment, and be waiting
        return wire.Prepared(id=message.id, ok=in_time, seq=self.exited)

    def decide(self, verdict: wire.Commit | wire.Abort) -> None:
        """Pass on the verdict, if it is still waited for."""
        if isinstance(verdict, wire.Abort):
            self._release(verdict.id)
            return
        with self._changed:
            if self._prepare is not None and self._prepare.id == verdict.id:
                self._verdict = verdict
                self._changed.notify_all()

    def reach_step(self, seq: int) -> bool:
        """Note that the loop is at the exit of step `seq`. Returns whether it must wait there, or should have
        before."""
        self.exited = seq
        return NOWHERE < self._target <= seq

    @property
    def missed(self) -> wire.Prepare | None:
        """A promise that could be kept and whose step went by: a keyboard interrupt skipped the exit of that step."""
        mine = self._prepare
        return mine if mine is not None and self._in_time and mine.at < self.exited else None

    @property
    def due(self) -> wire.Prepare | None:
        """The promise whose step the present one is; None if there is none."""
        mine = self._prepare
        return mine if mine is not None and mine.at == self.exited else None

    def break_off(self, promise: wire.Prepare) -> None:
        """Drop a promise that will not be kept."""
        self._release(promise.id)

    def wait(self, seconds: float) -> tuple[wire.Prepare | None, wire.Commit | None]:
        """Wait for the verdict, at the promised step. Returns (promise, None) at the time-out, (None, None) after an
        abort."""
        with self._changed:
            mine = self._prepare
            # Since `reach_step` looked, the promise may have been aborted and a later step promised instead.
            if mine is None or mine.at != self.exited:
                return None, None
            self._changed.wait_for(lambda: self._prepare is not mine or self._verdict is not None, seconds)
            if self._prepare is not mine:
                return None, None
            verdict = self._verdict
            self._clear()
            return mine, verdict

    def _release(self, promise: int) -> None:
        with self._changed:
            if self._prepare is not None and self._prepare.id == promise:
                self._clear()
                self._changed.notify_all()

    def _clear(self) -> None:
        self._prepare, self._verdict, self._target = None, None, NOWHERE


MOST_SECONDS = 50.0
"""Longest wait for the other ranks; with the wait for the verdict before it, a minute.

It is shorter than the time-outs of process groups (NCCL 10 min, gloo 30 min): the ranks that go on wait for those that
wait here.
"""
_GO = "go"
_DECIDED = "decided"
_POLL_SECONDS_LATER = 0.02
_MOST_CHARACTERS = 200
_PREFIX = "sentinel/rollback/"


class InDoubt(Exception):
    """Whether the other ranks restore cannot be found out: this rank said that it is ready, and then lost the store."""


class Ballot(Protocol):
    """Words by name, which ranks write once and all can read. What is written stays."""

    poll_seconds: float
    """Time between two reads, as long as the others are expected soon."""

    def write(self, name: str, text: str) -> str:
        """Write a word, unless it is there. Returns why it could not be written; empty if it was."""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """Return those of the words that are there, by name."""

    def close(self) -> None:
        """Release what the words are kept in."""


class DirectoryBallot:
    """Keeps the words in the run's runtime directory, which all ranks of a node share. It outlives its writers.

    Each word is a symbolic link that points nowhere. Making one is atomic, fails if it exists, and stores the text with
    it; neither making nor reading it takes a file descriptor.
    """

    poll_seconds = 0.001

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError or OSError if the directory cannot be used."""
        paths.private_directory(directory)
        # As long as a rank holds it, no daemon takes the directory for a leftover.
        self._directory, self._lock = directory, locks.hold(directory, locks.RUN, shared=True)
        if self._lock is None:
            raise ConfigError(f"{directory} is being cleared")

    def write(self, name: str, text: str) -> str:
        try:
            os.symlink(text[:_MOST_CHARACTERS], self._path(name))
        except FileExistsError:
            pass
        except OSError as error:
            return error.strerror or repr(error)
        return ""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        return {name: word for name in names if (word := self._read(name))}

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _read(self, name: str) -> str:
        try:
            return os.readlink(self._path(name))
        except OSError:
            return ""

    def _path(self, name: str) -> Path:
        return self._directory / f"{locks.AGREEMENT}{name}"


class StoreBallot:
    """Keeps the words in the store of the process group, which ranks of all nodes reach. It ends with its host."""

    poll_seconds = 0.02

    def __init__(self) -> None:
        """Raises ConfigError if there is no store that can be reached."""
        try:
            self._client = StoreClient()
        except StoreLost as error:
            raise ConfigError(str(error)) from None

    def write(self, name: str, text: str) -> str:
        """See `Ballot`. Raises InDoubt if others may read the word although writing it failed."""
        self._ask(lambda store: store.compare_set(_key(name), "", text[:_MOST_CHARACTERS]))
        return ""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """See `Ballot`. Raises InDoubt."""

        def read(store: Any) -> dict[str, str]:
            keys = [_key(name) for name in names]
            if not store.check(keys):  # whether all of them are there
                keys = [key for key in keys if store.check([key])]
            words = store.multi_get(keys) if keys else []
            return {key.removeprefix(_PREFIX): word.decode() for key, word in zip(keys, words, strict=True)}

        found: dict[str, str] = self._ask(read)
        return found

    def close(self) -> None:
        del self._client

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return self._client.ask(question)
        except StoreLost as error:
            raise InDoubt(str(error)) from None


def _key(name: str) -> str:
    return _PREFIX + name


class RankConsensus:
    """Decides with the other ranks, for one rank, whether all do what was promised.

    `impossible` and `close` are called on the thread that receives or detaches, the rest at the exit of the promised
    step, on the training thread.
    """

    def __init__(self, patience_seconds: float, find_directory: Callable[[], Path | None]) -> None:
        """`patience_seconds`: how long the other ranks are waited for, besides the time that a step takes.

        `find_directory`: returns the run's runtime directory, the same for all ranks; None as long as it is not known.
        """
        self._patience, self._find_directory = patience_seconds, find_directory
        self._ballot: Ballot | None = None
        self._place = (0, 1)
        """Rank and world size as read last: a script may end its process group before it leaves."""

    def impossible(self) -> str:
        """Return why the ranks cannot agree; empty if they can, or if there is only one."""
        _, world = place()
        if world == 1:
            return ""
        try:
            if spans_nodes():
                self._ballot = StoreBallot()  # made each time: a connection that was idle for hours may be dead
                return ""
            if self._ballot is not None:
                return ""
            directory = self._find_directory()
            if directory is None:
                return "the run's id is not known yet"
            self._ballot = DirectoryBallot(directory)
        except (ConfigError, OSError) as error:
            return f"the ranks cannot agree: {error}"
        return ""

    def withhold(self, promise: wire.Prepare) -> None:
        """Write that this rank goes on and has not said that it is ready: no rank restores, or leaves.

        Once it is written, the others need not wait.
        """
        rank, world = place()
        if world > 1:
            with contextlib.suppress(InDoubt):
                self._write(promise, _DECIDED, f"rank {rank} got no verdict")

    def ask_ranks(self, promise: wire.Prepare, sound: bool, step_seconds: float) -> str:
        """Return why the ranks do not restore, or leave; empty if all of them do. Called once the commit is there.

        Raises InDoubt if that can no longer be found out.
        """
        rank, world = self._place = place()
        if world == 1:
            return ""
        patience = min(self._patience + 4 * step_seconds, MOST_SECONDS)
        begun = time.monotonic()
        if fault := self._write(promise, f"rank-{rank}", f"{promise.to} {promise.at} {int(sound)}"):
            return f"rank {rank} could not say that it is ready ({fault})"
        said: dict[int, str] = {}
        while (waited := time.monotonic() - begun) < patience:
            awaited = {f"rank-{r}": r for r in range(world) if r not in said}
            words = self._read(promise, [_DECIDED, *awaited])
            if word := words.pop(_DECIDED, ""):
                break
            said |= {awaited[name]: text for name, text in words.items()}
            if len(said) == world and (word := self._decide(promise, _judge(promise, said))):
                break
            time.sleep(self._kept.poll_seconds if waited < 1 else _POLL_SECONDS_LATER)
        else:
            late = f"only {len(said)} of {world} ranks came to step {promise.at} within {patience:.3g} s"
            if not (word := self._decide(promise, late)):
                raise InDoubt("what was decided can be neither written nor read")
        return "" if word == _GO else word

    def await_ranks(self, promise: wire.Prepare, seconds: float) -> None:
        """Say that this rank is ready to end, and wait until all leaving ranks are, for `seconds` at most."""
        rank, world = self._place
        if world == 1:
            return
        awaited, until = {f"ends-{r}" for r in range(world)}, time.monotonic() + seconds
        with contextlib.suppress(InDoubt):  # the rank that has the store may be the first to see that all are ready
            self._write(promise, f"ends-{rank}", _GO)
            while awaited and time.monotonic() < until:
                awaited -= self._read(promise, sorted(awaited)).keys()
                time.sleep(_POLL_SECONDS_LATER if awaited else 0)

    def close(self) -> None:
        """Release what the words are kept in."""
        ballot, self._ballot = self._ballot, None
        if ballot is not None:
            ballot.close()

    @property
    def _kept(self) -> Ballot:
        assert self._ballot is not None  # nothing is promised before `impossible` set it
        return self._ballot

    def _decide(self, promise: wire.Prepare, word: str) -> str:
        """Write the word, unless one is written; return the word that holds. Empty: none, it cannot be written."""
        self._write(promise, _DECIDED, word)
        return self._read(promise, [_DECIDED]).get(_DECIDED, "")

    def _write(self, promise: wire.Prepare, name: str, text: str) -> str:
        return self._kept.write(f"{promise.id}-{name}", text)

    def _read(self, promise: wire.Prepare, names: Sequence[str]) -> dict[str, str]:
        before = f"{promise.id}-"
        found = self._kept.read_all([before + name for name in names])
        return {name.removeprefix(before): text for name, text in found.items()}


def _judge(promise: wire.Prepare, said: dict[int, str]) -> str:
    """Return the verdict from what all ranks said: every rank comes to the same."""
    told = [tuple(map(int, words.split())) for _, words in sorted(said.items())]
    meant = sorted({(to, at) for to, at, _ in told})
    if len(meant) > 1:
        return f"the ranks mean different snapshots or steps: {list(meant[0])} to {list(meant[-1])}"
    return _GO if all(sound for *_, sound in told) else f"the snapshot of step {promise.to} is not sound on every rank"
