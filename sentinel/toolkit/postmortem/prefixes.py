"""Finds whose a line of a log is, from the prefixes that launchers, collectors and torch write before it.

[rank7]: text                     torch >= 2.2, anywhere near the beginning; after any of the others
[default7]:text   [7]:text        torchrun --tee, --role: the local rank
7: text                           srun --label, the task
[1,7]<stderr>:text                mpirun --tag-output
(RayTrainWorker pid=12, ip=..)    Ray: a process; [rank=7, world_size=..] on one of its lines says which rank
[pod/job-worker-3/pytorch] text   kubectl logs --prefix: a pod, which may have several ranks
worker-1  | text                  docker compose: a container
2024-02-21T09:30:56.1Z stderr F   time stamps of container runtimes, GitHub, determined: they name no rank
"""

from __future__ import annotations

import re

import msgspec

_ZONE = r"(?:Z|[+-]\d\d:?\d\d)?"
_TIME = re.compile(
    rf"^(?:\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?{_ZONE}|\[\d{{4}}-\d\d-\d\d[T ][\d:.,]+{_ZONE}\]"
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?)(?: std(?:out|err) [FP])?(?: [0-9a-f]{8} \|\|)? "
)
_SOURCES = (
    re.compile(r"^(\([\w.:-]*(?: [\w.]+=[\w.:-]+,?)*? ?pid=\d+(?:, ip=[\w.:]+)?(?:, \w+=[^)]{0,60})?\)) ?"),
    re.compile(r"^\[(pod/[\w.-]+/[\w.-]+)\] "),
    re.compile(r"^([A-Za-z][\w.-]{0,60}) +\| "),
)
_STREAM = re.compile(r"^std(?:err|out): ")
_TASK = re.compile(r"^ {0,5}(\d{1,6}): ")
_LOCAL = re.compile(r"^\[(?!rank)(?:[a-z_]*[a-z_])?(\d{1,6})\]:[ \t]?(?=\S)")
_MPI = re.compile(r"^\[\d+,(\d{1,6})\](?:<std(?:out|err)>)?: ?")
_RANK = re.compile(r"^(?:\S+ ){0,6}?\S{0,80}?\[rank(\d{1,6})\]:[ \t]?")
_NAMED = re.compile(r"^\[rank[:= ] ?(\d{1,6})\]:?\s", re.IGNORECASE)
_SAYS = re.compile(r"\[rank=(\d{1,6}), world_size=\d+\]|GLOBAL_RANK: (\d{1,6}), MEMBER:")
_NCCL = re.compile(
    r"^.{0,300}?\[E[ \w:.]*ProcessGroupNCCL\.cpp:\d+\] \[(?:[^\]]*\(default_pg\) |PG 0 )?Rank (\d{1,6})\]"
)
_REPEATED = re.compile(r"(?:\x1b\[\d+m)* ?\[repeated \d+x across cluster\].*$")


class LogLine(msgspec.Struct, frozen=True):
    """A line without its prefixes, and what these say."""

    text: str
    rank: int | None = None
    """The rank that the line names as its own."""
    task: int | None = None
    """The task or local process that wrote it: a rank, if each task is one."""
    source: str = ""
    """The process, pod or container that wrote it."""
    says: int | None = None
    """The rank of its source, if the text says it."""


def split_prefix(line: str) -> LogLine:
    """Split a line into its text and its prefixes."""
    rank = task = None
    source, text = "", _REPEATED.sub("", line)
    for _ in range(4):  # several prefixes, in any order
        before = text
        text = _STREAM.sub("", _TIME.sub("", text, count=1), count=1)
        for pattern in _SOURCES:
            if (found := pattern.match(text)) is not None:
                source, text = found[1], text[found.end() :]
        for pattern in (_TASK, _MPI, _LOCAL):
            if (found := pattern.match(text)) is not None:
                task, text = int(found[1]), text[found.end() :]
        for pattern in (_RANK, _NAMED):
            if (found := pattern.match(text)) is not None:
                rank, text = int(found[1]), text[found.end() :]
        if text == before:
            break
    if rank is None and (found := _NCCL.match(text)) is not None:
        rank = int(found[1])
    says = _SAYS.search(text)
    return LogLine(text, rank, task, source, None if says is None else int(says[1] or says[2]))
