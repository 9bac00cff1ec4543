"""Who gets alerts, and how.

    incident -> Notifier -> silenced?  -> the training terminal, at once
                                       -> Pipeline: one queue a receiver -> outbox -> Receiver.deliver

One file a receiver, in `receivers/`. Other packages bring theirs under the entry point group `sentinel.receivers`: a
callable that gets the `sentinel.config.settings.ReceiverSettings` of a settings file and returns a Receiver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import msgspec

from sentinel.config.links import fill_link
from sentinel.config.settings import Grouping
from sentinel.diagnose.case import Case
from sentinel.notify.limiter import Limiter

Event = Literal["fired", "updated", "resolved", "rolled_back"]
"""`updated`: ranks or layers joined the incident, or an action ended."""

Fault = Literal["connection", "timeout", "rate limited", "server error", "rejected", "settings", "internal"]
"""Why a delivery failed, in one of a few words: a label of metrics."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is, whose it is, and where people read of it, by absolute addresses. Empty: not known."""

    host: str = ""
    """The daemon's: of a job over several nodes the coordinator's."""
    user: str = ""
    dashboard: str = ""
    page: str = ""
    report: str = ""
    runbook: str = ""
    """With `{section}` in it."""

    @property
    def link(self) -> str:
        """Where people see the run, for receivers that have room for one address."""
        return self.dashboard or self.page or self.report

    def link_section(self, section: str) -> str:
        """The address of a section of the runbook; empty where it has none."""
        return fill_link(self.runbook, {"section": section}) if section else ""


UNKNOWN_ORIGIN = Origin()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver gets about one group: one problem of a run, or a rule that is never part of a problem."""

    run: str
    run_id: str
    alert: str
    """Of the incident that the receiver was told of first."""
    problem_id: str = ""
    """See `Case`."""
    cases: tuple[Case, ...]
    """Cases that fire, and cases that ended since the last message (all ended ones if they are one problem), the oldest
    first."""
    quiet: frozenset[str] = frozenset()
    """Ids of consequences that came after the receiver got the problem, by a case at least as severe."""
    escalated: bool = False
    """Whether the receiver got the problem before, and a more severe case has come."""
    reference: str = ""
    """What the receiver called the last message about this group; empty: it has none that is still about it."""
    repeated: bool = False
    """Whether all of it was sent before, and is sent again because it goes on."""
    unchanged: frozenset[str] = frozenset()
    """Ids of cases that the receiver was told of as they are now."""
    held: tuple[str, ...] = ()
    """Names of alerts that wait behind this one because of a rate limit."""
    lost: tuple[str, ...] = ()
    """Names of alerts that this receiver was not told of, and why, since the last message that it took."""
    origin: Origin = UNKNOWN_ORIGIN

    @property
    def group(self) -> str:
        """Unique, and the same in every message about this group: a receiver's key for what belongs together."""
        return f"{self.run_id}/{self.problem_id or self.alert}"

    @property
    def firing(self) -> bool:
        """Whether any of it still fires."""
        return any(case.state == "firing" for case in self.cases)

    @property
    def leading(self) -> Case:
        """The case that the group is about now: the most severe one that fires, otherwise the latest news."""
        firing = [case for case in self.cases if case.state == "firing"]
        news = [case for case in self.cases if case.id not in self.quiet]
        return max(firing, key=lambda case: case.level, default=(news or self.cases)[-1])

    @property
    def key(self) -> str:
        """Hash of `group`, for those who limit its length."""
        return hashlib.blake2b(self.group.encode(errors="replace"), digest_size=16).hexdigest()


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """How it went."""

    fault: Fault | None = None
    """None: it is there."""
    detail: str = ""
    """For people. Holds no secret: no URL, no token, nothing that the receiver answered."""
    retry: bool = False
    """Whether the same message may be accepted later."""
    after: float = 0.0
    """Seconds that the receiver asked to be left alone for."""
    reference: str = ""
    """What it calls the message: handed back to it with the next one about the group."""


DELIVERED = Delivery()


class Receiver(Protocol):
    """A channel that gets messages about alerts."""

    async def deliver(self, message: Message) -> Delivery:
        """Try once. No retry, no pause: the pipeline has both. It is cancelled when its time is up."""

    async def close(self) -> None:
        """No more will come."""


class Route(NamedTuple):
    """A receiver of the settings, and which alerts it gets."""

    name: str
    receiver: Receiver
    wants: Callable[[Case], bool]
    timeout: float
    """Seconds for one delivery."""
    grouping: Grouping
    limiter: Limiter
    """Shared by all runs."""
    edits: bool = False
    """Whether another message about a group edits the first one, without a second notification."""
