"""Sends messages to the ranks of one run, over their present connections."""

from __future__ import annotations

from collections.abc import Mapping

from sentinel import wire
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ranks.processes import Processes


class PeerLink:
    """The daemon's `RankLink` for one run."""

    def __init__(self, run_id: str, peers: Mapping[tuple[str, int], Peer], processes: Processes) -> None:
        """`peers`: the daemon's own live mapping, by run id and rank."""
        self._run_id, self._peers, self._processes = run_id, peers, processes

    def send(self, rank: int, message: wire.Message) -> None:
        """Queue a message for a rank. A rank that is not connected does not get it."""
        peer = self._peers.get((self._run_id, rank))
        if peer is not None:
            peer.send(message)

    def interrupt(self, process: int, signal: int) -> bool:
        """Send a signal to the process of a rank; False if that is impossible."""
        return self._processes.interrupt(process, signal)
