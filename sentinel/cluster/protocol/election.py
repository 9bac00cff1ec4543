"""Decides which coordinator a node follows, and when it takes that role itself.

No two coordinators act at the same time, whatever the network loses, delays or lets through in one direction only:

    a node         follows one coordinator; for `LEASE_SECONDS` after each of its beats no other one, and never an
                   epoch below one that it followed. Its pulses name the epoch, and the stamp of the last beat
    a coordinator  counts on a node for less than that after it sent the beat that the node names. It acts while it
                   counts on more than half of the job's nodes. Where a node followed a higher epoch, or a stamp that it
                   has not reached, it raises its own epoch

Two coordinators can thus not count on the same node, and two majorities share a node. Stamps are of the coordinator's
own clock: clocks need not show the same time, only run at the same pace. A restarted daemon does not know which
coordinator it followed, and follows none for the same time. A node whose job is over while it is counted on follows no
other, and stays counted: a coordinator whose nodes have all ended still tells people how the job ended. A daemon that
is restarted also announces that it leaves; it is not counted on, as the next one may follow another coordinator.
"""

from __future__ import annotations

from sentinel.cluster.protocol.messages import Beat
from sentinel.errors import ProtocolError
from sentinel.node.addresses import MOST_ADDRESSES

LEASE_SECONDS = 5.0
"""Seconds without a beat after which a node is free to follow another coordinator, or to become one."""
COUNTED_SECONDS = 4.5
"""Seconds after a beat for which a coordinator counts on a node that names it. Shorter than the lease: the paces of two
clocks differ by less than a tenth."""
STAGGER_SECONDS = 2.0
"""Seconds that each node waits longer than the node before it, so that lower numbers come first."""
START_SECONDS = 30.0
"""Seconds for which nodes that have heard no coordinator since their start leave the role to node 0."""
TRIAL_SECONDS = 10.0
"""Seconds after which a coordinator that cannot act lets another one try."""
AHEAD_MILLISECONDS = 365 * 24 * 3600 * 1000
"""How far an epoch, or an incarnation, may be ahead of a node's clock. Bounded, since above the largest one that a
message can name there is no other."""


class Election:
    """One node's part in the election of the coordinator."""

    def __init__(self, node: int, candidates: int, now: float) -> None:
        """Start without a coordinator. `candidates`: how many nodes may be the coordinator, from node 0 on."""
        self._node, self.candidates = node, candidates
        self.leader: int | None = None
        """The node that is followed; None: none."""
        self.epoch, self.stamp = 0, 0.0
        """Epoch and stamp of the last beat that was followed."""
        self._free_at = now + LEASE_SECONDS
        self._due_at = self._free_at + STAGGER_SECONDS * (node + 1) + (START_SECONDS if node else 0.0)

    def follow(self, beat: Beat, now: float) -> bool:
        """Follow the sender of this beat, if that is allowed. Returns whether it is."""
        if beat.acting:
            self._due_at = max(self._due_at, now + LEASE_SECONDS)
        if (beat.epoch, beat.stamp) <= (self.epoch, self.stamp):
            return False  # an older one, or of a coordinator that has ended
        if beat.node != self.leader and now < self._free_at:
            return False
        self.leader, self.epoch, self.stamp = beat.node, beat.epoch, beat.stamp
        self._free_at = now + (0.0 if beat.leaving else LEASE_SECONDS)
        ahead = [one for one in beat.nodes if one.node < self._node and one.state == "alive" and one.node != beat.node]
        self._due_at = self._free_at + STAGGER_SECONDS * len(ahead)
        return True

    def is_due(self, now: float) -> bool:
        """Whether it is this node's turn to become the coordinator."""
        return self._node < self.candidates and now >= self._due_at

    def release(self, now: float) -> None:
        """Give up the coordinator's role. All other nodes get their turn first."""
        self.leader, self._free_at = None, now
        self._due_at = now + LEASE_SECONDS + STAGGER_SECONDS * self.candidates


def next_epoch(epoch: int, node: int, milliseconds: int = 0) -> int:
    """Return an epoch above this one that no other node has. `milliseconds`: by the clock, so that it is also above
    those of former daemons of this node."""
    return max(milliseconds, epoch // MOST_ADDRESSES + 1) * MOST_ADDRESSES + node


def check_epoch(epoch: int, seconds: float) -> None:
    """Raise ProtocolError for an epoch that no coordinator can have. `seconds`: by this node's clock."""
    if epoch // MOST_ADDRESSES > 1000 * seconds + AHEAD_MILLISECONDS:
        raise ProtocolError(f"epoch {epoch} is more than a year ahead of this node's clock; set the nodes' clocks")


def check_incarnation(incarnation: int, seconds: float) -> None:
    """Raise ProtocolError for an incarnation that no daemon can have: it is the time of its start in milliseconds.
    `seconds`: by this node's clock."""
    if incarnation > 1000 * seconds + AHEAD_MILLISECONDS:
        raise ProtocolError(
            f"incarnation {incarnation} is more than a year ahead of this node's clock; set the nodes' clocks"
        )


def find_leader(epoch: int) -> int:
    """Return the node whose epoch this is."""
    return epoch % MOST_ADDRESSES
