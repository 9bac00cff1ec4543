"""What a run's membership is given of its node: the supervisor of its ranks, and what becomes of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from sentinel import wire
from sentinel.cluster.lead import JobJudge
from sentinel.cluster.protocol.messages import Digest


class NodeSupervisor(NamedTuple):
    """The `sentinel run` that has the job's ranks on this node."""

    find_report: Callable[[], wire.JobReport | None]
    """How the job stands here; None: no supervisor says."""
    give_order: Callable[[wire.Order], None]
    find_mark: Callable[[], str]
    """Which one it is: another start of `sentinel run` has another."""


class StepReporter(Protocol):
    """Has the coordinator judge this node's steps, as long as it is heard."""

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""

    def make_digest(self, now: float) -> Digest | None:
        """What is to be sent now."""

    def confirm(self, upto: int, now: float) -> None:
        """The coordinator has all up to this step; -1: nothing."""

    def tick(self, now: float, *, joined: bool) -> None:
        """Once a second. `joined`: whether the coordinator is heard, or was a moment ago."""


class StepHandling(NamedTuple):
    """What becomes of this node's steps. Each call begins it, and ends what was done before."""

    report: Callable[[], StepReporter]
    """They are sent to the coordinator."""
    judge: Callable[[], JobJudge]
    """This node is the coordinator."""
