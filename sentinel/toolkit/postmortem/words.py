"""Reads logs in which launchers mix the lines of ranks: what timed out, which exceptions occurred, how ranks ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from sentinel.toolkit.postmortem.launchers import Exit, Launchers
from sentinel.toolkit.postmortem.prefixes import LogLine, split_prefix
from sentinel.wire.flight_recorder import Collective, Flight, Group

_TIMEOUT = re.compile(
    r"\[(?:[^\]]* )?Rank (\d{1,6})\].*?Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(\d{1,18}), )?OpType=(\w+),(?: NumelIn=(\d{1,18}),)?.*?Timeout\(ms\)=(\d{1,15})\)"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(\d{1,9})(?: PG GUID [^\s(]*\(?(\w*)\)?)? Rank (\d{1,6})\].*?last enqueued (?:NCCL )?work: "
    r"(-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})"
)
"""A watchdog's line on a group's work. torch 2.2 to 2.5 write `NCCL work` and, before 2.4, no GUID."""
_THREAD = re.compile(r"^Exception in thread (.+?):?$")
_SPAWNED = re.compile(r"^-- Process (\d{1,6}) terminated with the following error:")
_BEGIN = re.compile(r"^\s*(?:Original )?Traceback \(most recent call last\)")
_ABORTED = re.compile(r"^\s*what\(\): +(.+)$")
"""The line that an uncaught C++ exception prints: the process ends by SIGABRT."""
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_LOGGED = re.compile(r"^(?:\[[EWIF]\d|\[[EWIF] |terminate called)")
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+)(?:, in (.*))?$')
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$")
"""The last line of a traceback: the only line that is not indented."""
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/|^<frozen ")
_SENTENCE = re.compile(r"\.\s")
_LONGEST = 2000
"""Most characters of an exception's message that are kept: a mismatch of collectives names both ranks' in 900."""
_CONTINUED = 4
"""Most lines of an exception's message after the first that are read."""
_LAUNCHERS_OWN = ("ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException", "SystemExit")
"""Exceptions that launchers raise because a rank failed."""
_OTHERS_FAULT = re.compile(
    r"closed by (?:remote )?peer|reset by peer|Broken pipe|remote process exited|ncclRemoteError|"
    r"NCCL communicator (?:was|has been) aborted|reached monitoredBarrier, but received errors|"
    r"failed to pass monitoredBarrier|got error: |failed to recv|recvValue failed|Connection was likely closed|"
    r"pair closure|Some NCCL operations have failed|taking the entire process down|Connection refused|"
    r"Rendezvous(?:Closed|Connection)Error|collective operation timeout|detected by watchdog|"
    r"Got completion from peer|ActorDiedError"
)
"""Words of a rank that noticed another one's end."""
_WAITED = re.compile(
    r"Timed out waiting|wait timeout after|timed out in blocking wait|[Ss]ocket [Tt]imeout|client socket has timed out|"
    r"(?:Empty|Full)$|timed out|time out",
    re.IGNORECASE,
)
_BARRIER = re.compile(r"Ranks? ([\d, ]{1,2000}?) failed to pass monitoredBarrier")
_FINGERPRINT = re.compile(
    r"Rank (\d{1,6}) is running (?:inconsistent )?collective: CollectiveFingerPrint\((?:SequenceNumber=(\d+),? ?)?"
    r"OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\])?"
)


class Failure(msgspec.Struct, frozen=True):
    """An exception in a log."""

    error: str
    """Its type and its message."""
    place: str = ""
    """`file:line in function` of the innermost frame of user code, otherwise the innermost."""
    thread: str = ""
    """The thread that it ended; empty: the main thread, or it was only printed."""
    order: int = 0
    """Number of the line at which it ends: the first of all ranks comes first."""
    time: float = 0.0
    """Unix seconds, if an error file has them."""
    library: bool = False
    """Whether no frame is the user's own."""
    before: str = ""
    """The exception during which it was raised."""

    def __str__(self) -> str:
        return self.describe(self.error)

    @property
    def brief(self) -> str:
        """The failure in words, with only the first sentence of its message."""
        return self.describe(_SENTENCE.split(self.error, maxsplit=1)[0][:400])

    def describe(self, error: str) -> str:
        """Return the failure in words, with `error` as its message."""
        who = f"its thread {self.thread} ended with " if self.thread else "it raised "
        after = f" (after {self.before})" if self.before else ""
        return f"{who}{error}{after}" + (f", at {self.place}" if self.place else "")

    @property
    def others_fault(self) -> bool:
        """Whether its message says that another rank failed first."""
        return _OTHERS_FAULT.search(self.error) is not None

    @property
    def waited(self) -> bool:
        """Whether its message says that it gave up waiting for another process."""
        return "DataLoader" not in self.error and _WAITED.search(self.error) is not None

    @property
    def secondary(self) -> bool:
        """Whether something else failed before."""
        return self.others_fault or self.waited


class Said(msgspec.Struct):
    """What one rank's lines say."""

    flight: Flight | None = None
    """The flight record that its watchdog printed when it gave up."""
    failures: list[Failure] = []


class Fingerprint(msgspec.Struct, frozen=True):
    """A collective that a rank ran, printed by TORCH_DISTRIBUTED_DEBUG=DETAIL."""

    op: str
    shape: str = ""
    seq: str = ""

    def __str__(self) -> str:
        return self.op.lower() + (f" of [{self.shape}]" if self.shape else "")


class JobLog(msgspec.Struct):
    """What a job's logs say."""

    said: dict[int, Said] = {}
    unplaced: list[tuple[str, Failure]] = []
    """Pairs (process, failure) whose rank is not known."""
    exits: list[Exit] = []
    barrier: dict[int, int] = {}
    """Ranks that did not pass a monitored barrier, each with the rank that said so."""
    fingerprints: dict[int, Fingerprint] = {}
    noticed: set[int] = set()
    """Ranks with a line that says that another one failed, or did not come."""
    sizes: tuple[int, int] | None = None
    """(bytes that a rank received, bytes it expected), as gloo reports collectives that do not match."""
    ranks: set[int] = set()
    """Ranks with any line."""
    job: str = ""
    out_of_memory: bool = False
    earlier: list[tuple[int | str, Failure]] = []
    """Pairs (rank or process, failure) of attempts before torchrun's last one."""

    def add(self, other: JobLog, start: int) -> None:
        """Add what another file says, whose lines come after `start`."""
        for rank, each in other.said.items():
            known = self.said.setdefault(rank, Said())
            known.flight = known.flight or each.flight
            known.failures += [_later(failure, start) for failure in each.failures]
        self.earlier += other.earlier
        self.unplaced += [(source, _later(failure, start)) for source, failure in other.unplaced]
        for one in other.exits:
            one.order += start
        self.exits += other.exits
        self.barrier |= other.barrier
        self.fingerprints |= other.fingerprints
        self.noticed |= other.noticed
        self.sizes = self.sizes or other.sizes
        self.ranks |= other.ranks
        self.job, self.out_of_memory = self.job or other.job, self.out_of_memory or other.out_of_memory


def _later(failure: Failure, start: int) -> Failure:
    return msgspec.structs.replace(failure, order=failure.order + start)


def read_log(lines: Iterable[str], rank: int | None = None) -> JobLog:
    """Read a log. `rank`: the rank in the file's name, for lines that name none; None: there is none."""
    split = [split_prefix(line.rstrip("\n")) for line in lines]
    launchers, log = Launchers(), JobLog()
    own = [not launchers.feed(line.text, line.rank, order, line.source) for order, line in enumerate(split)]
    whose = _Whose(split, rank, elastic=launchers.elastic)
    readers: dict[int | str, _Traceback] = {}
    last = launchers.last_attempt
    for order, (line, kept) in enumerate(zip(split, own, strict=True)):
        key: int | str = whose.find(line)
        if not kept:
            for failure in readers.pop(key, _Traceback(alone=False)).finish():
                _keep(log, key, failure, last)
            continue
        if isinstance(key, int):
            log.ranks.add(key)
        if order >= last:
            _add_named(log, line.text, key)
        for failure in readers.setdefault(key, _Traceback(alone=isinstance(key, int))).feed(line.text, order):
            _keep(log, key, failure, last)
        if isinstance(key, int) and order >= last:
            _watchdog(log, line.text, key)
            if _OTHERS_FAULT.search(line.text):
                log.noticed.add(key)
    for key, reader in readers.items():
        for failure in reader.finish():
            _keep(log, key, failure, last)
    log.exits, log.job, log.out_of_memory = launchers.exits, launchers.job, launchers.out_of_memory
    if launchers.elastic:  # a task of srun is a node
        log.exits = [one for one in log.exits if one.launcher != "srun"]
    return log


class _Whose:
    """The ranks of sources and tasks, as far as a log names them."""

    def __init__(self, lines: list[LogLine], rank: int | None, *, elastic: bool) -> None:
        named: dict[str, set[int]] = {}
        for line in lines:
            if line.source and (told := line.rank if line.says is None else line.says) is not None:
                named.setdefault(line.source, set()).add(told)
        single = {source: next(iter(ranks)) for source, ranks in named.items() if len(ranks) == 1}
        self._sources = {} if elastic else single  # torchrun and its ranks are in one pod
        several = len({line.rank for line in lines if line.rank is not None}) > 1
        self._tasks_are_ranks = not elastic
        self._rank = None if several or elastic else rank

    def find(self, line: LogLine) -> int | str:
        """Return the rank of a line, or the name of its source if the rank is not known."""
        if line.rank is not None:
            return line.rank
        if line.source in self._sources:
            return self._sources[line.source]
        if line.task is not None:
            return line.task if self._tasks_are_ranks else f"local rank or task {line.task}"
        return line.source or (self._rank if self._rank is not None else "")


def _keep(log: JobLog, key: int | str, failure: Failure, last: int) -> None:
    """Add a failure. `last`: the line at which the last attempt begins."""
    if re.split(r"[:\s]", failure.error, maxsplit=1)[0].rpartition(".")[2] in _LAUNCHERS_OWN:
        return
    spawned = re.match(r"process (\d{1,6})$", failure.thread)
    if spawned is not None:
        key, failure = int(spawned[1]), msgspec.structs.replace(failure, thread="")
    if failure.order < last:
        log.earlier.append((key, failure))
    elif isinstance(key, int):
        log.said.setdefault(key, Said()).failures.append(failure)
    else:
        log.unplaced.append((key, failure))


def _add_named(log: JobLog, text: str, key: int | str) -> None:
    """Add what a line says about other ranks: barriers, sizes, fingerprints."""
    if (barrier := _BARRIER.search(text)) is not None:
        teller = key if isinstance(key, int) else -1
        log.barrier |= {int(each): teller for each in re.findall(r"\d{1,6}", barrier[1])}
    if log.sizes is None and (sizes := _SIZES.search(text)) is not None:
        log.sizes = int(sizes[1][:18]), int(sizes[2][:18])
    for found in _FINGERPRINT.finditer(text):
        shape = (found[4] or "").replace(" ", "")
        known = log.fingerprints.get(int(found[1]))
        if known is None or (shape and not known.shape):
            log.fingerprints[int(found[1])] = Fingerprint(found[3], shape, found[2] or "")


def _watchdog(log: JobLog, text: str, rank: int) -> None:
    known = log.said.get(rank)
    if (timeout := _TIMEOUT.search(text)) is not None and int(timeout[1]) == rank and timeout[2]:
        known = log.said.setdefault(rank, Said())
        known.flight = known.flight or _read_timeout(timeout)
    elif (status := _STATUS.search(text)) is not None and int(status[3]) == rank and known and known.flight:
        known.flight = _describe_flight(known.flight, status)


def _read_timeout(match: re.Match[str]) -> Flight:
    seq, op, milliseconds = int(match[2]), match[3].lower(), int(match[5])
    sizes = () if match[4] is None else ((int(match[4]),),)
    one = Collective(group="0", seq=seq, op=op, sizes=sizes, timeout=milliseconds * 1e-3)
    return Flight({"0": Group("0", "", (), seq, seq - 1)}, (one,))


def _describe_flight(flight: Flight, match: re.Match[str]) -> Flight:
    """Return the flight record with the group's own name, which the line after the time-out has."""
    [one] = flight.collectives
    if int(match[4]) < one.seq or int(match[5]) >= one.seq:
        return flight
    group = Group(match[1], match[2] or "", (), int(match[4]), int(match[5]))
    return Flight({group.name: group}, (msgspec.structs.replace(one, group=group.name),))


class _Traceback:
    """Finds tracebacks in the lines of one rank, or of one process."""

    def __init__(self, *, alone: bool) -> None:
        """`alone`: the lines are of one rank only."""
        self._thread, self._frames, self._inside = "", list[str](), False
        self._most = _CONTINUED if alone else 0
        self._found: Failure | None = None
        """The last exception; the lines after it may belong to its message, or to one raised during it."""
        self._left = 0
        self._before = ""

    def feed(self, line: str, order: int) -> Iterator[Failure]:
        """Yield the exceptions that this line completes."""
        if (thread := _THREAD.match(line)) is not None:
            yield from self.finish()
            self._thread = thread[1]
        elif (spawned := _SPAWNED.match(line)) is not None:
            yield from self.finish()
            self._thread = f"process {spawned[1]}"
        elif _CHAINED.match(line):
            if self._found is not None:
                self._before, self._found = self._found.error[:160], None
        elif _BEGIN.match(line):
            if line.lstrip().startswith("Original") and self._found is not None:
                self._before, self._found = self._found.error[:160], None
            yield from self.finish()
            self._inside, self._frames = True, []
        elif (aborted := _ABORTED.match(line)) is not None:
            yield from self.finish()
            yield Failure(f"C++ exception: {aborted[1]}"[:_LONGEST], order=order)
        elif self._inside:
            self._in_traceback(line, order)
        elif _LOGGED.match(line):
            self._left = 0
        elif self._found is not None and line.strip() and self._left:
            self._left -= 1
            words = f"{self._found.error} {line.strip()}"[:_LONGEST]
            self._found = msgspec.structs.replace(self._found, error=words)

    def _in_traceback(self, line: str, order: int) -> None:
        if (frame := _FRAME.match(line)) is not None:
            self._frames.append(f"{frame[1]}:{frame[2]}" + (f" in {frame[3]}" if frame[3] else ""))
        elif (error := _ERROR.match(line)) is not None:
            words = f"{error[1]}: {error[2] or ''}".rstrip(": ")[:_LONGEST]
            own = [frame for frame in self._frames if _LIBRARY.search(frame) is None]
            place = next(reversed(own or self._frames), "")
            self._found = Failure(
                words, place, self._thread, order, library=not own and bool(self._frames), before=self._before
            )
            self._thread, self._inside, self._left, self._before = "", False, self._most, ""

    def finish(self) -> Iterator[Failure]:
        """Yield the last exception, which is complete now."""
        if self._found is not None:
            yield self._found
            self._found, self._before = None, ""


def failures_of(found: dict[int, Said]) -> Iterator[tuple[int, Failure]]:
    """Yield (rank, failure) of failures other than the end of waiting for a rank, in their order."""
    real = [(rank, each) for rank, one in found.items() for each in one.failures if not each.secondary]
    return iter(sorted(real, key=lambda pair: pair[1].order))
