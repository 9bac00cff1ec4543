"""Reads what launchers write about the end of ranks: torchrun's footer, srun, mp.spawn, Lightning, DeepSpeed.

Sources of the formats: torch/distributed/elastic/multiprocessing/errors/__init__.py (torch 2.13),
lightning/fabric/strategies/launchers/subprocess_script.py, deepspeed/launcher/launch.py,
torch/multiprocessing/spawn.py; https://github.com/pytorch/pytorch/issues/116974 and
https://github.com/facebookresearch/ParlAI/issues/3084 (srun).
"""

from __future__ import annotations

import re
import signal

import msgspec

_ENTRY = re.compile(r"^\[\d+\]:\s*$")
"""An entry in torchrun's footer: its number is an index, not a rank."""
_FIELD = re.compile(r"^ {0,4}(time|host|rank|exitcode|error_file|traceback) *: ?(.*)$")
_WORDS = re.compile(r"^ {2}([A-Za-z_][\w.]*(?:: .*)?)$")
_AGENT = re.compile(r"failed \(exitcode: (-?\d{1,9})\) local_rank: \d+ \(pid: \d+\)")
_AGENT_PID = re.compile(r"^E\d{4} [\d:.]{8,20} (\d{1,9}) ")
"""The beginning of that line, with torchrun's own process: the second one of a process is of its second attempt."""
_TASKS = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_SPAWNED = re.compile(r"ProcessExitedException: process (\d+) terminated with (?:signal (\w+)|exit code (\d{1,9}))")
_CHILD = re.compile(r"^Child process with PID \d+ terminated with code (-?\d{1,9})\. Forcefully")
_DEEPSPEED = re.compile(r"\[launch\.py:\d+:sigkill_handler\].* exits with return code = (-?\d{1,9})")
_JOB = re.compile(r"error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+?) \*\*\*")
_OOM = re.compile(r"slurmstepd: error: Detected \d+ oom[_-]kill event")
_WORDS_OF_TASKS = {
    "Out Of Memory": -9, "Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6, "Terminated": -15,
    "Floating point exception": -8, "Illegal instruction": -4,
}  # fmt: skip
_ENDED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
"""Statuses of ranks that a launcher ended because another one had failed."""
_MOST_TASKS = 100_000


class Exit(msgspec.Struct, kw_only=True):
    """The end of a rank's process."""

    rank: int | None
    """The rank; None: its launcher does not say."""
    status: int
    """Exit status; negative: the signal."""
    first: bool = False
    """Whether its launcher says that it was the first on its node to fail."""
    error: str = ""
    """The exception that it raised, if the launcher says so."""
    time: str = ""
    order: int = 0
    launcher: str = "torchrun"

    @property
    def by_launcher(self) -> bool:
        """Whether its launcher ended it because another one had failed."""
        return not self.first and self.status in _ENDED

    def __str__(self) -> str:
        return describe_status(self.status)


def describe_status(status: int) -> str:
    """Return a status in words, such as `was ended by signal 9 (SIGKILL)` or `exited with status 3`."""
    number = -status if status < 0 else status - 128 if 128 < status < 128 + 65 else 0
    if number:
        try:
            return f"was ended by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"was ended by signal {number}"
    return f"exited with status {status}"


class Launchers:
    """Collects what launchers say in a log, from its lines without their prefixes."""

    def __init__(self) -> None:
        self.exits: list[Exit] = []
        self.job = ""
        """Why the whole job was ended, if the scheduler says so."""
        self.out_of_memory = False
        """Whether the scheduler says that the kernel ended processes because memory ran out."""
        self.elastic = False
        """Whether torchrun has written into the log: then tasks of srun are nodes, not ranks."""
        self.last_attempt = 0
        """Number of the line from which on the log is of torchrun's last attempt, as far as it is known."""
        self._agents: dict[tuple[str, str], int] = {}
        self._entry: Exit | None = None
        self._inside = self._root = False

    def feed(self, text: str, rank: int | None, order: int, source: str = "") -> bool:
        """Take a line; return whether it was a launcher's, and not a rank's own. `source`: the pod or the container
        that wrote it."""
        if self._footer(text, order):
            return True
        if (agent := _AGENT.search(text)) is not None:
            self.elastic = True
            self._begin_attempt(text, source, order)
            self._add(Exit(rank=None, status=int(agent[1]), first=True, order=order))
            return True
        if (tasks := _TASKS.match(text)) is not None:
            self._tasks(tasks[2], tasks[3], order)
        elif (spawned := _SPAWNED.search(text)) is not None:
            status = int(spawned[3]) if spawned[3] else -_number(spawned[2])
            self._add(Exit(rank=int(spawned[1]), status=status, first=True, order=order, launcher="mp.spawn"))
        elif (child := _CHILD.match(text)) is not None:
            self._add(Exit(rank=rank, status=int(child[1]), first=True, order=order, launcher="Lightning"))
        elif (ended := _DEEPSPEED.search(text)) is not None:
            # The command in that line is that of the last rank, whichever rank failed.
            self._add(Exit(rank=None, status=int(ended[1]), first=True, order=order, launcher="DeepSpeed"))
        elif (job := _JOB.search(text)) is not None:
            self.job = job[1].strip().lower()
        elif _OOM.search(text):
            self.out_of_memory = True
        else:
            return False
        return True

    def _begin_attempt(self, text: str, source: str, order: int) -> None:
        """Take the end of an attempt: what follows the one before, of the same torchrun, is of a later attempt."""
        if (agent := _AGENT_PID.match(text)) is not None:
            before = self._agents.get((source, agent[1]), -1)
            self._agents[source, agent[1]] = order
            if before >= self.last_attempt:
                self.last_attempt = before + 1
                self.exits = [one for one in self.exits if one.order > before]

    def _add(self, one: Exit) -> None:
        if len(self.exits) < _MOST_TASKS:
            self.exits.append(one)

    def _tasks(self, tasks: str, words: str, order: int) -> None:
        code = re.search(r"Exited with exit code (\d{1,9})", words)
        known = next((status for said, status in _WORDS_OF_TASKS.items() if words.startswith(said)), None)
        status = int(code[1]) if code is not None else known
        if status is None:
            return
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (last.isdigit() or not last) and len(first) < 7 > len(last):
                for task in range(int(first), min(int(last or first), int(first) + _MOST_TASKS) + 1):
                    first_hand = words.startswith("Out Of Memory")
                    self._add(Exit(rank=task, status=status, first=first_hand, order=order, launcher="srun"))

    def _footer(self, text: str, order: int) -> bool:
        """Take a line of torchrun's footer, from `Failures:` to the line of `=` below the root cause."""
        if text.startswith(("Root Cause (first observed failure):", "Failures:")) and len(text) < 60:
            self._inside, self._root, self.elastic = True, text.startswith("Root"), True
            self._entry = None
            self._agents.clear()  # it has ended: a process of the same number is another node's
            return True
        if not self._inside:
            return False
        if _ENTRY.match(text):
            self._entry = Exit(rank=None, status=0, first=self._root, order=order)
        elif text.startswith("=====") and self._root:
            self._inside = False
        elif self._entry is not None and (field := _FIELD.match(text)) is not None:
            self._field(self._entry, field[1], field[2].strip())
        elif self._entry is not None and (words := _WORDS.match(text)) is not None:
            self._entry.error = words[1][:2000]
        elif not text.startswith((" ", "-", "=")) and text.strip():
            self._inside = False  # the footer was cut off
            return False
        return True

    def _field(self, entry: Exit, name: str, value: str) -> None:
        number = re.match(r"(-?\d{1,9})\b", value)
        if name == "time":
            entry.time = value[:40]
        elif name == "rank" and number is not None:
            entry.rank = int(number[1])
        elif name == "exitcode" and number is not None:
            entry.status = int(number[1])
            self.exits = [one for one in self.exits if one.rank is not None or one.launcher != "torchrun"]
            self._add(entry)


def _number(name: str) -> int:
    try:
        return signal.Signals[name].value
    except KeyError:
        return 1
