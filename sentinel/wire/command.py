"""Requests of the command line and of `sentinel run` to the daemon, and its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sentinel.wire.parts import PROTOCOL, Integer, Members, Message, Name, Ordinal, RunSummary


class Query(Message, frozen=True, kw_only=True, tag="query"):
    """A question of the command line to a live daemon."""

    protocol: int = PROTOCOL
    what: str
    arguments: dict[str, Any] = {}


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """The daemon's answer to a `Query`."""

    ok: bool
    content: Any = None
    reason: str = ""


class JobFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a start of the job ended early."""

    kind: Name
    """An alert, an exception's class, a signal or an exit status; two faults with the same kind count as the same.
    Empty: another node's fault ended the start."""
    words: Name
    step: Integer | None = None
    """The user's step that was reported last; None: the start reported no step."""
    sign: Integer | None = None
    """The first step at which the weights may be harmed; None: they are not harmed."""
    step_seconds: float = 0.1
    time: float | None = None
    """Unix seconds at which the alert fired; None: there is no alert."""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the job on one node of several, from its supervisor."""

    start: Ordinal = 0
    """Which start of the command this is, from 0: the same on all nodes."""
    attempt: Integer = 0
    """The last attempt of that start."""
    restarts: Integer = 0
    """How many restarts may be made in all."""
    fault: JobFault | None = None
    """Why this start ended; its processes are gone. None: it runs, or it is being ended."""
    status: Annotated[int, msgspec.Meta(ge=-64, le=255)] | None = None
    """The exit status of this start's command, as `subprocess` has it: a signal is negative. None: it runs, or its
    supervisor ended it."""
    allow_shrink: Ordinal = 0
    """The least number of nodes that the job may go on with; 0: it needs all."""
    members: Members = Members()
    """The nodes of this start."""
    promised: Integer = 0
    """The highest epoch of an order that this supervisor heard: it accepts none with a lower one. With
    `allow_shrink`."""
    accepted: Order | None = None
    """The last proposal that this supervisor agreed to. As long as it concerns this start, it may have been decided."""
    begun: Order | None = None
    """The order by which this supervisor began this start: a coordinator that died may not have sent it to all nodes.
    Earlier versions do not send it."""
    mark: Name = ""
    """The supervisor's own mark. The mark of node 0's supervisor is the job's. Earlier versions do not send it."""


class Supervise(Message, frozen=True, kw_only=True, tag="supervise"):
    """A supervisor asks for reports on its job, from now on."""

    protocol: int = PROTOCOL
    mark: str
    """The mark that the job's ranks send in their hello."""
    always: bool = False
    """End the job if needed, even if it does not announce that it can go on from what it saved."""
    ending: int = 0
    """The signal that is about to be sent to the job, as its end is wanted; 0: none."""
    why: Name = ""
    """Why the supervisor itself ends the job; empty: it passes a signal on. Without `ending`: its command is gone, and
    ranks that it left behind are ended. Earlier versions do not say."""
    left_out: bool = False
    """Whether that is because the job goes on without this node. Earlier versions do not say."""
    job: JobReport = JobReport()


class Order(Message, frozen=True, kw_only=True, tag="order"):
    """An order from a job's coordinator to its supervisors, in a job over several nodes. It concerns one start of the
    job and is repeated until that start is over everywhere: a supervisor that has carried it out is past that start."""

    start: Ordinal
    does: Literal["end", "begin", "stop", "wait"]
    """`end` the current start; `begin` the next start, or what the policy says about `fault`, as all nodes have ended;
    `stop`: no node begins again; `wait`: no order, only the reason why there is none."""
    attempt: Integer = 0
    """The last attempt of that start, on any node."""
    fault: JobFault | None = None
    """Why the start ended: the same for all nodes."""
    why: Name = ""
    """Which nodes are waited for, or why the job is stopped."""
    epoch: Integer = 0
    """Epoch of the coordinator."""
    nodes: Annotated[tuple[Ordinal, ...], msgspec.Meta(max_length=4096)] = ()
    """With `begin`, the nodes that go on; with `end`, the nodes that the proposal goes to; with `stop`, the nodes that
    went on without this one. (): all."""
    job: Name = ""
    """Mark of node 0's supervisor."""


class Standing(Message, frozen=True, kw_only=True, tag="standing"):
    """The state of a supervisor's job: sent when a supervisor asks, when the job is to be ended, and when its last rank
    has gone."""

    run: str
    run_id: str
    attempt: int
    step: int | None = None
    """The user's step that was reported last."""
    step_seconds: float = 0.1
    nodes: int = 1
    """How many nodes the job has ranks on, according to its launcher."""
    resumes: bool = False
    ends: bool = False
    """Whether the evidence of `alert` is complete and the job shall be ended now."""
    over: bool = False
    """Whether no rank is left: this is the last message."""
    alert: str = ""
    """What explains the end, if anything: the alert's name, its case and its cause."""
    case: str = ""
    cause: str = ""
    time: float | None = None
    """Unix seconds at which the alert fired."""
    sign: int | None = None
    """The user's step from which on the weights may be harmed: the first sign of an open incident that asks for a
    rollback."""
    raised: str = ""
    """The exception that ended a rank."""
    stopped: str = ""
    """Why Sentinel stopped the run: its rollbacks are used up, or a rule has the action `stop`."""
    by_rule: bool = False
    """Whether a rule stopped the run: it must not be started again."""
    summary: RunSummary | None = None
    """The summary of the run so far; None: no step of it was judged."""
