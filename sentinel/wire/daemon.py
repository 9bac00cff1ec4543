"""Messages from the daemon to a rank."""

from __future__ import annotations

from typing import Any

from sentinel.wire.parts import PROTOCOL, Message, RunSummary


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The daemon accepts the hello."""

    protocol: int = PROTOCOL
    version: str
    notes: tuple[str, ...] = ()
    keeps: bool = False
    """Whether `Kept` will follow: until then the rank holds on to what it sent, for the daemon that comes after this
    one."""
    signals: bool = True
    """Whether the daemon can signal this process, and so have its stacks dumped at any time."""
    heeds_stop_on: bool = False
    """Whether `Hello.stop_on` is obeyed: earlier versions ignore it."""
    trackers: tuple[str, ...] = ()
    """Names of the trackers that the settings switch on: rank 0 marks incidents there."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The daemon rejects the hello. The rank prints the reason once and does not connect again."""

    protocol: int = PROTOCOL
    reason: str


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """Text for the training terminal, sent to rank 0. `alert` is passed to the user's `monitor.on_alert`. Either may be
    empty: a line that is no alert, or an alert that is not shown in the terminal."""

    id: str = ""
    """Key of the notice: the rank shows an id only once, as a restarted daemon cannot know what was shown. Empty:
    always shown."""
    text: str
    alert: dict[str, Any] = {}


class Kept(Message, frozen=True, kw_only=True, tag="kept"):
    """What came in the first `frames` frames of this connection is in the history, and will not be asked for again."""

    frames: int


class Closing(Message, frozen=True, kw_only=True, tag="closing"):
    """Answer to a goodbye, before everything is written: the summary of the run. None: no step of it was judged."""

    summary: RunSummary | None


class Attend(Message, frozen=True, kw_only=True, tag="attend"):
    """Something looks odd: sample tiers 1 and 2 at every step for `steps` steps."""

    steps: int
    rare: bool = False
    """Whether to sample tier 3 as well, at some of these steps."""


class Withhold(Message, frozen=True, kw_only=True, tag="withhold"):
    """A rule that may roll back is pending or firing: take no snapshot in the next `steps` steps. 0: take them
    again."""

    steps: int


class DaemonCost(Message, frozen=True, kw_only=True, tag="daemon-cost"):
    """The daemon's own cost, which counts against the budget of the rank's governor."""

    share: float
    """CPU seconds per second that the daemon uses for this rank."""


class Spacing(Message, frozen=True, kw_only=True, tag="spacing"):
    """The common spacing of all ranks by tier, from step `at` on. Powers of two."""

    at: int
    tiers: dict[str, int]


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Promise to stop at the exit of step `at` and wait for the verdict; `to` is the snapshot to restore, -1: none."""

    id: int
    at: int
    to: int
    stops: bool = False
    """Whether the run ends there instead of going back. Sent only where all ranks say `Hello.takes_stop`."""


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """All ranks promised: restore the snapshot, or end the run."""

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
    """End the run at the exit of the next step, for this reason. Sent only where the user armed a rollback."""

    reason: str


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """Every rank holds the snapshot of `seq`: it is worth more than a snapshot that some ranks lack. Sent in runs of
    several ranks."""

    seq: int


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """The snapshot of `seq` is good, and every rank holds it: write it to disk, in the background."""

    id: int
    seq: int
    step: int
    """The user's number of that step."""
    run: str
    run_id: str
    attempt: int
    ranks: tuple[int, ...] = ()
    """All ranks of this node, rising, where the run has ranks on other nodes: these write a part. (): all ranks are
    here."""
    on_all: tuple[int, ...] = ()
    """Steps whose snapshot is known to be held by all nodes."""
    floor: int = -1
    """The step before which no node needs a snapshot: all know that they hold enough later ones."""


class CancelPublish(Message, frozen=True, kw_only=True, tag="cancel-publish"):
    """A rank could not write its part of this `Publish`: the others need not wait for it. Earlier versions ignore this
    message, and wait."""

    id: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """Ask for evidence on demand: stacks, a census, a provenance run."""

    id: int
    what: str
    arguments: dict[str, Any] = {}


class FindMeeting(Message, frozen=True, kw_only=True, tag="find-meeting"):
    """Find out where the nodes of this job meet, by the process group's store: rank 0 writes its answer there, with
    what the first rank of node 1 wrote before; the first ranks of the other nodes read it. Sent only to those ranks."""

    nodes: int
    """Number of nodes of the job."""
    address: str = ""
    """The address at which this node's daemon listens already; empty: it does not listen."""
    port: int = 0
    """The port for it to listen on otherwise; 0: any free one."""
    secret: str = ""
    """The secret for the other nodes; empty: each node has one of its own."""
    offers: bool = False
    """Whether this daemon would listen at a second address, that of node 1. Earlier versions neither send this nor do
    it."""
