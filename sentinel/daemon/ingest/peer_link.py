"""The way to the ranks of one run, over the connections that there are at the moment."""

from __future__ import annotations

from collections.abc import Mapping

from sentinel import wire
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ranks.processes import Processes


class PeerLink:
    """A `RankLink` of the daemon."""

    def __init__(self, run_id: str, peers: Mapping[tuple[str, int], Peer], processes: Processes) -> None:
        """`peers`: the daemon's own, by run and rank, as they are at each moment."""
        self._run_id, self._peers, self._processes = run_id, peers, processes

    def send(self, rank: int, message: wire.Message) -> None:
        """Queue a message for a rank. A rank that is not connected does not get it."""
        peer = self._peers.get((self._run_id, rank))
        if peer is not None:
            peer.send(message)

    def interrupt(self, process: int, signal: int) -> bool:
        """Signal the process of a rank; False where that cannot be done."""
        return self._processes.interrupt(process, signal)
