"""What the command line and `sentinel run` ask the daemon, and what they get."""

from __future__ import annotations

from typing import Any

from sentinel.wire.parts import PROTOCOL, Message, RunSummary


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


class Supervise(Message, frozen=True, kw_only=True, tag="supervise"):
    """A supervisor asks to be told of its job, from now on."""

    protocol: int = PROTOCOL
    mark: str
    """What the job's ranks say in their hello."""
    always: bool = False
    """It ends the job where it must, also one that does not say that it can go on from what it saved."""
    ending: int = 0
    """Signal that is about to be sent to the job, whose end is wanted; 0: none."""


class Standing(Message, frozen=True, kw_only=True, tag="standing"):
    """How its job stands: when a supervisor asks, when the job is to be ended, and when its last rank has gone."""

    run: str
    run_id: str
    attempt: int
    step: int | None = None
    """The user's step that was reported last."""
    step_seconds: float = 0.1
    resumes: bool = False
    ends: bool = False
    """The evidence of `alert` is in: end the job."""
    over: bool = False
    """No rank is left: this is the last word."""
    alert: str = ""
    """What explains the end, if anything: the alert's name, its case and its cause."""
    case: str = ""
    cause: str = ""
    sign: int | None = None
    """The user's step from which on the weights may be harmed: first sign of what is open and asks for a rollback."""
    raised: str = ""
    """The exception that ended a rank."""
    stopped: str = ""
    """Why the run was stopped at the end of its rollbacks."""
    summary: RunSummary | None = None
    """What it came to by now; None: no step of it was judged."""
