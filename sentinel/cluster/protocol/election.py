"""Which coordinator a node follows, and when it takes that role itself.

No two coordinators act at the same time, whatever the net loses, delays or lets through in one direction only:

    a node         follows one coordinator; for `LEASE_SECONDS` after each of its beats no other one, and never an
                   epoch below one that it followed. Its pulses name the epoch, and the stamp of the last beat
    a coordinator  counts on a node for less than that after it sent the beat that the node names. It acts while it
                   counts on more than half of the job's nodes. Where a node followed a higher epoch, or a stamp that it
                   has not reached, it raises its own

A node can thus not be counted on by two, and two majorities share a node. Stamps are of the coordinator's own clock:
clocks need not show the same time, only run at the same pace. A daemon that was started again does not know whom it
followed, and follows none for as long. A node whose job is over while it is counted on follows no other, and stays
counted: a coordinator whose nodes have all ended still tells people how it ended. A daemon that is restarted leaves in
order, too; it is not counted on, as the next one may follow another coordinator.
"""

from __future__ import annotations

from sentinel.cluster.protocol.messages import Beat
from sentinel.errors import ProtocolError
from sentinel.node.addresses import MOST_ADDRESSES

LEASE_SECONDS = 5.0
"""Without a beat, after which a node is free to follow another coordinator, or to become one."""
COUNTED_SECONDS = 4.5
"""Shorter: two clocks do not differ by a tenth of this time."""
STAGGER_SECONDS = 2.0
"""By which each node lets those with lower numbers come first."""
START_SECONDS = 30.0
"""For which nodes that have heard no coordinator since their start leave the role to node 0."""
TRIAL_SECONDS = 10.0
"""After which a coordinator that cannot act lets another one try."""
AHEAD_MILLISECONDS = 365 * 24 * 3600 * 1000
"""That an epoch, or an incarnation, may be ahead of a node's clock: above the largest that a message can name there is
none."""


class Election:
    """One node's part."""

    def __init__(self, node: int, candidates: int, now: float) -> None:
        """`candidates`: how many nodes may be the coordinator, from node 0 on."""
        self._node, self.candidates = node, candidates
        self.leader: int | None = None
        """The node that is followed."""
        self.epoch, self.stamp = 0, 0.0
        """Of the last beat that was followed."""
        self._free_at = now + LEASE_SECONDS
        self._due_at = self._free_at + STAGGER_SECONDS * (node + 1) + (START_SECONDS if node else 0.0)

    def follow(self, beat: Beat, now: float) -> bool:
        """Whether this beat is to be heeded."""
        if beat.acting:
            self._due_at = max(self._due_at, now + LEASE_SECONDS)
        if (beat.epoch, beat.stamp) <= (self.epoch, self.stamp):
            return False  # an older one, or of a coordinator that is no more
        if beat.node != self.leader and now < self._free_at:
            return False
        self.leader, self.epoch, self.stamp = beat.node, beat.epoch, beat.stamp
        self._free_at = now + (0.0 if beat.leaving else LEASE_SECONDS)
        ahead = [one for one in beat.nodes if one.node < self._node and one.state == "alive" and one.node != beat.node]
        self._due_at = self._free_at + STAGGER_SECONDS * len(ahead)
        return True

    def is_due(self, now: float) -> bool:
        """Whether this node is to become the coordinator."""
        return self._node < self.candidates and now >= self._due_at

    def release(self, now: float) -> None:
        """This node is the coordinator no more. All others get their turn first."""
        self.leader, self._free_at = None, now
        self._due_at = now + LEASE_SECONDS + STAGGER_SECONDS * self.candidates


def next_epoch(epoch: int, node: int, milliseconds: int = 0) -> int:
    """An epoch above this one that no other node has. `milliseconds`: by the clock, so that it is above those of former
    daemons of this node, too."""
    return max(milliseconds, epoch // MOST_ADDRESSES + 1) * MOST_ADDRESSES + node


def check_epoch(epoch: int, seconds: float) -> None:
    """Raises ProtocolError for an epoch that no coordinator has. `seconds`: by this node's clock."""
    if epoch // MOST_ADDRESSES > 1000 * seconds + AHEAD_MILLISECONDS:
        raise ProtocolError(f"epoch {epoch} is more than a year ahead of this node's clock; set the nodes' clocks")


def check_incarnation(incarnation: int, seconds: float) -> None:
    """Raises ProtocolError for an incarnation that no daemon has: it is the time of its start in milliseconds.
    `seconds`: by this node's clock."""
    if incarnation > 1000 * seconds + AHEAD_MILLISECONDS:
        raise ProtocolError(
            f"incarnation {incarnation} is more than a year ahead of this node's clock; set the nodes' clocks"
        )


def find_leader(epoch: int) -> int:
    """The node whose epoch this is."""
    return epoch % MOST_ADDRESSES
