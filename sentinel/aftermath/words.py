"""Logs of several ranks, as launchers mix them: whose line it is, what timed out, which exception was the first.

Prefixes that are known: `7: ` (srun -l), `[rank7]:` (torch), `[default7]:` and `[7]:` (torchrun --tee), any of them one
after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from sentinel.flight import Collective, Flight, Group

_PREFIX = re.compile(r"^(?:(\d{1,6}): ?|\[(?:rank|default)?(\d{1,6})\]: ?|\[[a-z_]+(\d{1,6})\]: ?)")
_TIMEOUT = re.compile(
    r"\[Rank (\d+)\].*?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), "
    r"NumelIn=(\d+),.*?Timeout\(ms\)=(\d+)\)"
)
_STATUS = re.compile(
    r"PG ID (\d+) PG GUID \S*?\((\w*)\) Rank (\d+)\].*?last enqueued work: (\d+), last completed work: (\d+)"
)
_GLOO = re.compile(r"Timed out waiting (\d+)ms for (?:recv|send) operation")
_THREAD = re.compile(r"^Exception in thread (.+?):?$")
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$')
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$")
"""The last line of a traceback: the only one that is not indented."""
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/|^<frozen ")
_SENTENCE = re.compile(r"\.\s")
_LONGEST = 400
"""Characters of an exception's words that are kept."""


class Failure(msgspec.Struct, frozen=True):
    """An exception in a log."""

    error: str
    """Its type and its words."""
    place: str = ""
    """`file:line in function` of the innermost frame that is nobody's library, else the innermost."""
    thread: str = ""
    """Of which thread it was the end; empty: of the main thread, or it was printed."""
    order: int = 0
    """Which line it ends at: the first of all ranks comes first."""

    def __str__(self) -> str:
        return self.told(self.error)

    @property
    def brief(self) -> str:
        """With the first sentence of its words."""
        return self.told(_SENTENCE.split(self.error, maxsplit=1)[0])

    def told(self, error: str) -> str:
        """In words, with the error's given ones."""
        who = f"its thread {self.thread} ended with " if self.thread else "it raised "
        return f"{who}{error}" + (f", at {self.place}" if self.place else "")


class Said(msgspec.Struct):
    """What one rank's lines say."""

    flight: Flight | None = None
    """As its watchdog printed it, when it gave up."""
    failures: list[Failure] = []


def said(lines: Iterable[str], rank: int | None = None) -> dict[int, Said]:
    """By rank. `rank`: whose lines those without a prefix are; None: nobody's."""
    found: dict[int, Said] = {}
    readers: dict[int, _Traceback] = {}
    for order, line in enumerate(lines):
        whose, text = _whose(line.rstrip("\n"), rank)
        if whose is None:
            continue
        rank_said = found.setdefault(whose, Said())
        if (failure := readers.setdefault(whose, _Traceback()).feed(text, order)) is not None:
            rank_said.failures.append(failure)
        if (timeout := _TIMEOUT.search(text)) is not None and int(timeout[1]) == whose:
            rank_said.flight = rank_said.flight or _timed_out(timeout)
        elif (status := _STATUS.search(text)) is not None and int(status[3]) == whose and rank_said.flight is not None:
            rank_said.flight = _described(rank_said.flight, status)
    return found


def _whose(line: str, rank: int | None) -> tuple[int | None, str]:
    while (prefix := _PREFIX.match(line)) is not None:
        rank = int(next(each for each in prefix.groups() if each is not None))
        line = line[prefix.end() :]
    return rank, line


def _timed_out(match: re.Match[str]) -> Flight:
    seq, op, count, milliseconds = int(match[2]), match[3].lower(), int(match[4]), int(match[5])
    one = Collective(group="0", seq=seq, op=op, sizes=((count,),), timeout=milliseconds * 1e-3)
    return Flight({"0": Group("0", "", (), seq, seq - 1)}, (one,))


def _described(flight: Flight, match: re.Match[str]) -> Flight:
    """With the group's own name: the line after the time-out says it."""
    [one] = flight.collectives
    if int(match[4]) < one.seq:
        return flight
    group = Group(match[1], match[2], (), int(match[4]), int(match[5]))
    return Flight({group.name: group}, (msgspec.structs.replace(one, group=group.name),))


class _Traceback:
    """Follows one rank's lines through tracebacks."""

    def __init__(self) -> None:
        self._thread, self._frames, self._inside = "", list[str](), False

    def feed(self, line: str, order: int) -> Failure | None:
        if (thread := _THREAD.match(line)) is not None:
            self._thread = thread[1]
        elif line.startswith("Traceback (most recent call last)"):
            self._inside, self._frames = True, []
        elif self._inside and (frame := _FRAME.match(line)) is not None:
            self._frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
        elif self._inside and (error := _ERROR.match(line)) is not None:
            words = f"{error[1]}: {error[2] or ''}".rstrip(": ")
            failure = Failure(words[:_LONGEST], self._place(), self._thread, order)
            self._thread, self._inside = "", False
            return failure
        return None

    def _place(self) -> str:
        own = [frame for frame in self._frames if _LIBRARY.search(frame) is None]
        return next(reversed(own or self._frames), "")


def gave_up(failure: Failure) -> bool:
    """Whether it is only the end of waiting for somebody else."""
    return _GLOO.search(failure.error) is not None or _waited(failure.error)


def _waited(error: str) -> bool:
    return error.endswith(("Empty", "Full")) or "timed out" in error.lower() or "time out" in error.lower()


def failures_of(found: dict[int, Said]) -> Iterator[tuple[int, Failure]]:
    """(rank, failure) that are no mere end of waiting, the first first."""
    real = [(rank, each) for rank, one in found.items() for each in one.failures if not gave_up(each)]
    return iter(sorted(real, key=lambda pair: pair[1].order))
