"""What the daemon says to a rank."""

from __future__ import annotations

from typing import Any

from sentinel.wire.parts import PROTOCOL, Message, RunSummary


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The hello fits."""

    protocol: int = PROTOCOL
    version: str
    notes: tuple[str, ...] = ()
    keeps: bool = False
    """`Kept` will follow: the rank holds on to what it sent until then, for the daemon that comes after this one."""
    signals: bool = True
    """The daemon can signal this process, and so have its stacks dumped at any time."""
    heeds_stop_on: bool = False
    """`Hello.stop_on` is heeded: earlier versions pass over it."""
    trackers: tuple[str, ...] = ()
    """Names of the trackers that the settings switch on: rank 0 marks incidents there."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The hello does not fit. The rank prints the reason once and stays away."""

    protocol: int = PROTOCOL
    reason: str


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """Text for the training terminal; rank 0 gets it. `alert` is what `monitor.on_alert` hands to the user.

    Either may be empty: a line that is no alert, an alert of which the terminal is not told."""

    id: str = ""
    """What was shown under this id is not shown again: a daemon that was restarted cannot know. Empty: always shown."""
    text: str
    alert: dict[str, Any] = {}


class Kept(Message, frozen=True, kw_only=True, tag="kept"):
    """What came in the first `frames` frames of this connection is in the history, and will not be asked for again."""

    frames: int


class Closing(Message, frozen=True, kw_only=True, tag="closing"):
    """Answer to a goodbye, before all is kept: what the run came to. None: no step of it was judged."""

    summary: RunSummary | None


class Attend(Message, frozen=True, kw_only=True, tag="attend"):
    """Something looks odd: sample tiers 1 and 2 at every step for `steps` steps."""

    steps: int
    rare: bool = False
    """And tier 3 at some of them."""


class Withhold(Message, frozen=True, kw_only=True, tag="withhold"):
    """A rule that may roll back is pending or firing: take no snapshot in the next `steps` steps. 0: it is over."""

    steps: int


class DaemonCost(Message, frozen=True, kw_only=True, tag="daemon-cost"):
    """What the daemon itself costs: it counts against the budget of the rank's governor."""

    share: float
    """CPU seconds a second that it uses for this rank."""


class Spacing(Message, frozen=True, kw_only=True, tag="spacing"):
    """One spacing for all ranks, from step `at` on. Powers of two, by tier."""

    at: int
    tiers: dict[str, int]


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Promise to stop at the exit of step `at` and wait for the verdict; `to` is the snapshot meant, -1: none."""

    id: int
    at: int
    to: int
    stops: bool = False
    """Not to go back but to leave the run there. Sent only where all ranks say `Hello.takes_stop`."""


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """All ranks promised: restore, or leave."""

    id: int
    skip_batches: int = 0
    lr_factor: float = 1.0
    reason: str = ""
    """Why the run is stopped, where it is."""


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Not all ranks promised: go on as if nothing had been asked."""

    id: int
    reason: str = ""


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End the run at the exit of the next step, in these words. Sent only where the user armed a rollback."""

    reason: str


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """Every rank holds the snapshot of `seq`: it is worth more than one that some ranks lack. Sent to runs of several
    ranks."""

    seq: int


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """The snapshot of `seq` is good, and every rank holds it: write it to disk, in the background."""

    id: int
    seq: int
    step: int
    """The user's number of it."""
    run: str
    run_id: str
    attempt: int
    ranks: tuple[int, ...] = ()
    """All ranks of this node, rising, where the run has others: these write a part. (): all are here."""
    on_all: tuple[int, ...] = ()
    """Steps whose snapshot all nodes are known to hold."""
    floor: int = -1
    """Steps before it are not needed by any node: all know that they hold enough later ones."""


class CancelPublish(Message, frozen=True, kw_only=True, tag="cancel-publish"):
    """A rank could not write its part of this `Publish`: the others need not wait for it. Earlier versions pass it
    over, and wait."""

    id: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """On-demand evidence: stacks, a census, a provenance run."""

    id: int
    what: str
    arguments: dict[str, Any] = {}


class FindMeeting(Message, frozen=True, kw_only=True, tag="find-meeting"):
    """Find out where the nodes of this job meet, by the process group's store: rank 0 writes it there, with what the
    first rank of node 1 wrote before; the first ranks of the other nodes read it. Sent to those alone."""

    nodes: int
    """Of the job."""
    address: str = ""
    """Where this node's daemon listens already; empty: nowhere."""
    port: int = 0
    """For it to listen on, else; 0: any free one."""
    secret: str = ""
    """For the other nodes; empty: all have one of their own."""
    offers: bool = False
    """Whether it would listen at a second address, of node 1. An earlier version does not say, and does not."""
