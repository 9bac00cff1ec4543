"""What the command line and `sentinel run` ask the daemon, and what they get."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sentinel.wire.parts import PROTOCOL, Integer, Members, Message, Name, Ordinal, RunSummary


class Query(Message, frozen=True, kw_only=True, tag="query"):
    """What the command line asks of a live daemon."""

    protocol: int = PROTOCOL
    what: str
    arguments: dict[str, Any] = {}


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """And what it gets."""

    ok: bool
    content: Any = None
    reason: str = ""


class JobFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a start of the job ended before its time."""

    kind: Name
    """An alert, an exception's class, a signal, an exit status: what must be the same for a fault to be the same.
    Empty: another node's fault ended it."""
    words: Name
    step: Integer | None = None
    """The user's step that was reported last; None: it never came to one."""
    sign: Integer | None = None
    """The first step at which the weights may be harmed; None: they are not."""
    step_seconds: float = 0.1
    time: float | None = None
    """Unix seconds at which the alert fired; None: there is none."""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the job stands on one node of several, by its supervisor."""

    start: Ordinal = 0
    """Which start of the command it is, from 0: the same on all nodes."""
    attempt: Integer = 0
    """The last attempt of that start."""
    restarts: Integer = 0
    """That may be made in all."""
    fault: JobFault | None = None
    """Why this start ended; its processes are gone. None: it runs, or it is being ended."""
    status: Annotated[int, msgspec.Meta(ge=-64, le=255)] | None = None
    """The exit status of this start's command, as `subprocess` has it: a signal is negative. None: it runs, or its
    supervisor ended it."""
    allow_shrink: Ordinal = 0
    """The least nodes that the job may go on with; 0: it needs all."""
    members: Members = Members()
    """The nodes of this start."""
    promised: Integer = 0
    """The highest epoch of an order that was heard: it accepts none of a lower one. With `allow_shrink`."""
    accepted: Order | None = None
    """The last proposal that it agreed to. As long as it is about this start it may have been decided."""
    begun: Order | None = None
    """That by which it began this start: a coordinator that died may not have told all nodes of it. Earlier versions do
    not say."""
    mark: Name = ""
    """The supervisor's own. Node 0's is the job's. Earlier versions do not say."""


class Supervise(Message, frozen=True, kw_only=True, tag="supervise"):
    """A supervisor asks to be told of its job, from now on."""

    protocol: int = PROTOCOL
    mark: str
    """What the job's ranks say in their hello."""
    always: bool = False
    """End the job if needed, even if it does not say that it can go on from what it saved."""
    ending: int = 0
    """Signal that is about to be sent to the job, whose end is wanted; 0: none."""
    why: Name = ""
    """Why the supervisor itself ends the job; empty: it passes a signal on. Without `ending`: its command is gone, and
    ranks that it left behind are ended. Earlier versions do not say."""
    job: JobReport = JobReport()


class Order(Message, frozen=True, kw_only=True, tag="order"):
    """What the supervisors of a job over several nodes are to do, from its coordinator. It is about one start of the
    job, and repeated until that is over everywhere: a supervisor that has carried it out is past that start."""

    start: Ordinal
    does: Literal["end", "begin", "stop", "wait"]
    """`end` what runs; `begin` the next start, or what the policy says of `fault`, as all nodes have ended; `stop`: no
    node begins again; `wait`: no order, only why there is none."""
    attempt: Integer = 0
    """The last one of that start, on any node."""
    fault: JobFault | None = None
    """Why the start ended: the same for all nodes."""
    why: Name = ""
    """Who is waited for, or why the job is stopped."""
    epoch: Integer = 0
    """Of the coordinator."""
    nodes: Annotated[tuple[Ordinal, ...], msgspec.Meta(max_length=4096)] = ()
    """With `begin`, those that go on; with `end`, those that are proposed to; with `stop`, those that went on without
    this one. (): all."""
    job: Name = ""
    """Mark of node 0's supervisor."""


class Standing(Message, frozen=True, kw_only=True, tag="standing"):
    """How its job stands: when a supervisor asks, when the job is to be ended, and when its last rank has gone."""

    run: str
    run_id: str
    attempt: int
    step: int | None = None
    """The user's step that was reported last."""
    step_seconds: float = 0.1
    nodes: int = 1
    """That the job has ranks on, by its launcher."""
    resumes: bool = False
    ends: bool = False
    """The evidence of `alert` is in: end the job."""
    over: bool = False
    """No rank is left: this is the last word."""
    alert: str = ""
    """What explains the end, if anything: the alert's name, its case and its cause."""
    case: str = ""
    cause: str = ""
    time: float | None = None
    """Unix seconds at which that fired."""
    sign: int | None = None
    """The user's step from which on the weights may be harmed: first sign of what is open and asks for a rollback."""
    raised: str = ""
    """The exception that ended a rank."""
    stopped: str = ""
    """Why the run was stopped by Sentinel: its rollbacks are used up, or a rule has the action `stop`."""
    by_rule: bool = False
    """It was stopped by a rule: it is not to be started again."""
    summary: RunSummary | None = None
    """What it came to by now; None: no step of it was judged."""
