"""Send alerts to the training terminal and to receivers.

    incident -> Notifier -> silenced?  -> the training terminal, at once
                                       -> Pipeline: one queue per receiver -> outbox -> Receiver.deliver

One file per receiver, in `receivers/`. Other packages add theirs under the entry point group `sentinel.receivers`: a
callable that gets the `sentinel.config.settings.ReceiverSettings` of a settings file and returns a Receiver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from sentinel.config.links import fill_link
from sentinel.config.settings import Grouping
from sentinel.diagnose.case import Case
from sentinel.notify.limiter import Limiter

Event = Literal["fired", "updated", "resolved", "rolled_back"]
"""What happened to an incident; `updated`: ranks or layers joined it, or an action ended."""

Fault = Literal["connection", "timeout", "rate limited", "server error", "rejected", "settings", "internal"]
"""Why a delivery failed, as one of a few values: a label of metrics."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A run's host, its user, and the absolute addresses of pages about it. Empty: not known."""

    host: str = ""
    """Host of the daemon; for a job over several nodes, of the coordinator."""
    user: str = ""
    dashboard: str = ""
    page: str = ""
    report: str = ""
    runbook: str = ""
    """Address of the runbook, with `{section}` in it."""

    @property
    def link(self) -> str:
        """Address of the run, for receivers that have room for one address."""
        return self.dashboard or self.page or self.report

    def link_section(self, section: str) -> str:
        """Return the address of a section of the runbook; empty where it has none."""
        return fill_link(self.runbook, {"section": section}) if section else ""


UNKNOWN_ORIGIN = Origin()


class Outgrown(NamedTuple):
    """What a case was until it became more severe."""

    severity: str
    quiet: bool
    """Whether it was in `Message.quiet`."""
    time: float
    """When it became more severe, in unix seconds."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver gets about one group: one problem of a run, or a rule that is never part of a problem."""

    run: str
    run_id: str
    alert: str
    """Alert of the incident that the receiver got first."""
    problem_id: str = ""
    """See `Case`."""
    cases: tuple[Case, ...]
    """Cases that fire, and cases that ended since the last message (all ended ones if they are one problem), the oldest
    first."""
    quiet: frozenset[str] = frozenset()
    """Ids of consequences that came after the receiver got the problem, with a case at least as severe."""
    outgrown: Mapping[str, Outgrown] = {}
    """Id -> what a case was that has become more severe since the receiver got it."""
    escalated: bool = False
    """Whether a more severe case has come, a case has become more severe, or a silence of one has ended, since the
    receiver got the problem."""
    reference: str = ""
    """The receiver's own id of its last message about this group; empty: it has none that is still about the group."""
    repeated: bool = False
    """Whether all of it was sent before, and is sent again because the incidents go on."""
    unchanged: frozenset[str] = frozenset()
    """Ids of cases that the receiver already got in their present state."""
    held: tuple[str, ...] = ()
    """Names of alerts that wait behind this one because of a rate limit."""
    lost: tuple[str, ...] = ()
    """Names of alerts that could not be sent to this receiver, and why, since the last message that it took."""
    origin: Origin = UNKNOWN_ORIGIN

    @property
    def group(self) -> str:
        """Unique key of the group, the same in every message about it, by which a receiver groups messages."""
        return f"{self.run_id}/{self.problem_id or self.alert}"

    @property
    def firing(self) -> bool:
        """Whether any case still fires."""
        return any(case.state == "firing" for case in self.cases)

    @property
    def leading(self) -> Case:
        """The case that the group is about now: the most severe one that fires, otherwise the latest news."""
        firing = [case for case in self.cases if case.state == "firing"]
        news = [case for case in self.cases if case.id not in self.quiet]
        return max(firing, key=lambda case: case.level, default=(news or self.cases)[-1])

    @property
    def key(self) -> str:
        """Hash of `group`, for receivers that limit a key's length."""
        return hashlib.blake2b(self.group.encode(errors="replace"), digest_size=16).hexdigest()


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one attempt to deliver a message."""

    fault: Fault | None = None
    """Why it failed; None: the message was delivered."""
    detail: str = ""
    """Explanation for people. Holds no secret: no URL, no token, nothing that the receiver answered."""
    retry: bool = False
    """Whether the same message may be accepted later."""
    after: float = 0.0
    """Seconds for which the receiver asked for no further message."""
    reference: str = ""
    """The receiver's own id of the message: passed back to it with the next one about the group."""


DELIVERED = Delivery()


class Receiver(Protocol):
    """A channel that gets messages about alerts."""

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once. No retry, no pause: the pipeline has both. It is cancelled when its time is up."""

    async def close(self) -> None:
        """Release what is held open: no more messages will come."""


class Route(NamedTuple):
    """A receiver of the settings, and which alerts it gets."""

    name: str
    receiver: Receiver
    wants: Callable[[Case], bool]
    timeout: float
    """Most seconds for one delivery."""
    grouping: Grouping
    limiter: Limiter
    """The receiver's rate limits, shared by all runs."""
    edits: bool = False
    """Whether another message about a group edits the first one, without a second notification."""
    tracks: bool = False
    """See `ReceiverKind`."""
