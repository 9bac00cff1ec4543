"""What a run's membership gets from its node: the supervisor of the ranks, and the handling of the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from sentinel import wire
from sentinel.cluster.lead import JobJudge
from sentinel.cluster.protocol.messages import Digest


class NodeSupervisor(NamedTuple):
    """Access to the `sentinel run` that started the job's ranks on this node."""

    find_report: Callable[[], wire.JobReport | None]
    """Returns the state of the job on this node; None: no supervisor reports."""
    give_order: Callable[[wire.Order], None]
    find_mark: Callable[[], str]
    """Returns the mark of the supervisor: each start of `sentinel run` has its own."""


class StepReporter(Protocol):
    """Sends this node's steps to the coordinator, which judges them, as long as it is heard."""

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""

    def make_digest(self, now: float) -> Digest | None:
        """Return the digest to send now; None: nothing is new."""

    def confirm(self, upto: int, now: float) -> None:
        """Take note that the coordinator has all steps up to this one; -1: none."""

    def tick(self, now: float, *, joined: bool) -> None:
        """Do what is due; called once a second. `joined`: whether the coordinator is heard, or was a moment ago."""


class StepHandling(NamedTuple):
    """The two ways to handle this node's steps. Each call begins one and ends the other."""

    report: Callable[[], StepReporter]
    """Begins to send the steps to the coordinator."""
    judge: Callable[[], JobJudge]
    """Begins to judge the steps here, since this node is the coordinator."""
